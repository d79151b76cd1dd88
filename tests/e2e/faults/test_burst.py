"""Fault F39: 200 image requests at once are answered or refused at once, and none is dropped."""

from __future__ import annotations

import asyncio
import io
import re
import time
from collections import Counter
from math import prod
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.e2e.client import Body, Reply, data_url, post_all, question
from tests.e2e.server import SLOW, Server, serving
from tests.e2e.shared import APART, DEADLINE_S, MAX_OPEN_REQUESTS
from tests.scenarios import SCENARIOS
from training.tasks import fresh_samples

pytestmark = pytest.mark.timeout(400)

AT_ONCE = 200
IDLE_S = 1.0


@pytest.fixture(scope="module")
def server(apart: Server) -> Server:
    return apart


def asked(number: int) -> list[tuple[Body, str]]:
    """So many different images with a question each, and the answers."""
    return [
        ({"messages": sample.openai_messages(), "temperature": 0}, sample.answer)
        for sample in fresh_samples("total", number)
    ]


def check_each_has_one_end(replies: list[Reply]) -> Counter[int]:
    """Answered, or refused with a time to come back; none hung past its deadline."""
    statuses = Counter(reply.status for reply in replies)
    assert set(statuses) <= {200, 429, 503}, statuses
    for reply in replies:
        assert reply.lasted_s < DEADLINE_S + 5.0
        if reply.status != 200:
            assert int(reply.headers["Retry-After"]) >= 1
            assert reply.error["message"]
    return statuses


@pytest.mark.long
async def test_200_at_once() -> None:
    questions = asked(AT_ONCE)
    with serving("1e1p1d", **APART | {"limits__max_open_requests": AT_ONCE}) as server:
        began_s = time.monotonic()
        replies = await post_all(server.base_url, [body for body, _ in questions])
        lasted_s = time.monotonic() - began_s
    statuses = check_each_has_one_end(replies)
    answered = [
        (reply.text, answer)
        for reply, (_, answer) in zip(replies, questions, strict=True)
        if reply.status == 200
    ]
    right = sum(text == answer for text, answer in answered)
    print(f"{dict(statuses)} in {lasted_s:.1f} s, {right} right")
    assert right >= 0.95 * len(answered)
    assert statuses[200] == AT_ONCE  # below the limit nothing is refused


async def test_above_the_limit_is_refused_at_once(server: Server) -> None:
    """Twice as many as there are places: 429 long before the others are answered."""
    bodies = [body for body, _ in asked(MAX_OPEN_REQUESTS)]
    replies = await post_all(server.base_url, bodies * 2)
    statuses = check_each_has_one_end(replies)
    refused = [reply for reply in replies if reply.status == 429]
    slowest_s = max((reply.lasted_s for reply in refused), default=0.0)
    print(f"{dict(statuses)}, slowest refusal after {slowest_s:.1f} s")
    assert statuses[200] >= MAX_OPEN_REQUESTS
    assert refused
    assert slowest_s < 5.0 * SLOW
    server.check_all_returned()
    outcomes = {"answered": statuses[200], "refused": statuses[429], "busy": statuses[503]}
    SCENARIOS["200 at once"].check(outcomes, server.in_use())


def test_idle_afterwards(server: Server) -> None:
    """CPU shares are printed, not judged: the machine is shared.  The gateway holds no torch."""
    workers = {entry["pid"]: name for name, entry in server.instances().items()}
    processes = server.processes()
    before = {process.pid: sum(process.cpu_times()[:2]) for process in processes}
    time.sleep(IDLE_S)
    for process in processes:
        share = (sum(process.cpu_times()[:2]) - before[process.pid]) / IDLE_S
        resident_mb = process.memory_info().rss / 1e6
        name = workers.get(process.pid, "supervisor, gateway or zygote")
        print(f"{name}: {share:.2%} of a core, {resident_mb:.0f} MB resident")
    for process in processes:  # of the supervisor and the gateway
        if not {"epd.runtime.zygote", "--serve"} & {*process.cmdline()}:
            files = {Path(mapped.path).name for mapped in process.memory_maps()}
            assert not [name for name in files if name.startswith("libtorch")]


LARGE = (4000, 3000)
NUM_LARGE = 64
PIXELS_NBYTES = 128 << 20  # three of them


def large_image(number: int) -> bytes:
    """JPEG; the number behind its end makes it another image."""
    noise = np.random.default_rng(5).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize(LARGE).save(buffer, "JPEG", quality=50)
    return buffer.getvalue() + number.to_bytes(4, "big")


@pytest.mark.long
async def test_a_burst_of_large_images_takes_bounded_memory() -> None:
    """All are answered; few are decoded at a time, and an encoder's memory stays below 2 GiB."""
    most = prod(LARGE)
    bodies = [
        question("What is the total?", data_url(large_image(n), "image/jpeg"), max_tokens=1)
        for n in range(NUM_LARGE)
    ]
    pixels = [0.0]
    settings = {"limits__max_open_requests": NUM_LARGE, "encode__pixels_nbytes": PIXELS_NBYTES}
    with serving("1e1p1d", **APART | settings) as server:
        replies = asyncio.create_task(post_all(server.base_url, bodies))
        while not replies.done():
            found = await asyncio.to_thread(server.in_use)
            pixels += [v for k, v in found.items() if "pixels_nbytes" in k and "e0" in k]
            await asyncio.sleep(0.05)
        server.check_all_returned()
        status = Path(f"/proc/{server.pid('e0')}/status").read_text()
    assert [reply.status for reply in await replies] == [200] * NUM_LARGE
    (most_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", status)  # the kernel's own, between all looks
    print(f"at most {max(pixels) / 2**20:.0f} MiB of pixels, {int(most_kib) >> 10} MiB in all")
    assert 3 * most <= max(pixels) <= PIXELS_NBYTES
    assert int(most_kib) << 10 < 2 << 30
