"""Rows that need a URL alone: each is asked of every server alike, and its outcome is counted.

They are for the bundled tiny model: its answers to its samples are in `samples.json`, and it reads
painted letters.  A row ends with a good request where a bad one went before, since what an input
does to others is the question.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
from collections.abc import Awaitable, Callable

import aiohttp

from epd.tiny import SAMPLES
from epd.tiny.samples import read_index
from epd_lab.bench.truth.client import Json, Peer, Reply, TruthCell, data_url, picture

LETTERS = "ABCDEFGHKLMNPRSTUVWXYZ23456789"
SAYS = "What does the image say?"
TOTAL = "What is the total in image {}?"
METER = ("meter.png", "What does the meter read?", "04817.3 kWh")
LEAVING = 20
MEMORY_S = 60.0  # in which it must come back
IDLE_S = 4.0  # then it is asked, since an idle vLLM does not count anew; metrics may be 2 s old
IN_USE = (
    *("epd_in_use{", "epd_open_requests", "vllm:num_requests_running"),
    *("vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
)

Row = Callable[[Peer], Awaitable[TruthCell]]


def sample(name: str) -> str:
    return data_url((SAMPLES / name).read_bytes())


def painted(count: int, seed: int) -> list[tuple[str, str]]:
    """Letters, and the picture of them."""
    rng = random.Random(seed)
    texts = ["".join(rng.choice(LETTERS) for _ in range(5)) for _ in range(count)]
    return [(text, painted_on(text)) for text in texts]


def painted_on(text: str, paper: str = "white") -> str:
    """The URL of a picture of it."""
    from PIL import Image, ImageDraw, ImageFont

    image, buffer = Image.new("RGB", (96, 64), paper), io.BytesIO()
    ImageDraw.Draw(image).text((10, 20), text, fill="black", font=ImageFont.load_default(20))
    image.save(buffer, "PNG")
    return data_url(buffer.getvalue())


async def counted(*asked: tuple[Awaitable[Reply], str | None]) -> TruthCell:
    """Asked at once, each with what is right; None: to refuse it."""
    cell = TruthCell()
    replies = await asyncio.gather(*(reply for reply, _ in asked))
    for reply, (_, wanted) in zip(replies, asked, strict=True):
        cell.add(reply, wanted)
    return cell


async def then(peer: Peer, cell: TruthCell) -> TruthCell:
    """What a good request gets now."""
    name, question, wanted = METER
    cell.then = (await peer.ask(question, [picture(sample(name))])).judged(wanted)
    return cell


async def goldens(peer: Peer) -> TruthCell:
    """All samples, and as many painted pictures as make 19."""
    samples = [
        (peer.ask(one.question, [picture(sample(name)) for name in one.images]), one.answer)
        for one in read_index()
    ]
    them = painted(19 - len(samples), 0)
    return await counted(*samples, *((peer.ask(SAYS, [picture(url)]), text) for text, url in them))


async def duplicates(peer: Peer) -> TruthCell:
    cafe, market = "receipt-cafe.png", "receipt-market.png"
    orders = (
        ([cafe, cafe], 2, "10.85"),
        ([market, cafe, market], 3, "7.63"),
        ([cafe, market, cafe], 2, "7.63"),
        ([market, market, cafe], 3, "10.85"),
    )
    return await counted(
        *(
            (peer.ask(TOTAL.format(at), [picture(sample(name)) for name in names]), wanted)
            for names, at, wanted in orders
        )
    )


def at_once(count: int) -> Row:
    async def row(peer: Peer) -> TruthCell:
        them = painted(count, count)
        return await counted(*((peer.ask(SAYS, [picture(url)]), text) for text, url in them))

    return row


def bad(url: str) -> Row:
    """Beside a good picture in one request."""

    async def row(peer: Peer) -> TruthCell:
        parts = [picture(sample(METER[0])), picture(url)]
        return await then(peer, await counted((peer.ask(METER[1], parts), None)))

    return row


def cut_picture() -> str:
    data = (SAMPLES / METER[0]).read_bytes()
    return data_url(data[: len(data) // 2])


async def uuid_of_another(peer: Peer) -> TruthCell:
    """A picture that has another one's name; right is its own answer, or a refusal."""
    (first, url), (second, other) = painted(2, random.randrange(1 << 30))
    name = f"truth-{first}"
    await peer.ask(SAYS, [picture(url, name)])
    return await then(peer, await counted((peer.ask(SAYS, [picture(other, name)]), second)))


async def grid_without_rows(peer: Peer) -> TruthCell:
    """A description of a picture, by a name that nobody has rows for."""
    grid: Json = {"image_grid_thw": [1, 8, 12]}
    part: Json = {"type": "image_embeds", "image_embeds": grid, "uuid": "truth-nowhere"}
    return await then(peer, await counted((peer.ask(SAYS, [part]), None)))


async def clients_leave(peer: Peer) -> TruthCell:
    """Half of them before an answer, half amid a stream; then the memory of all must come back."""
    them = painted(LEAVING, random.randrange(1 << 30))
    half = LEAVING // 2
    early = (peer.ask(SAYS, [picture(url)], hang_up_s=0.02) for _, url in them[:half])
    late = (peer.stream(SAYS, [picture(url)], leave_at=4) for _, url in them[half:])
    cell = await then(peer, await counted(*((one, None) for one in (*early, *late))))
    loop = asyncio.get_running_loop()
    began_s = asked_s = loop.time()
    while held := await in_use(peer):
        if loop.time() > began_s + MEMORY_S:
            cell.memory = f"held after {MEMORY_S:.0f} s: {held}"
            return cell
        await asyncio.sleep(0.2)
        if loop.time() > asked_s + IDLE_S:
            await peer.ask("Hello")
            asked_s = loop.time()
    cell.memory = f"memory back in {loop.time() - began_s:.0f} s"
    return cell


async def in_use(peer: Peer) -> str:
    """What of its metrics is not zero; also where it shows none of those."""
    lines: list[str] = []
    for url in peer.cluster.metrics_urls() or (peer.url,):
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with peer.session.get(f"{url}/metrics") as answer:
                lines += (await answer.text()).splitlines()
    found = [line for line in lines if line.startswith(IN_USE)]
    held = [line for line in found if float(line.rpartition(" ")[2])]
    return ", ".join(held[:3]) if found else "it shows none"
