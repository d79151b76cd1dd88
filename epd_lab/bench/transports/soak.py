"""`epd bench soak`: thousands of items through one transport, with either side killed at random.

There are two processes, an owner of slots and a writer.  This one leases the slots, as a role
would, and kills (SIGKILL) or freezes (SIGSTOP) one of the two now and then.  An item is delivered
when the owner has found its checksum in the slot.  As in a role, a slot is free at once after a
definite failure; after `WriteUnknown`, or when the writer died, only once the fence holds.  An item
that was not delivered is written again, under another attempt, whose bytes differ.

Every item is delivered; no sum is wrong; no byte lands in a free slot.  At the end all slots are
free, and neither files nor descriptors nor memory have grown.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from epd.transport.checksum import checksum_of
from epd_lab.bench import machine
from epd_lab.bench.transports.soak_process import content
from epd_lab.bench.transports.words import Gone, Remote

OWNER, WRITER = "soak-owner", "soak-writer"
FENCE_TIMEOUT_S = 40.0
FREEZE_S = 0.3
IN_FLIGHT = 8
SLOT_NBYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class SoakHost:
    """`enter`: see `Remote`; `address`: where the other one reaches it."""

    enter: tuple[str, ...] = ()
    address: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class SoakPlan:
    backend: str
    items: int = 10_000
    kills: int = 60
    in_flight: int = IN_FLIGHT
    slots: int = 12
    slot_nbytes: int = SLOT_NBYTES
    seed: int = 1
    samples: int = 10  # of memory and descriptors over the run
    owner: SoakHost = SoakHost()
    writer: SoakHost = SoakHost()


@dataclass(eq=False, slots=True)
class SoakLife:
    """One process of one side."""

    name: str
    remote: Remote
    epoch: int = 0
    pid: int = 0  # as its host counts
    host_id: str = ""
    target: Any = None
    free: asyncio.Queue[int] = field(default_factory=asyncio.Queue)


class Soak:
    def __init__(self, plan: SoakPlan, directory: str) -> None:
        self._plan = plan
        self._directory = directory
        self._random = random.Random(plan.seed)
        self._lives: dict[str, asyncio.Future[SoakLife]] = {}
        self.counts: Counter[str] = Counter()
        self.allocate_s: list[float] = []
        self.samples: list[dict[str, Any]] = []
        self._numbers = iter(range(plan.items))
        self._delivered = asyncio.Condition()
        self._secret = secrets.token_hex(32)

    # --- processes --------------------------------------------------------------------------------

    async def _spawn(self, name: str) -> SoakLife:
        plan = self._plan
        host = plan.owner if name == OWNER else plan.writer
        life = SoakLife(name, Remote("epd_lab.bench.transports.soak_process", host.enter))
        began = await life.remote.ask(
            "start", backend=plan.backend, instance_id=name, directory=self._directory,
            host=host.address, secret=self._secret,
        )  # fmt: skip
        life.epoch, life.pid, life.host_id = began["epoch"], began["pid"], began["host_id"]
        if name == OWNER:
            owned = await life.remote.ask("own", slots=plan.slots, slot_nbytes=plan.slot_nbytes)
            life.target = owned["remote"]
            self.allocate_s.append(owned["allocate_s"])
            for slot in range(plan.slots):
                life.free.put_nowait(slot)
        return life

    def _begin(self, name: str) -> None:
        self._lives[name] = asyncio.ensure_future(self._spawn(name))

    async def _kill(self, name: str) -> None:
        life = await self._lives[name]
        await life.remote.kill()
        self._begin(name)

    async def _freeze(self, name: str) -> None:
        life = await self._lives[name]
        life.remote.signal(signal.SIGSTOP)
        await asyncio.sleep(FREEZE_S)
        life.remote.signal(signal.SIGCONT)

    async def _chaos(self) -> None:
        plan = self._plan
        moments = sorted(self._random.sample(range(plan.items), plan.kills))
        for moment in moments:
            await self._until(moment)
            await asyncio.sleep(self._random.uniform(0, 0.01))  # in the middle of something
            name = self._random.choice((OWNER, WRITER))
            if self._random.random() < 0.25:
                self.counts[f"{name} frozen"] += 1
                await self._freeze(name)
            else:
                self.counts[f"{name} killed"] += 1
                await self._kill(name)

    async def _until(self, items: int) -> None:
        async with self._delivered:
            await self._delivered.wait_for(lambda: self.counts["delivered"] >= items)

    # --- items ------------------------------------------------------------------------------------

    async def _worker(self) -> None:
        for item in self._numbers:
            kind = self._random.random()
            top = 4096 if kind < 0.4 else 256 << 10 if kind < 0.9 else self._plan.slot_nbytes
            nbytes = self._random.randint(1, top)
            attempt = 1
            while not await self._deliver(item, attempt, nbytes):
                attempt += 1
            async with self._delivered:
                self.counts["delivered"] += 1
                self._delivered.notify_all()

    async def _deliver(self, item: int, attempt: int, nbytes: int) -> bool:
        """One attempt; the slot is free, or gone with its owner, when it returns."""
        owner, writer = await self._lives[OWNER], await self._lives[WRITER]
        slot = await self._lease(owner)
        if slot is None:  # its next life is not begun yet, and nothing above has waited
            await asyncio.sleep(0.01)
            return False
        try:
            if not await owner.remote.ask("take", slot=slot):
                self.counts["bytes in a free slot"] += 1
            try:
                kind, said = await writer.remote.ask(
                    "write", target=owner.target, slot=slot, item=item, attempt=attempt,
                    nbytes=nbytes,
                )  # fmt: skip
            except Gone:
                kind, said = "writer died", ""
            self.counts[kind] += 1
            if kind == "Written":
                found = await owner.remote.ask("check", slot=slot, nbytes=nbytes)
                expected = checksum_of([memoryview(content(item, attempt, nbytes).data)])
                self.counts["wrong bytes"] += int(not found == expected == said)
                owner.free.put_nowait(slot)
                return True
            if kind != "WriteFailed" and not await self._fence(owner, writer, kind):
                self.counts["slots never fenced"] += 1
                return False
            await owner.remote.ask("free", slot=slot)
            owner.free.put_nowait(slot)
        except Gone:
            self.counts["owner died"] += 1
        await asyncio.sleep(0.01)
        return False

    async def _lease(self, owner: SoakLife) -> int | None:
        while not owner.remote.gone:
            try:
                return await asyncio.wait_for(owner.free.get(), 1.0)
            except TimeoutError:
                continue
        return None

    async def _fence(self, owner: SoakLife, writer: SoakLife, kind: str) -> bool:
        """Until neither side can touch the other's memory; Gone if the owner dies meanwhile."""
        until_s = time.monotonic() + FENCE_TIMEOUT_S
        pairs = [(owner, writer)] if kind == "writer died" else [(writer, owner), (owner, writer)]
        for asked, other in pairs:
            while True:
                try:
                    if await asked.remote.ask(
                        "fence", instance_id=other.name, epoch=other.epoch, pid=other.pid,
                        host_id=other.host_id,
                    ):  # fmt: skip
                        break
                except Gone:
                    if asked is owner:
                        raise
                    break  # the writer's source went with it; the owner must still fence it
                if time.monotonic() > until_s:
                    return False
                await asyncio.sleep(0.05)
                await self._meet()
        if kind != "writer died" and not writer.remote.gone:
            await self._renew(writer)  # fenced means barred: it goes on as another life
        return True

    async def _meet(self) -> None:
        """The lives that there are connect: between hosts, a later one attests an earlier's end.
        Items may all wait for that."""
        with contextlib.suppress(Gone):
            owner, writer = await self._lives[OWNER], await self._lives[WRITER]
            await writer.remote.ask("meet", target=owner.target)

    async def _renew(self, writer: SoakLife) -> None:
        current = self._lives[WRITER]
        if current.done() and current.result() is writer:
            self._begin(WRITER)
            await writer.remote.kill()

    # --- the whole --------------------------------------------------------------------------------

    async def _watch(self) -> None:
        plan = self._plan
        for index in range(plan.samples + 1):
            at = plan.items * index // plan.samples
            await self._until(at)
            sample: dict[str, Any] = {"items": at}
            for name in (OWNER, WRITER):
                try:
                    life = await self._lives[name]
                    sample[name] = await life.remote.ask("state")
                except Gone:
                    continue
            self.samples.append(sample)
            print(f"{plan.backend}: {at} items, {dict(self.counts)}", file=sys.stderr)

    async def run(self) -> dict[str, Any]:
        plan, began_s = self._plan, time.monotonic()
        self._begin(OWNER)
        self._begin(WRITER)
        workers = (self._worker() for _ in range(plan.in_flight))
        await asyncio.gather(self._chaos(), self._watch(), *workers)
        owner, writer = await self._lives[OWNER], await self._lives[WRITER]
        free = owner.free.qsize()
        for life in (writer, owner):
            await life.remote.close()
        return {
            "backend": plan.backend, "items": plan.items, "took_s": time.monotonic() - began_s,
            "counts": dict(self.counts), "slots": plan.slots, "slots_free": free,
            "allocate_s": max(self.allocate_s), "samples": self.samples, "left": self._left(),
        }  # fmt: skip

    def _left(self) -> list[str]:
        here = os.listdir(self._directory)
        return here + [name for name in os.listdir("/dev/shm") if name.startswith("epd-soak-")]


def judge(found: dict[str, Any]) -> list[str]:
    """What does not hold, in sentences."""
    counts = found["counts"]
    problems = [
        f"{counts[name]} x {name}"
        for name in ("wrong bytes", "bytes in a free slot", "slots never fenced")
        if counts.get(name)
    ]
    if counts.get("delivered") != found["items"]:
        problems.append(f"{counts.get('delivered')} of {found['items']} items were delivered")
    if found["slots_free"] != found["slots"]:
        problems.append(f"{found['slots_free']} of {found['slots']} slots are free at the end")
    if found["left"]:
        problems.append(f"left behind: {', '.join(found['left'])}")
    return problems


def run(plan: SoakPlan, *, as_json: bool) -> int:
    """Measure and print, with each promise that does not hold; 0 if all do."""
    import uvloop

    described = machine.describe()
    with tempfile.TemporaryDirectory(prefix="epd-soak-") as directory:
        found = uvloop.run(Soak(plan, directory).run())
    problems = judge(found)
    if as_json:
        print(json.dumps({"machine": described, "problems": problems, **found}))
        return 1 if problems else 0
    print(machine.sentence(described))
    print(f"{plan.backend}: {plan.items} items in {found['took_s']:.0f} s; {found['counts']}")
    print(f"a pool of {plan.slots * plan.slot_nbytes >> 20} MiB took {found['allocate_s']:.2f} s")
    for sample in found["samples"]:
        print(f"  {sample}")
    print("\n".join(problems) or "every item was delivered, every byte was right, nothing is left")
    return 1 if problems else 0
