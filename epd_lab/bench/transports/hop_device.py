"""`epd bench hop --device cuda`: rows and KV from one GPU's process to another's, over `cuda`, and
over `nixl` where that is installed.

Both are written from where they lie: one way, from "ready" to `Written`, one write at a time, and
for rows as many a second as with several in flight.  A hand-over is the KV of a prompt, from
scattered blocks of the sender's pool into scattered blocks of the receiver's.  It goes at once, or
one group of layers after the other as a prompt's leave.  It ends when the receiver has the message.
"last" is the last of these groups alone, which is left when the last layer is computed.  Every byte
is compared on both sides of each measure.  CPU time is that of both processes.  With one GPU both
processes are on it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from epd.engine.language.kv_hop import PoolSlots
from epd.engine.language.kv_pool import KvPool
from epd.messages import KvLayout, RemoteRegion
from epd.transport.backend import BackendEngine, BackendSettings, OnDevice
from epd.transport.backends import BACKENDS, chosen
from epd.transport.base import Written
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
KV_NBYTES = NUM_BLOCKS * LAYOUT.block_nbytes
ROWS_NBYTES = (1 << 20, 16 << 20, 42 << 20, KV_NBYTES)
GROUPS = (1, 2, 4, 9, 36)  # `engine.kv_layer_groups`
SENT, OTHER = 0, 3  # seeds of what pools hold
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
    """One process: an engine, and a pool that is written to."""

    def __init__(self) -> None:
        self.engine: BackendEngine
        self.pool: KvPool
        self.memory: Any

    async def open(self, name: str, index: int, transport: str) -> Sequence[Sequence[object]]:
        """Gives the descriptors of its pool, as it is cut for each of `GROUPS`."""
        torch.cuda.set_device(index)
        device = f"cuda:{index}"
        (backend,) = chosen(transport, "", "", device)
        assert backend.memory is not None
        self.engine = backend.make(BackendSettings(name, time.time_ns(), device=device))
        assert isinstance(self.engine, OnDevice)
        self.pool = KvPool(LAYOUT, POOL_BLOCKS, torch.bfloat16, device)
        self.memory = backend.memory(device, self.pool.nbytes)
        self.pool.attach(self.memory.whole)
        self.fill(OTHER)
        remotes = [
            self.engine.register("kv", self.memory, LAYOUT.block_nbytes // groups).remote
            for groups in GROUPS
        ]
        return [[getattr(one, name) for name in one.__struct_fields__] for one in remotes]

    def fill(self, seed: int) -> None:
        """The same on every device of a kind."""
        generator = torch.Generator(self.pool.memory.device).manual_seed(seed)
        self.pool.memory.view(torch.int64).random_(generator=generator)
        torch.cuda.synchronize()

    def source(self, slots: Sequence[int], slot_nbytes: int) -> PoolSlots:
        pool = self.pool.memory
        places = np.array(slots, np.uint64) * slot_nbytes + pool.data_ptr()
        return PoolSlots(pool, places, slot_nbytes)

    def rest(self) -> None:
        """Nothing is asked but the CPU seconds that come with every answer."""

    def hear(self) -> int:
        """What was written is there; when, in ns."""
        return time.perf_counter_ns()

    def is_equal(self, source: Sequence[int], target: Sequence[int], nbytes: int) -> bool:
        """These blocks begin with what the sender has in those; then nothing of it is left."""
        found = self.pool.memory[list(target)].view(-1)[:nbytes]
        self.fill(SENT)
        wanted = self.pool.memory[list(source)].view(-1)[:nbytes]
        self.fill(OTHER)
        return bool(torch.equal(found, wanted))

    async def close(self) -> None:
        await self.engine.close()


@functools.cache
def blocks(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = torch.randperm(POOL_BLOCKS, generator=generator).tolist()
    return order[:NUM_BLOCKS]


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


class DeviceHop:
    """A receiver's process, and a sender in this one."""

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._receiver, self._sender = Remote(MODULE), HopEnd()
        self._targets: dict[int, RemoteRegion] = {}  # by groups

    async def open(self) -> None:
        index = min(1, torch.cuda.device_count() - 1)
        over = self._transport
        places = await self._receiver.ask("open", name="receiver", index=index, transport=over)
        await self._sender.open("sender", 0, over)
        self._sender.fill(SENT)
        found = [msgspec.convert(place, RemoteRegion) for place in places]
        self._targets = dict(zip(GROUPS, found, strict=True))

    async def rows(self, nbytes: int, count: int) -> AsyncIterator[Figure]:
        """Into slots side by side, with 1, 4 and 16 in flight."""
        target, rows = self._targets[4], self._sender.pool.memory.view(-1)[:nbytes]
        slots = range(-(-nbytes // target.slot_nbytes))
        once = functools.partial(self._write, rows, target, slots)
        for in_flight in (1, 4, 16):
            yield await _timed("rows", nbytes, in_flight, count, self._receiver, once)
        first = [*range(-(-nbytes // LAYOUT.block_nbytes))]
        await self._compare(first, first, nbytes)

    async def hand_overs(self, groups: int, count: int) -> AsyncIterator[Figure]:
        """In so many parts, and the last of them."""
        whole = functools.partial(self._hand_over, groups, range(groups))
        yield await _timed(f"KV/{groups}", KV_NBYTES, 1, count, self._receiver, whole)
        await self._compare(blocks(1), blocks(2), KV_NBYTES)
        if groups > 1:
            last = functools.partial(self._hand_over, groups, range(groups - 1, groups))
            nbytes = KV_NBYTES // groups
            yield await _timed(f"last/{groups}", nbytes, 1, count, self._receiver, last)

    async def _hand_over(self, groups: int, parts: Sequence[int]) -> int:
        target = self._targets[groups]
        for part in parts:
            here, there = ([block * groups + part for block in blocks(seed)] for seed in (1, 2))
            source = self._sender.source(here, target.slot_nbytes)
            await self._write(source, target, there)
        heard_ns: int = await self._receiver.ask("hear")
        return heard_ns

    async def _write(self, source: Any, target: RemoteRegion, slots: Sequence[int]) -> int:
        outcome = await self._sender.engine.write([source], target, slots)
        if not isinstance(outcome, Written):
            raise RuntimeError(str(outcome))  # noqa: TRY004 - not a type error
        return time.perf_counter_ns()

    async def _compare(self, source: list[int], target: list[int], nbytes: int) -> None:
        if not await self._receiver.ask("is_equal", source=source, target=target, nbytes=nbytes):
            raise RuntimeError("the bytes did not land as they were sent")

    async def close(self) -> None:
        await self._sender.close()
        await self._receiver.ask("close")
        await self._receiver.close()


async def measure(count: int, transport: str = "cuda") -> list[Figure]:
    hop, found = DeviceHop(transport), list[Figure]()
    await hop.open()
    for nbytes in ROWS_NBYTES:
        found += [figure async for figure in hop.rows(nbytes, count)]
    for groups in GROUPS:
        found += [figure async for figure in hop.hand_overs(groups, count)]
    await hop.close()
    return found


async def few_and_many(count: int = 50) -> list[tuple[int, float]]:
    """Bytes and seconds: of rows of a megabyte, and of a prompt's KV at once, over `cuda`."""
    hop = DeviceHop("cuda")
    await hop.open()
    few, *_ = [one async for one in hop.rows(ROWS_NBYTES[0], count)]
    many, *_ = [one async for one in hop.hand_overs(1, count)]
    await hop.close()
    return [(ROWS_NBYTES[0], few.p50_us / 1e6), (KV_NBYTES, many.p50_us / 1e6)]


def table(figures: list[Figure]) -> str:
    lines = ["what          MB  fly     p50 us     p99 us     GB/s   cpu us"]
    lines += [
        f"{one.what:<8}{one.megabytes:>8}{one.in_flight:>5}{one.p50_us:>11.1f}{one.p99_us:>11.1f}"
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
    by_nixl = [] if BACKENDS["nixl"].lacks() else uvloop.run(measure(count, "nixl"))
    cards = machine.gpus()
    found = {"gpus": cards, "rows": list(map(asdict, figures)), "nixl": list(map(asdict, by_nixl))}
    tables = [table(figures)] + (["nixl:", table(by_nixl)] if by_nixl else [])
    told = "\n".join([*machine.counted(cards), *tables])
    print(json.dumps(found) if as_json else told)
    return 0


async def main(fd: int) -> None:
    await answer_all(fd, HopEnd())


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(int(sys.argv[1])))
