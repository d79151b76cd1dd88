"""Hostile bodies against a live cluster in 3 GiB, beside an innocent client.

One client posts what a generator makes, one body after another.  A second one, in a process of its
own, asks for two words and for /health meanwhile.  Right is: each body gets an answer or a clear
refusal, no process ends, nobody waits.
"""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp

from epd.messages import MESSAGES
from tests.e2e.client import Body, in_session, post, question
from tests.e2e.server import Server, discarding
from tests.hostile.confined import confined
from tests.hostile.grammars import grammar, regex
from tests.hostile.headers import FILMS, FORMS, hostile
from tests.hostile.messages import Stranger
from tests.hostile.schemas import schema

MEMORY_NBYTES = 3 << 30
MAX_WORDS_S = 0.5
MAX_HEALTH_S = 0.1
RIGHT = {200, 400, 413, 422, 429}

Work = Callable[["Server", "Siege", int, int], Awaitable[None]]  # with seed and count
TEXT: Body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}


@dataclass(slots=True)
class Siege:
    """What came of one kind."""

    kind: str
    statuses: Counter[int] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)  # answers that are neither right nor refused
    slowest_s: float = 0.0
    lasted_s: float = 0.0
    bystander: dict[str, Any] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)  # processes
    peak_nbytes: int = 0

    def report(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "statuses": {str(k): v for k, v in sorted(self.statuses.items())},
            "odd": self.odd[:5],
            "slowest_s": round(self.slowest_s, 2),
            "lasted_s": round(self.lasted_s),
            "bystander": self.bystander,
            "ended": self.ended,
            "peak_mib": self.peak_nbytes >> 20,
        }

    @property
    def faults(self) -> list[str]:
        """What does not hold."""
        found = [f"{self.kind}: {name} ended" for name in self.ended]
        if self.odd:
            found.append(f"{self.kind}: {len(self.odd)} odd answers, such as {self.odd[0]}")
        if self.bystander["num_failures"]:
            found.append(f"{self.kind}: bystander: {self.bystander['failures']}")
        for name, most_s in (("words", MAX_WORDS_S), ("health", MAX_HEALTH_S)):
            if (waited_s := self.bystander[name]["max_s"]) > most_s:
                found.append(f"{self.kind}: a bystander's {name} took {waited_s} s")
        return found


def besiege(kinds: dict[str, Work], seed: int, count: int) -> list[Siege]:
    """Each kind in turn, against one cluster."""
    found = []
    with confined(MEMORY_NBYTES) as group:
        with discarding(Server("1e1p1d", program=group.program)) as server:
            server.wait_ready()
            for kind, work in kinds.items():
                siege = Siege(kind)
                before, began_s = _pids(server), time.monotonic()
                siege.bystander = _beside(server, work(server, siege, seed, count))
                siege.lasted_s = time.monotonic() - began_s
                now = _pids(server)
                siege.ended = [name for name, pid in before.items() if now.get(name) != pid]
                siege.peak_nbytes = group.peak_nbytes
                print(json.dumps(siege.report()), flush=True)
                found.append(siege)
            server.check_all_returned()
            assert server.stop() == 0, server.text
        assert not group.num_killed, f"the kernel killed {group.num_killed} processes for memory"
    return found


def _pids(server: Server) -> dict[str, int]:
    """Of the instances and of the gateway, by name."""
    (gateway,) = [p.pid for p in server.processes() if "epd.runtime.child" in p.cmdline()]
    return {name: int(i["pid"]) for name, i in server.instances().items()} | {"gateway": gateway}


def _beside(server: Server, work: Awaitable[None]) -> dict[str, Any]:
    """Do it while the bystander asks; what that one has to say."""

    async def run() -> None:
        await work

    command = [sys.executable, "-m", "tests.hostile.bystander", server.base_url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as bystander:
        asyncio.run(run())
        told, _ = bystander.communicate()
    return dict(json.loads(told))


# --- kinds ----------------------------------------------------------------------------------------


def _schemas(seed: int, count: int) -> Iterator[Body]:
    for number in range(count):
        wrapped = {"name": "x", "schema": schema(seed * 1_000_000 + number)}
        yield TEXT | {"response_format": {"type": "json_schema", "json_schema": wrapped}}


def _grammars(seed: int, count: int) -> Iterator[Body]:
    for number in range(seed * 1_000_000, seed * 1_000_000 + count):
        yield TEXT | {"guided_regex": regex(number)}
        yield TEXT | {"guided_grammar": grammar(number)}


def _media(seed: int, count: int) -> Iterator[Body]:
    """So many of each form."""
    for number in range(seed * 1_000_000, seed * 1_000_000 + count):
        for form in FORMS:
            data = base64.b64encode(hostile(form, number)).decode()
            if form in FILMS:
                part = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}}
                message = {"role": "user", "content": [part, {"type": "text", "text": "?"}]}
                yield TEXT | {"messages": [message]}
            else:
                yield question("?", f"data:image/png;base64,{data}", max_tokens=2)


async def _post_all(
    bodies: Callable[[int, int], Iterator[Body]],
    server: Server,
    siege: Siege,
    seed: int,
    count: int,
) -> None:
    async def send(session: aiohttp.ClientSession) -> None:
        for body in bodies(seed, count):
            try:
                reply = await post(session, server.base_url, body)
            except aiohttp.ClientError as error:
                siege.odd.append(f"{error!r} to {json.dumps(body)[:600]}")
                await asyncio.sleep(0.5)
                continue
            siege.statuses[reply.status] += 1
            siege.slowest_s = max(siege.slowest_s, reply.lasted_s)
            if reply.status not in RIGHT:
                siege.odd.append(f"{reply.status} {reply.body} to {json.dumps(body)[:600]}")

    await in_session(send)


async def _messages(server: Server, siege: Siege, seed: int, count: int) -> None:
    """So many of each type, to the bus of each process in turn."""
    sockets = sorted(path for path in server.run_dir.rglob("*") if path.is_socket())

    def send() -> None:
        for number, socket in enumerate(sockets):
            with Stranger(f"ipc://{socket}") as stranger:
                for at in range(number, count, len(sockets)):
                    for kind in MESSAGES:
                        stranger.send(kind, seed * 1_000_000 + at)

    await asyncio.to_thread(send)


KINDS: dict[str, Work] = {
    "schemas": partial(_post_all, _schemas),
    "grammars": partial(_post_all, _grammars),
    "media": partial(_post_all, _media),
    "messages": _messages,
}
