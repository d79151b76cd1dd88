"""A trace in the simulator: the roles that serve, on virtual time.

In `parts` of as many tokens, each with the requests of `LEAD_S` before it, on as many processors.
A part begins with empty queues and caches, so parts are for loads that a cluster keeps up with.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor

from epd_lab.bench.servers.openai_load import Answerer, Sample
from epd_lab.bench.traces.form import BLOCK_TOKENS, Trace, TraceRequest, ordered
from epd_lab.bench.traces.replay import replay
from epd_lab.plan.run import TEMPLATE_TOKENS, ForecastPlan, PlannedRequest, simulate

LEAD_S = 20.0
TEMPLATE, OWN, SESSION, BLOCK = 2, 10, 1 << 28, 1 << 29  # tokens; numbers follow them


def forecast(plan: ForecastPlan, trace: Trace, parts: int = 1) -> list[Sample]:
    """What each request of the trace gets; `plan`'s workload is not asked."""
    if parts == 1:
        return _part(plan, trace)
    done = list(itertools.accumulate(one.tokens_out for one in trace))
    ends = [bisect_right(done, done[-1] * number / parts) for number in range(1, parts + 1)]
    begins, arrivals = [0, *ends[:-1]], [one.arrival_s for one in trace]
    kept = [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]
    begins, ends = [begin for begin, _ in kept], [end for _, end in kept]
    firsts = [bisect_left(arrivals, arrivals[min(n, len(trace) - 1)] - LEAD_S) for n in begins]
    cuts = [trace[first:end] for first, end in zip(firsts, ends, strict=True)]
    leads = [begin - first for begin, first in zip(begins, firsts, strict=True)]
    with ProcessPoolExecutor(len(kept)) as pool:
        found = list(pool.map(_part, [plan] * len(kept), cuts))
    return [sample for lead, samples in zip(leads, found, strict=True) for sample in samples[lead:]]


def _part(plan: ForecastPlan, trace: Trace) -> list[Sample]:
    moved = ordered(trace)

    def asked(
        users: Answerer[PlannedRequest], clock: Callable[[], float]
    ) -> Awaitable[list[Sample]]:
        return replay(users, moved, _requests(moved), lambda sample: None, clock)

    samples, _ = simulate(plan, 0, asked)
    began_s = trace[0].arrival_s if trace else 0.0
    for sample in samples:
        sample.sent_s += began_s
        sample.ended_s += began_s
    return samples


async def _requests(trace: Trace) -> AsyncIterator[PlannedRequest]:
    sessions: dict[str, int] = {}
    for index, asked in enumerate(trace):
        own = OWN + index
        if asked.session:
            own = SESSION + sessions.setdefault(asked.session, len(sessions))
        yield _planned(asked, own)


def _planned(asked: TraceRequest, own: int) -> PlannedRequest:
    blocks = [(BLOCK + block, BLOCK_TOKENS) for block in asked.blocks]
    return PlannedRequest(
        [(TEMPLATE, TEMPLATE_TOKENS - 1), *blocks],
        [(one.width, one.height, one.number) for one in asked.pictures],
        (own, asked.own_tokens + 1),
        asked.tokens_out,
    )
