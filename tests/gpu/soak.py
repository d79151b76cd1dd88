"""Everything at once against a server on a GPU: `python -m tests.gpu.soak URL SECONDS`.

Users ask for answers to texts and images of all sizes, with sampling of all kinds, and some of
them leave in the middle.  At the end: what was answered, what failed, and how the memory of the
device (of `--gpu`, else of all) and of the server's processes here went, by tenths of the time.  1
if anything failed, or grew after the first fifth.  A server with a small `--kv-nbytes` preempts
texts, and with `--texts-only` it has nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import functools
import json
import random
import subprocess
import sys
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil

from epd_lab.bench.workload import WORDS, noise_jpeg

USERS, READY_S = 40, 120.0
_drawn = random.Random(1)
SIZES = [(40, 40), (2000, 1400), (1920, 1080), (60, 1100), (1900, 100)] + [
    (_drawn.randrange(100, 2000), _drawn.randrange(100, 1400)) for _ in range(30)
]
DEVICE_GROWTH_MIB, HOST_GROWTH_MIB = 64, 1024
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


def body_of(chance: random.Random, number: int, texts_only: bool) -> dict[str, Any]:
    words = " ".join(chance.choices(WORDS, k=chance.choice((5, 60, 400, 2500))))
    content: list[dict[str, Any]] = [{"type": "text", "text": words}]
    for image in range(0 if texts_only else chance.choice((0, 0, 1, 1, 2, 3))):
        url = image_url(chance.choice(SIZES), number * 8 + image)
        content.append({"type": "image_url", "image_url": {"url": url}})
    asked = {"messages": [{"role": "user", "content": content}], "stream": True}
    wish = chance.choice(SAMPLING)
    ends = chance.random() < 0.3 or "structured_outputs" in wish
    return asked | {"max_tokens": chance.choice((1, 16, 120, 600)), "ignore_eos": not ends} | wish


async def user(
    session: aiohttp.ClientSession, name: int, until: float, told: Counter[str], texts_only: bool
) -> None:
    chance = random.Random(name)
    number = name * 100_000
    while time.monotonic() < until:
        number += 1
        body = await asyncio.to_thread(body_of, chance, number, texts_only)
        leaves_after = chance.randrange(1, 40) if chance.random() < 0.25 else 0
        try:
            outcome = await ask(session, body, leaves_after)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            outcome = f"FAILED {type(error).__name__}: {error}"
        kind, _, detail = outcome.partition(": ")
        if detail and not told[kind]:
            print(f"the first to fail so, {kind}: {detail[:300]}", flush=True)
        told[kind] += 1


async def ask(session: aiohttp.ClientSession, body: dict[str, Any], leaves_after: int) -> str:
    events = 0
    async with session.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            return f"FAILED {response.status}: {await response.text()}"
        async for line in response.content:
            if b'"error"' in line:
                return f"FAILED in mid-stream: {line.decode()}"
            events += line.startswith(b"data:")
            if leaves_after and events >= leaves_after:
                return "left"
            if line.startswith(b"data: [DONE]"):
                return "answered"
    return "FAILED: the stream ended early"


def server_of(url: str) -> psutil.Process:
    """The `epd run` that has started who listens there."""
    port = urlsplit(url).port
    pids = [c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN
            and c.laddr.port == port]  # fmt: skip
    if not pids or pids[0] is None:
        raise SystemExit(f"no process of this host is seen to listen at {url}: start the server")
    found = psutil.Process(pids[0])
    return next((p for p in reversed(found.parents()) if {"epd", "run"} <= {*p.cmdline()}), found)


def memory(server: psutil.Process, gpu: str) -> tuple[int, int]:
    """MiB of the device, and of the server's processes."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    command += ["-i", gpu] if gpu else []
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    device = sum(map(int, told.split()))
    host = sum(each.memory_info().rss for each in (server, *server.children(recursive=True)))
    return device, host >> 20


async def metrics(session: aiohttp.ClientSession) -> dict[str, float]:
    async with session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    wanted = ("epd_preemptions_total", "epd_in_use", "epd_requests_total")
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(wanted))
    return {name: float(value) for name, value in pairs if float(value)}


async def until_ready(session: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(READY_S):
        while True:
            async with session.get("/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(1.0)


async def main(url: str, seconds: float, gpu: str, *, texts_only: bool) -> int:
    told: Counter[str] = Counter()
    server = server_of(url)
    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        await until_ready(session)
        until = time.monotonic() + seconds
        users = [
            asyncio.create_task(user(session, n, until, told, texts_only)) for n in range(USERS)
        ]
        for tenth in range(10):
            await asyncio.sleep(seconds / 10)
            device, host = memory(server, gpu)
            if tenth == 1:
                first_device, first_host = device, host
            print(f"{tenth + 1}/10: device {device} MiB, host {host} MiB, {dict(told)}", flush=True)
        await asyncio.gather(*users)
        await asyncio.sleep(3)
        print(json.dumps(await metrics(session), indent=1))
    if device > first_device + DEVICE_GROWTH_MIB or host > first_host + HOST_GROWTH_MIB:
        told[f"FAILED: memory grew from {first_device} and {first_host} MiB"] += 1
    device, host = memory(server, gpu)
    print(f"at rest: device {device} MiB, host {host} MiB, {dict(told)}")
    return int(any(name.startswith("FAILED") for name in told))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--gpu", default="", help="whose memory is looked at; default: all")
    parser.add_argument("--texts-only", action="store_true", help="no images")
    args = parser.parse_args()
    sys.exit(asyncio.run(main(args.url, args.seconds, args.gpu, texts_only=args.texts_only)))
