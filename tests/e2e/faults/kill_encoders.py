"""Both encoders of a 2e2p2d are killed at once, again and again, under load (F48).

    python -m tests.e2e.faults.kill_encoders --rounds 40

An image that was on its way, or comes while there is no encoder, waits for a successor; one that
meets a second such kill has used up its attempts and is refused.  None waits for its deadline,
whatever links the kills leave behind.
Prints one JSON object; exit status 1 when one waited for longer than `MAX_WAIT_S`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.e2e.client import in_session, png, question
from tests.e2e.server import READY_S, Server, serving
from tests.engine.conftest import drawn_image

NUM_CLIENTS = 4
MAX_WAIT_S = 25.0  # a loss that only silence tells (5 s), a restart, one retry; on a busy machine
ENCODERS = ("e0", "e1")
_MAIN = (
    "import sys; from epd.cli.main import main; from epd.runtime import supervisor; "
    "supervisor.MAX_BACKOFF_S = supervisor.FIRST_BACKOFF_S; sys.exit(main())"
)
WITHOUT_BACK_OFF = ("-c", _MAIN)


@dataclass(slots=True)
class Tally:
    """What the clients saw."""

    rounds: int = 0
    waits_s: list[float] = field(default_factory=list)  # of those that were answered
    refused_s: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    opened_anew: int = 0

    def longest_s(self) -> float:
        return max((*self.waits_s, *self.refused_s), default=0.0)

    def summary(self) -> dict[str, Any]:
        waits_s = sorted(self.waits_s)
        return {
            "rounds": self.rounds,
            "outcomes": dict(self.outcomes),
            "answered_s": {
                "p50": round(waits_s[len(waits_s) // 2], 2),
                "p99": round(waits_s[len(waits_s) * 99 // 100], 2),
                "max": round(waits_s[-1], 2),
            },
            "refused_s_max": round(max(self.refused_s, default=0.0), 2),
            "links_opened_anew": self.opened_anew,
        }


async def _ask_on(
    session: aiohttp.ClientSession, server: Server, tally: Tally, client: int, over: asyncio.Event
) -> None:
    """One question with a fresh image after the other."""
    number = 0
    while not over.is_set():
        number += 1
        pixels = drawn_image(1_000_000 * client + number, 60, 50)
        body = question(f"question {number}", png(pixels), max_tokens=4, ignore_eos=True)
        began_s = time.monotonic()
        url = f"{server.base_url}/v1/chat/completions"
        async with session.post(url, json=body) as response:
            await response.read()
        took_s = time.monotonic() - began_s
        tally.outcomes[str(response.status)] += 1
        (tally.waits_s if response.status == 200 else tally.refused_s).append(took_s)
        if response.status != 200:
            await asyncio.sleep(0.1)


async def _healthy(server: Server, but: dict[str, int]) -> dict[str, int]:
    """Process ids of both encoders, once both are members and neither is one of `but`."""
    async with asyncio.timeout(READY_S):
        while True:
            found = await asyncio.to_thread(server.instances)
            pids = {
                name: int(found[name]["pid"])
                for name in ENCODERS
                if name in found and found[name]["state"] == "HEALTHY"
            }
            if len(pids) == len(ENCODERS) and not set(pids.values()) & set(but.values()):
                return pids
            await asyncio.sleep(0.05)


async def kill_rounds(server: Server, rounds: int, last_s: float = 1e9) -> Tally:
    """Kill both encoders so many times, or for so long."""
    tally, over = Tally(), asyncio.Event()
    until_s = time.monotonic() + last_s

    async def work(session: aiohttp.ClientSession) -> None:
        asking = [
            asyncio.create_task(_ask_on(session, server, tally, client, over))
            for client in range(NUM_CLIENTS)
        ]
        pids: dict[str, int] = {}
        while tally.rounds < rounds and time.monotonic() < until_s:
            pids = await _healthy(server, pids)
            await asyncio.sleep(0.15 + 0.05 * (tally.rounds % 7))  # into whatever is under way
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
            tally.rounds += 1
        await _healthy(server, pids)
        over.set()
        await asyncio.gather(*asking)
        async with session.get(f"{server.base_url}/metrics") as response:
            lines = (await response.text()).splitlines()
        opened = [line for line in lines if "links_opened_anew" in line]
        tally.opened_anew = sum(int(float(line.rsplit(" ", 1)[1])) for line in opened)

    await in_session(work)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--last-s", type=float, default=240.0, help="end after so long")
    arguments = parser.parse_args()
    with serving("2e2p2d", program=WITHOUT_BACK_OFF) as server:
        tally = asyncio.run(kill_rounds(server, arguments.rounds, arguments.last_s))
    print(json.dumps(tally.summary()))
    return int(tally.longest_s() > MAX_WAIT_S)


if __name__ == "__main__":
    sys.exit(main())
