"""`epd bench hop --device cuda`: rows and KV from one GPU's process to another's, over `cuda`.

Rows are written from where they lie: one way, from "ready" to `Written`, one write at a time, and
as many a second as with several in flight.  A hand-over is the KV of a prompt that lies scattered
in the sender's pool: written at once, or one group of layers after the other as a prompt's leave.
It ends when the receiver has the message and its device has passed the scatter into its pool.
Every byte is compared on both sides of each measure.  CPU time is that of both processes.  With one
GPU both processes are on it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import torch

from epd.engine.device.streams import DeviceStreams
from epd.engine.language.kv_hop import KvHop
from epd.engine.language.kv_pool import KvPool
from epd.messages import KvLayout, RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.backends import BACKENDS
from epd.transport.base import Region, TransferEngine, Written
from epd_lab.bench import machine
from epd_lab.bench.transports.words import Remote, answer_all

LAYOUT = KvLayout(  # of Qwen3-VL-4B
    num_layers=36,
    block_size=16,
    num_kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
    block_nbytes=2_359_296,
)
POOL_BLOCKS = 1024
NUM_BLOCKS = 132  # 2106 tokens: a prompt with an image of 1920x1080, 311 MB
ROWS_NBYTES = (1 << 20, 16 << 20, 42 << 20, NUM_BLOCKS * LAYOUT.block_nbytes)
MODULE = "epd_lab.bench.transports.hop_device"


@dataclass(frozen=True, slots=True)
class Figure:
    what: str
    megabytes: float
    in_flight: int
    p50_us: float
    p99_us: float
    gb_per_s: float
    cpu_us: float  # of both processes, for each


class HopEnd:
    """One process: an engine, a pool with fixed contents, and memory that is written to."""

    def __init__(self) -> None:
        self.engine: TransferEngine
        self.pool: KvPool
        self.hop: KvHop
        self.region: Region

    async def open(self, name: str, index: int) -> Sequence[object]:
        """Gives the descriptor of its memory."""
        torch.cuda.set_device(index)
        settings = BackendSettings(name, time.time_ns(), device=f"cuda:{index}")
        self.engine = BACKENDS["cuda"].make(settings)
        self.pool = KvPool(LAYOUT, POOL_BLOCKS, torch.bfloat16, f"cuda:{index}")
        self.hop = KvHop(self.pool, DeviceStreams(torch.device("cuda", index)))
        num_slots = NUM_BLOCKS * LAYOUT.slots_per_block
        self.region = self.engine.allocate("kv", num_slots, LAYOUT.slot_nbytes)
        self.hop.attach(self.region.buffer)
        self.fill(0)
        remote = self.region.remote
        return [getattr(remote, name) for name in remote.__struct_fields__]

    def fill(self, seed: int) -> None:
        """The same on every device of a kind."""
        generator = torch.Generator(self.pool.memory.device).manual_seed(seed)
        self.pool.memory.view(torch.int64).random_(generator=generator)
        torch.cuda.synchronize()

    @functools.cache  # noqa: B019 - a process has one
    def blocks(self, seed: int) -> tuple[int, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randperm(POOL_BLOCKS, generator=generator)[:NUM_BLOCKS].tolist())

    def rest(self) -> None:
        """Nothing is asked but the CPU seconds that come with every answer."""

    def land(self, seed: int) -> int:
        """What was written becomes blocks of the pool; when the device has passed that, in ns."""
        self.hop.land(self.region.buffer, range(NUM_BLOCKS), self.blocks(seed))
        passed = torch.cuda.Event()
        passed.record()
        passed.synchronize()
        return time.perf_counter_ns()

    def is_equal(self, source: int, target: int) -> bool:
        """The blocks of the second seed hold what the sender has in those of the first; nothing
        of it is left."""
        found = self.pool.memory[list(self.blocks(target))].clone()
        torch.as_tensor(self.region.buffer, device=found.device).zero_()
        self.fill(0)
        return bool(torch.equal(found, self.pool.memory[list(self.blocks(source))]))

    def landed(self, nbytes: int) -> bool:
        """The written memory begins with what the sender's pool begins with."""
        self.fill(0)
        tensor = torch.as_tensor(self.region.buffer[:nbytes], device=self.pool.memory.device)
        return bool(torch.equal(tensor, self.pool.memory.view(-1)[:nbytes]))

    async def close(self) -> None:
        await self.engine.close()


async def _timed(
    what: str, nbytes: int, in_flight: int, count: int, receiver: Remote,
    once: Callable[[], Awaitable[int]],
) -> Figure:  # fmt: skip
    """`once` gives the time of its end, in ns."""
    took_ns: list[int] = []

    async def one_after_the_other() -> None:
        while len(took_ns) < count:
            began_ns = time.perf_counter_ns()
            took_ns.append(await once() - began_ns)

    for _ in range(3):
        await once()
    await receiver.ask("rest")
    cpu_s, began_s = time.process_time() + receiver.cpu_s, time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(in_flight)))
    all_s = time.perf_counter() - began_s
    await receiver.ask("rest")
    cpu_s = time.process_time() + receiver.cpu_s - cpu_s
    ranked = sorted(took_ns)
    p50_us = statistics.median(ranked) / 1e3
    alone = nbytes / p50_us / 1e3
    return Figure(
        what, round(nbytes / 1e6, 1), in_flight, round(p50_us, 1),
        round(ranked[int(len(ranked) * 0.99)] / 1e3, 1),
        round(alone if in_flight == 1 else len(ranked) * nbytes / all_s / 1e9, 1),
        round(cpu_s / len(ranked) * 1e6, 1),
    )  # fmt: skip


async def measure(count: int) -> list[Figure]:
    receiver, sender = Remote(MODULE), HopEnd()
    place = await receiver.ask("open", name="receiver", index=min(1, torch.cuda.device_count() - 1))
    await sender.open("sender", 0)
    target = msgspec.convert(place, RemoteRegion)

    async def write(source: Any, slots: Sequence[int]) -> int:
        outcome = await sender.engine.write([source], target, slots)
        if not isinstance(outcome, Written):
            raise RuntimeError(str(outcome))  # noqa: TRY004 - not a type error
        return time.perf_counter_ns()

    size = LAYOUT.slots_per_block
    places = [block * size + group for block in sender.blocks(1) for group in range(size)]

    async def hand_over(num_parts: int) -> int:
        for part in range(num_parts):
            slots = range(part, len(places), num_parts)
            await write(sender.hop.source([places[slot] for slot in slots]), slots)
        usable_ns: int = await receiver.ask("land", seed=2)
        return usable_ns

    found = []
    for nbytes in ROWS_NBYTES:
        rows = sender.pool.memory.view(-1)[:nbytes]
        for in_flight in (1, 4, 16):
            slots = range(-(-nbytes // target.slot_nbytes))
            once = functools.partial(write, rows, slots)
            found.append(await _timed("rows", nbytes, in_flight, count, receiver, once))
        if not await receiver.ask("landed", nbytes=nbytes):
            raise RuntimeError(f"{nbytes} bytes did not land as they were sent")
    nbytes = NUM_BLOCKS * LAYOUT.block_nbytes
    for what, num_parts in (("KV", 1), ("KV/4", size)):
        once = functools.partial(hand_over, num_parts)
        found.append(await _timed(what, nbytes, 1, count, receiver, once))
        if not await receiver.ask("is_equal", source=1, target=2):
            raise RuntimeError("the blocks did not land as they were sent")
    await sender.close()
    await receiver.ask("close")
    await receiver.close()
    return found


def table(figures: list[Figure]) -> str:
    lines = ["what       MB  fly     p50 us     p99 us     GB/s   cpu us"]
    lines += [
        f"{one.what:<5}{one.megabytes:>8}{one.in_flight:>5}{one.p50_us:>11.1f}{one.p99_us:>11.1f}"
        f"{one.gb_per_s:>9.1f}{one.cpu_us:>9.1f}"
        for one in figures
    ]
    return "\n".join(lines)


def run(*, as_json: bool, count: int = 200) -> int:
    import uvloop

    if reason := BACKENDS["cuda"].lacks():
        print(reason, file=sys.stderr)
        return 1
    figures = uvloop.run(measure(count))
    cards = machine.gpus()
    found = {"gpus": cards, "rows": [asdict(figure) for figure in figures]}
    told = "\n".join([*machine.counted(cards), table(figures)])
    print(json.dumps(found) if as_json else told)
    return 0


async def main(fd: int) -> None:
    await answer_all(fd, HopEnd())


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(int(sys.argv[1])))
