"""Everything at once, kills included: `python -m tests.gpu.soak --minutes 9 [-- FLAGS]`.

It starts `epd run` with FLAGS, whose pool should be half as large as the users need.  Users ask for
answers to texts and images of all sizes, with sampling of all kinds, and some of them leave in the
middle.  An instance is killed at 3, 5 and 7 tenths of the time.  All the while known questions are
asked whose answers were taken before.  At the end: what was answered, what failed, and how the
memory of the device (of `--gpu`, else of all) and of the server's processes went.  1 if anything
failed, nothing was preempted, memory grew after the first fifth, or (with --exact, for float32) a
known answer was another one.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from epd import tiny
from epd_lab.bench.costs import shape
from epd_lab.bench.workload import WORDS, noise_jpeg
from tests.e2e.server import COLD, Server
from tests.e2e.streams import PATIENT, Streamed, questions, stream, wait_until_replaced

READY_S = 240.0
KILLED_AT, FIRST, TENTHS = (3, 5, 7), 2, 10
KNOWN = questions(70, 5, side=90, num_tokens=80)
_drawn = random.Random(1)
SIZES = [(40, 40), (2000, 1400), (1920, 1080), (60, 1100), (1900, 100)] + [
    (_drawn.randrange(100, 2000), _drawn.randrange(100, 1400)) for _ in range(30)
]
GROWTH_MIB = (256, 1024)  # of device and host; contexts of two processes differ
PREEMPTS = "the pool is too large for that"
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    {"temperature": 1.1, "top_p": 0.9},
    {"temperature": 0.9, "min_p": 0.05, "seed": 7},
    {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
    {"temperature": 0.8, "logit_bias": {"200": 5, "201": -100}},
    {"temperature": 0, "logprobs": True, "top_logprobs": 5},
    {"temperature": 0.5, "structured_outputs": {"regex": "[a-z ]{20,400}"}},
)


@functools.cache
def _jpeg(size: tuple[int, int]) -> bytes:
    return noise_jpeg(size, 0)


def image_url(size: tuple[int, int], number: int) -> str:
    """Made unlike any other by a comment, since drawing each would be the client's limit."""
    data, comment = _jpeg(size), number.to_bytes(8, "big")
    segment = b"\xff\xfe" + (2 + len(comment)).to_bytes(2, "big") + comment
    return "data:image/jpeg;base64," + base64.b64encode(data[:2] + segment + data[2:]).decode()


def body_of(chance: random.Random, number: int, longest: int, texts_only: bool) -> dict[str, Any]:
    words = " ".join(chance.choices(WORDS, k=chance.choice((5, 60, longest // 6, longest))))
    content: list[dict[str, Any]] = [{"type": "text", "text": words}]
    for image in range(0 if texts_only else chance.choice((0, 0, 1, 1, 2, 3))):
        url = image_url(chance.choice(SIZES), number * 8 + image)
        content.append({"type": "image_url", "image_url": {"url": url}})
    asked = {"messages": [{"role": "user", "content": content}], "stream": True}
    wish = chance.choice(SAMPLING)
    ends = chance.random() < 0.3 or "structured_outputs" in wish
    return asked | {"max_tokens": chance.choice((1, 16, 120, 600)), "ignore_eos": not ends} | wish


class Told(Counter[str]):
    """How many ended how; the first failure of each kind is printed."""

    def add(self, outcome: str) -> None:
        kind, _, detail = outcome.partition(": ")
        if detail and not self[kind]:
            print(f"the first to fail so, {kind}: {detail[:300]}", flush=True)
        self[kind] += 1


async def user(
    session: aiohttp.ClientSession, name: int, until: float, told: Told, args: argparse.Namespace
) -> None:
    chance = random.Random(name)
    number = name * 100_000
    while time.monotonic() < until:
        number += 1
        body = await asyncio.to_thread(body_of, chance, number, args.longest, args.texts_only)
        leaves_after = chance.randrange(1, 40) if chance.random() < 0.25 else 0
        try:
            told.add(await ask(session, body, leaves_after))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            told.add(f"FAILED {type(error).__name__}: {error}")


async def ask(session: aiohttp.ClientSession, body: dict[str, Any], leaves_after: int) -> str:
    events = 0
    async with session.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            return failure(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if b'"error"' in line:
                return failure(f"in mid-stream: {line.decode()}")
            events += line.startswith(b"data:")
            if leaves_after and events >= leaves_after:
                return "left"
            if line.startswith(b"data: [DONE]"):
                return "answered"
    return "FAILED: the stream ended early"


def failure(told: str) -> str:
    """Who was at work at two of the kills is not tried again."""
    return "killed twice" if '"poison"' in told else f"FAILED {told}"


async def known(session: aiohttp.ClientSession, number: int) -> list[bytes] | str:
    """The tokens of a known question's answer, or how it failed."""
    try:
        reply = await stream(session, "", KNOWN[number], Streamed())
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"FAILED {type(error).__name__}: {error}"
    return (
        reply.tokens if reply.is_done else failure(f"a known question: {json.dumps(reply.error)}")
    )


async def asker(
    session: aiohttp.ClientSession, until: float, told: Told, right: Sequence[object], wrong: str
) -> None:
    """All known questions, one after the other, and on until it is time."""
    while True:
        for number, expected in enumerate(right):
            answer = await known(session, number)
            if isinstance(answer, str):
                told.add(answer)
            else:
                told.add("known and equal" if answer == expected else wrong)
        if time.monotonic() >= until:
            return


def memory(server: Server, gpu: str) -> tuple[int, int]:
    """MiB of the device, if there is one, and of the server's processes."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    command += ["-i", gpu] if gpu else []
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        told = ""
    return sum(map(int, told.split())), sum(p.memory_info().rss for p in server.processes()) >> 20


def kill_one(server: Server, number: int) -> str:
    """With SIGKILL; its successor serves when this returns."""
    entry = list(server.instances().values())[number % len(server.instances())]
    os.kill(entry["pid"], signal.SIGKILL)
    began_s = time.monotonic()
    wait_until_replaced(server, entry["instance"], entry["epoch"])
    return f"{entry['instance']} was killed and replaced in {time.monotonic() - began_s:.1f} s"


async def load(server: Server, args: argparse.Namespace, told: Told) -> None:
    """All of it; memory and failures are in `told`."""
    timeout, connector = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        server.base_url, timeout=timeout, connector=connector
    ) as session:
        right = [await known(session, number) for number in range(len(KNOWN))]
        began_s, seconds = time.monotonic(), 60.0 * args.minutes
        until = began_s + seconds
        wrong = "FAILED to equal" if args.exact else "known and another"
        users = [
            asyncio.create_task(user(session, n, until, told, args)) for n in range(args.users)
        ] + [asyncio.create_task(asker(session, until, told, right, wrong))]
        used: list[tuple[int, int]] = []
        for tenth in range(1, TENTHS + 1):
            await asyncio.sleep(max(0.0, began_s + seconds * tenth / TENTHS - time.monotonic()))
            used.append(await asyncio.to_thread(memory, server, args.gpu))
            print(
                f"{tenth}/10: device {used[-1][0]} MiB, host {used[-1][1]} MiB, {dict(told)}",
                flush=True,
            )
            if tenth in KILLED_AT:
                print(await asyncio.to_thread(kill_one, server, tenth // 2), flush=True)
        await asyncio.gather(*users)
        for then, now, most in zip(used[FIRST - 1], used[-1], GROWTH_MIB, strict=True):
            if now > then + most:
                told.add(f"FAILED memory grew: from {then} to {now} MiB")
        await asyncio.to_thread(server.check_all_returned)
        await asker(session, time.monotonic(), told, right, wrong)
    preempted = sum(v for k, v in server.metrics().items() if "preemptions_total" in k)
    told.add(f"FAILED to preempt: {PREEMPTS}" if not preempted else "preempted")
    told["preempted"] = round(preempted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--users", type=int, default=40)
    parser.add_argument("--longest", type=int, default=400, help="words of a text; default 400")
    parser.add_argument("--topology", default="2epd")
    parser.add_argument("--shape", choices=shape.SIZES, help="random weights; default: bundled")
    parser.add_argument("--exact", action="store_true", help="known answers under load, too")
    parser.add_argument("--gpu", default="", help="whose memory is looked at; default: all")
    parser.add_argument("--texts-only", action="store_true", help="no images")
    parser.add_argument("flags", nargs="*", help="of epd run, behind --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        flags = list(args.flags)
        if args.shape:
            made = shape.write(Path(directory) / args.shape, tiny.CHECKPOINT, args.shape)
            flags += ["--model", str(made), "--load-format", "dummy"]
        patient: dict[str, Any] = dict(PATIENT)
        told, server = Told(), Server(args.topology, *flags, program=COLD, **patient)
        try:
            server.wait_ready(READY_S)
            asyncio.run(load(server, args, told))
            device, host = memory(server, args.gpu)
            print(f"at rest: device {device} MiB, host {host} MiB, {dict(told)}")
            return int(server.stop() or any(name.startswith("FAILED") for name in told))
        finally:
            server.discard()


if __name__ == "__main__":
    sys.exit(main())
