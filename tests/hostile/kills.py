"""A soak of `epd run` under `kill -9` and SIGSTOP: what clients got, and how long they waited.

One instance is hit at a time, and the next one when all are HEALTHY again, so that no role is ever
without an instance.  A stopped process stands for a stuck driver: nobody wakes it, the supervisor
has to replace it.  Images and texts are fresh, so that no cache answers.  Afterwards each question
is asked again without faults, and both answers are compared token for token.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.e2e.client import Body, in_session, post
from tests.e2e.server import Server, discarding
from tests.e2e.streams import questions, tokens_of

NUM_CLIENTS = 4
NUM_TOKENS = 120
BACK_WITHIN_S = 15.0
MAX_PAUSE_S = 6.0
QUIET_S = 1.0  # between faults
GIVE_UP_S = 60.0


@dataclass(slots=True)
class Answer:
    """One streamed answer: its tokens, and the longest pause behind its first one, in seconds."""

    body: Body
    tokens: list[bytes] = field(default_factory=list)
    error: str = ""
    is_done: bool = False
    ttft_s: float = 0.0
    pause_s: float = 0.0


@dataclass(slots=True)
class Soak:
    """What came of it: `back_s` holds, per fault, how long the instance was not HEALTHY."""

    answers: list[Answer] = field(default_factory=list)
    back_s: dict[str, list[float]] = field(default_factory=lambda: {"kill": [], "stop": []})
    wrong: int = 0
    compared: int = 0

    def report(self) -> dict[str, Any]:
        ended = Counter("answered" if a.is_done else a.error for a in self.answers)
        pauses = sorted((a.pause_s for a in self.answers), reverse=True)
        return {
            "requests": len(self.answers),
            "ends": dict(ended),
            "compared": self.compared,
            "wrong": self.wrong,
            "kills": len(self.back_s["kill"]),
            "stops": len(self.back_s["stop"]),
            "back_after_kill_s": round(max(self.back_s["kill"], default=0.0), 1),
            "back_after_stop_s": round(max(self.back_s["stop"], default=0.0), 1),
            "longest_pauses_s": [round(pause, 1) for pause in pauses[:3]],
            "longest_ttft_s": round(max((a.ttft_s for a in self.answers), default=0.0), 1),
        }

    @property
    def faults(self) -> list[str]:
        """What does not hold."""
        told = self.report()
        found = []
        if set(told["ends"]) != {"answered"}:
            found.append(f"not all were answered: {told['ends']}")
        if self.wrong:
            found.append(f"{self.wrong} of {self.compared} answers are wrong")
        if (back_s := told["back_after_stop_s"]) > BACK_WITHIN_S:
            found.append(f"a stopped instance was back after {back_s} s")
        if (pause_s := max(told["longest_pauses_s"], default=0.0)) > MAX_PAUSE_S:
            found.append(f"a stream paused for {pause_s} s")
        return found


def soak(topology: str, minutes: float, seed: int) -> Soak:
    """Run the cluster, hit it for so long, compare; the cluster is gone afterwards."""
    found = Soak()
    with discarding(Server(topology)) as server:
        server.wait_ready()
        asyncio.run(in_session(lambda session: _soak(session, server, minutes, seed, found)))
        server.check_all_returned()
        assert server.stop() == 0, server.text
    return found


async def _soak(
    session: aiohttp.ClientSession, server: Server, minutes: float, seed: int, found: Soak
) -> None:
    over = asyncio.Event()
    numbers = itertools.count()
    clients = [
        asyncio.create_task(_ask(session, server, seed, numbers, over, found))
        for _ in range(NUM_CLIENTS)
    ]
    try:
        await _hit(session, server, random.Random(seed), 60 * minutes, found)
    finally:
        over.set()
    await asyncio.gather(*clients)
    print(f"{len(found.answers)} answers; asking again", flush=True)
    again = iter([answer for answer in found.answers if answer.is_done])

    async def compare() -> None:
        for answer in again:
            reply = await post(session, server.base_url, answer.body)
            (choice,) = reply.body["choices"]
            found.compared += 1
            found.wrong += answer.tokens != tokens_of(choice)

    await asyncio.gather(*(compare() for _ in range(NUM_CLIENTS)))


async def _ask(
    session: aiohttp.ClientSession,
    server: Server,
    seed: int,
    numbers: itertools.count[int],
    over: asyncio.Event,
    found: Soak,
) -> None:
    while not over.is_set():
        number = next(numbers)
        body = questions(seed * 1000 + number, 1 + number % 5, 90, NUM_TOKENS)[-1]
        answer = Answer(body)
        found.answers.append(answer)
        try:
            await _stream(session, server.base_url, answer)
        except aiohttp.ClientError as error:
            answer.error = type(error).__name__


async def _stream(session: aiohttp.ClientSession, base_url: str, answer: Answer) -> None:
    began_s = heard_s = time.monotonic()
    url, body = f"{base_url}/v1/chat/completions", answer.body | {"stream": True}
    async with session.post(url, json=body) as response:
        async for line in response.content:
            if response.status != 200:
                answer.error += json.loads(line)["error"]["code"]
            elif line.strip() == b"data: [DONE]":
                answer.is_done = not answer.error
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                answer.error += event.get("error", {}).get("code", "")
                for choice in event.get("choices", ()):
                    answer.tokens += (tokens := tokens_of(choice))
                    now_s = time.monotonic()
                    if tokens and answer.ttft_s:
                        answer.pause_s = max(answer.pause_s, now_s - heard_s)
                    elif tokens:
                        answer.ttft_s = now_s - began_s
                    heard_s = now_s if tokens else heard_s


async def _hit(
    session: aiohttp.ClientSession,
    server: Server,
    draw: random.Random,
    duration_s: float,
    found: Soak,
) -> None:
    ends_s = time.monotonic() + duration_s
    while time.monotonic() < ends_s:
        await asyncio.sleep(QUIET_S + draw.random())
        before = await _instances(session, server)
        name = draw.choice(sorted(before))
        how = draw.choice(("kill", "stop"))
        number = signal.SIGKILL if how == "kill" else signal.SIGSTOP
        os.kill(before[name]["pid"], number)
        began_s = time.monotonic()
        while not _is_back(before, await _instances(session, server)):
            await asyncio.sleep(0.1)
            if time.monotonic() > began_s + GIVE_UP_S:
                os.kill(before[name]["pid"], signal.SIGCONT)
                raise AssertionError(f"{name} is not back {GIVE_UP_S} s after {how}")
        found.back_s[how].append(time.monotonic() - began_s)
        print(f"{how} {name}: back after {found.back_s[how][-1]:.1f} s", flush=True)


async def _instances(session: aiohttp.ClientSession, server: Server) -> dict[str, Any]:
    async with session.get(f"{server.base_url}/ready") as response:
        return {i["instance"]: i for i in (await response.json())["instances"]}


def _is_back(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """One of them has another epoch, and all are HEALTHY."""
    healthy = {name for name, entry in now.items() if entry["state"] == "HEALTHY"}
    changed = any(now[n]["epoch"] != e["epoch"] for n, e in before.items() if n in now)
    return changed and healthy >= set(before)
