"""What a step costs the host: `python -m tests.roles.topologies.host_time [STREAMS]`.

So many streams decode on an engine that computes nothing, so that all time is the host's: planning,
the sequences of a step, events, numbered chunks, the message to the gateway, packed.  CPU time of
the event loop's thread per step; what an engine does to launch one is not part of it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Sequence

from epd.config import EngineConfig, Timing
from epd.engine.base import StepResult, StepSequence
from epd.fsm import request as fsm
from epd.fsm.request import Request
from epd.fsm.story import RecordingJournal
from epd.messages import KvLayout, PrefillRequest, SamplingParams, TokenLogprobs
from epd.roles.base import Actor
from epd.roles.ports import Log, Ports
from epd.roles.steps.requests import Requests
from epd.runtime.system import SystemClock, SystemRandom
from epd.transport.backend import BackendSettings
from epd.transport.bus.local import LocalBus, LocalBusHub
from epd.transport.local import LocalMemory
from epd.transport.routing import RoutingTransferEngine

PROMPT = tuple(range(1024))
STEPS = 500
TURNS = 8  # of the loop, in which a step is settled and the next one launched


class NoEngine:
    """A `LanguageEngine` whose steps are over when somebody says so."""

    kv_layout = KvLayout(
        num_layers=36,
        block_size=16,
        num_kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
        block_nbytes=64,
    )
    num_blocks = num_landing_blocks = 64_000
    row_contract = None
    max_context = 1 << 17
    kv_in_place = True
    kv_memory = None

    def __init__(self) -> None:
        self.under_way: deque[tuple[asyncio.Future[StepResult], StepResult]] = deque()

    def attach_kv(self, buffer: memoryview) -> None:
        """It computes nothing."""

    def step(self, batch: Sequence[StepSequence]) -> asyncio.Future[StepResult]:
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        token = TokenLogprobs(7, 0.0)
        self.under_way.append((future, StepResult([token if s.sample else None for s in batch])))
        return future

    async def finish_one(self) -> None:
        future, result = self.under_way.popleft()
        future.set_result(result)
        for _ in range(TURNS):
            await asyncio.sleep(0)


async def measure(num_streams: int, *, ahead: bool) -> float:
    """Milliseconds of CPU time per step."""
    hub, memory, clock = LocalBusHub(), LocalMemory(), SystemClock()
    gateway = LocalBus(hub, "gateway", 1, codec=False)
    gateway.start(lambda _: None)
    transfers = RoutingTransferEngine(BackendSettings("p0", 1), memory, checksums="always")
    bus = LocalBus(hub, "p0", 1, codec=True)
    journal = RecordingJournal(clock.now_s)
    actor = Actor(Ports(clock, bus, SystemRandom(), transfers, journal, Log()))
    engine = NoEngine()
    config = EngineConfig(
        max_step_tokens=8192, max_chunk_tokens=8192, prefix_caching=False, async_scheduling=ahead
    )
    requests = Requests(actor, engine, config, Timing(), 256)  # type: ignore[arg-type]
    actor.start()
    actor.connect(gateway.address)
    sampling = SamplingParams(max_tokens=100_000, stop_token_ids=(3,))
    for number in range(num_streams):
        message = PrefillRequest(
            request_id=f"r{number}",
            attempt=1,
            token_ids=PROMPT,
            num_emitted=0,
            items=(),
            sampling=sampling,
            decode=bus.address,
            gateway=gateway.address,
            deadline_s=time.time() + 600,
        )
        request = Request(f"r{number}/1", message, PROMPT, journal, decode_here=True)
        requests.open(request)
        requests.post(request, fsm.TextOnly())
    await asyncio.sleep(0.01)
    opened = [requests.get(f"r{number}/1") for number in range(num_streams)]
    while any(one is not None and not one.output for one in opened):
        await engine.finish_one()
    started_s = time.thread_time()
    for _ in range(STEPS):
        await engine.finish_one()
    took_s = time.thread_time() - started_s
    await actor.close()
    return took_s / STEPS * 1e3


async def main() -> None:
    num_streams = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    for ahead in (False, True):
        took_ms = await measure(num_streams, ahead=ahead)
        how = "a step ahead" if ahead else "step by step"
        print(f"{num_streams} streams, {how}: {took_ms:.2f} ms of the host per step")


if __name__ == "__main__":
    asyncio.run(main())
