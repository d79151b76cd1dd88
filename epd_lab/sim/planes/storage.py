"""A simulated shared disk: slow, full, torn, mixed up, forgetful; as `Storage` sees one.

It keeps the bytes of the production file format, and the production code parses and verifies them,
so a fault here is that of a disk: some other bytes.  The disk outlives every process, and all of
them share it.

`torn` keeps the beginning of a file, as a crash of the host before its pages were written does;
`rotten` flips a byte.  `mixed` returns the whole file of another key, as a restored backup can;
`lost` has forgotten it; `full` refuses a write.  It lies, too.  `undurable` reports a file as
written, and lists it, and it has no bytes.  `stale` returns an earlier build's file of the key, of
the same length and with a sum that holds; `flipped` reads another byte than there is.
Probabilities are per call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from epd.transport.base import Buffer, StorageUsage
from epd.transport.checksum import checksum_of
from epd.transport.files import whole_file
from epd.transport.region import byte_views
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.core.rand import KeyedRandom
from epd_lab.sim.world import World


@dataclass(frozen=True, slots=True)
class DiskConditions:
    """How the disk behaves."""

    latency_s: float = 0.0005
    nbytes_per_s: float = 1e6
    slow: float = 0.0  # a call takes `slow_s`
    slow_s: float = 3.0
    torn: float = 0.0
    rotten: float = 0.0
    mixed: float = 0.0
    lost: float = 0.0
    full: float = 0.0
    undurable: float = 0.0
    stale: float = 0.0
    flipped: float = 0.0


class Disk:
    """Files by key, for all processes of a world."""

    def __init__(self, world: World, conditions: DiskConditions, capacity_nbytes: int) -> None:
        self.world = world
        self.conditions = conditions
        self.capacity_nbytes = capacity_nbytes
        self.files: dict[str, bytes] = {}  # the least recently used first
        self.num_evicted = 0
        self.random: KeyedRandom = world.random.stream("disk")

    def heal(self) -> None:
        self.conditions = DiskConditions()

    def happens(self, what: str, *key: object) -> bool:
        """Draw, and count what really happens."""
        drawn: bool = self.random.chance(getattr(self.conditions, what), what, *key)
        self.world.fired[f"disk {what}"] += drawn
        return drawn

    def write(self, key: str, content: bytes, serial: object) -> None:
        if self.happens("torn", key, serial):
            content = content[: self.random.below(len(content), "tear", key, serial)]
        if self.happens("rotten", key, serial) and content:
            at = self.random.below(len(content), "rot", key, serial)
            content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        self.files.pop(key, None)
        self.files[key] = b"" if self.happens("undurable", key, serial) else content
        used = self.nbytes()
        while used > self.capacity_nbytes:
            oldest = next(iter(self.files))
            used -= len(self.files.pop(oldest))
            self.num_evicted += 1

    def read(self, key: str, serial: object) -> bytes | None:
        if key in self.files and self.happens("lost", key, serial):
            del self.files[key]
        if key not in self.files:
            return None
        if len(self.files) > 1 and self.happens("mixed", key, serial):
            others = [other for other in self.files if other != key]
            return self.files[others[self.random.below(len(others), "other", key, serial)]]
        content = self.files[key] = self.files.pop(key)
        if content and self.happens("stale", key, serial):
            return _of_an_earlier_build(content)
        if content and self.happens("flipped", key, serial):
            at = self.random.below(len(content), "flip", key, serial)
            content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        return content

    def nbytes(self) -> int:
        return sum(map(len, self.files.values()))


class SimStorage:
    """The `Storage` port of one simulated process."""

    tier = "disk"

    def __init__(self, disk: Disk, process: SimProcess) -> None:
        self._disk = disk
        self._process = process
        self._serial = 0

    async def get(self, key: str, note: bytes, nbytes: int) -> Buffer | None:
        serial = await self._wait(nbytes, "get")
        content = self._disk.read(key, serial)
        if content is None:
            return None
        found = whole_file.parse_whole(memoryview(content), verify=True)
        if found is None or found.note != note or found.payload.nbytes != nbytes:
            return None
        return found.payload

    async def put(self, key: str, note: bytes, value: Sequence[Buffer]) -> bool:
        payload = b"".join(byte_views(value))
        serial = await self._wait(len(payload), "put")
        if self._disk.happens("full", key, serial):
            return False
        checksum = checksum_of([memoryview(payload)])
        content = whole_file.head_of(note, len(payload), checksum) + payload
        self._disk.write(key, content, serial)
        return True

    async def listing(self) -> Sequence[str] | None:
        await self._wait(0)
        return list(self._disk.files)

    def usage(self) -> StorageUsage:
        disk = self._disk
        return StorageUsage(disk.nbytes(), disk.capacity_nbytes, disk.num_evicted)

    async def close(self) -> None:
        """Nothing is open."""

    async def _wait(self, nbytes: int, call: str = "") -> tuple[str, int]:
        """One call's time; returns the call's identity.  Raises what was planned."""
        late = bool(call) and self._process.breaks.meet(call)
        self._serial += 1
        serial = (self._process.name, self._serial)
        disk = self._disk
        took_s = disk.conditions.latency_s + nbytes / disk.conditions.nbytes_per_s
        if disk.happens("slow", *serial):
            took_s = disk.conditions.slow_s
        await asyncio.sleep(took_s * (1 + disk.random.uniform("time", *serial)))
        if late:
            raise self._process.breaks.error(call)
        return serial


def _of_an_earlier_build(content: bytes) -> bytes:
    """The same key, shape and length, other numbers of another type, and a sum of its own."""
    found = whole_file.parse_whole(memoryview(content), verify=False)
    if found is None:
        return content
    payload = bytes(byte ^ 0x55 for byte in found.payload)
    key, _, rest = found.note.split(b" ", 2)
    note = b" ".join((key, b"other", rest))
    return whole_file.head_of(note, len(payload), checksum_of([memoryview(payload)])) + payload
