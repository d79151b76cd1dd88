"""How much sooner second turns begin, between real processes: `python -m tests.e2e.second_turn`.

For each topology a cluster as a user starts it, and conversations of about 2,000 tokens and three
images, one after the other: all first turns, then all second turns in another order.  The time to
the first token is the client's; medians, with the prefix cache, without it, and without affinity.
"""

from __future__ import annotations

import asyncio
import io
import json
import statistics
import time

import aiohttp

from tests.e2e.client import CLIENT_TIMEOUT_S, JSON
from tests.e2e.server import Server, serving
from tests.roles.topologies.second_turn import FILLER, Body, conversation

NUM = 6
VARIANTS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("1e1p1d", "reuse", {}),
    ("1e1p1d", "no prefix cache", {"engine__prefix_caching": "false"}),
    ("2e2p2d", "reuse and affinity", {}),
    ("2e2p2d", "reuse, no affinity", {"prefix_affinity": "false"}),
    ("2e2p2d", "no prefix cache", {"engine__prefix_caching": "false"}),
)


async def first_token_s(session: aiohttp.ClientSession, url: str, messages: list[Body]) -> float:
    body = {"messages": messages, "max_tokens": 4, "stream": True, "temperature": 0}
    data = io.BytesIO(json.dumps(body).encode())
    began_s, first_s = time.perf_counter(), 0.0
    async with session.post(f"{url}/v1/chat/completions", data=data, headers=JSON) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if b'"content"' in line and not first_s:
                first_s = time.perf_counter() - began_s
    return first_s


async def measure(server: Server) -> tuple[float, float]:
    """Median seconds to the first token of first and of second turns."""
    asked = [conversation(f"Conversation {n}. {FILLER}", 10 * n) for n in range(NUM)]
    timeout = aiohttp.ClientTimeout(CLIENT_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def all_of(turns: list[list[Body]]) -> list[float]:
            return [await first_token_s(session, server.base_url, turn) for turn in turns]

        await all_of([[{"role": "user", "content": f"warm up {n}"}] for n in range(4)])
        first = await all_of([one for one, _ in asked])
        second = await all_of([asked[n * 5 % NUM][1] for n in range(NUM)])
    return statistics.median(first), statistics.median(second)


def main() -> None:
    for topology, what, settings in VARIANTS:
        with serving(topology, **settings) as server:
            first_s, second_s = asyncio.run(measure(server))
        print(
            f"{topology}, {what}: first turn {first_s * 1e3:.0f} ms, second turn "
            f"{second_s * 1e3:.0f} ms to the first token ({second_s / first_s:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
