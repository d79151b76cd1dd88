"""The rows of the table: each is asked of every server alike, and its outcome is counted.

They are for the bundled tiny model: its answers to its samples are in `samples.json`, and it reads
painted letters.  A row ends with a good request where a bad one went before, since what an input
does to others is the question.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import random
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from epd.tiny import SAMPLES
from epd.tiny.samples import read_index
from epd_lab.bench.truth.client import Json, Peer, Reply, TruthCell, data_url, picture

LETTERS = "ABCDEFGHKLMNPRSTUVWXYZ23456789"
SAYS = "What does the image say?"
TOTAL = "What is the total in image {}?"
METER = ("meter.png", "What does the meter read?", "04817.3 kWh")
KILL_S = 6.0  # of load, half of it before the kill
LOADED = 6  # who asks at once then

Row = Callable[[Peer], Awaitable[TruthCell]]


def sample(name: str) -> str:
    return data_url((SAMPLES / name).read_bytes())


def painted(count: int, seed: int) -> list[tuple[str, str]]:
    """Letters, and the picture of them."""
    from PIL import Image, ImageDraw, ImageFont

    rng, found = random.Random(seed), []
    for _ in range(count):
        text = "".join(rng.choice(LETTERS) for _ in range(5))
        image = Image.new("RGB", (96, 64), "white")
        ImageDraw.Draw(image).text((10, 20), text, fill="black", font=ImageFont.load_default(20))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        found.append((text, data_url(buffer.getvalue())))
    return found


async def counted(*asked: tuple[Awaitable[Reply], str]) -> TruthCell:
    """Asked at once, each with what is right."""
    cell = TruthCell()
    replies = await asyncio.gather(*(reply for reply, _ in asked))
    cell.counts.update(
        reply.judged(wanted) for reply, (_, wanted) in zip(replies, asked, strict=True)
    )
    return cell


async def then(peer: Peer, cell: TruthCell) -> TruthCell:
    """What a good request gets now."""
    name, question, wanted = METER
    cell.then = (await peer.ask(question, [picture(sample(name))])).judged(wanted)
    return cell


async def goldens(peer: Peer) -> TruthCell:
    return await counted(
        *(
            (peer.ask(one.question, [picture(sample(name)) for name in one.images]), one.answer)
            for one in read_index()
        )
    )


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


def bad(url: Callable[[], str]) -> Row:
    """Beside a good picture in one request."""

    async def row(peer: Peer) -> TruthCell:
        parts = [picture(sample(METER[0])), picture(url())]
        return await then(peer, await counted((peer.ask(METER[1], parts), METER[2])))

    return row


def _cut() -> str:
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
    return await then(peer, await counted((peer.ask(SAYS, [part]), "")))


async def clients_leave(peer: Peer) -> TruthCell:
    them = painted(20, random.randrange(1 << 30))
    asked = (peer.ask(SAYS, [picture(url)], hang_up_s=0.02) for _, url in them)
    return await then(
        peer, await counted(*((one, text) for one, (text, _) in zip(asked, them, strict=True)))
    )


def killed(pids: Mapping[str, int]) -> Row:
    """An encoder ends under load, of the servers whose encoder's process is given."""

    async def row(peer: Peer) -> TruthCell:
        if (pid := pids.get(peer.name)) is None:
            return TruthCell(skipped=f"no process given: --kill {peer.name}=PID")
        loop, cell = asyncio.get_running_loop(), TruthCell()
        first = random.randrange(1 << 30)
        them = (one for seed in itertools.count(first) for one in painted(50, seed))
        stop_s = loop.time() + KILL_S
        kill = loop.call_later(KILL_S / 2, os.kill, pid, signal.SIGKILL)

        async def client() -> None:
            while loop.time() < stop_s:
                one = next(them)
                cell.counts[(await peer.ask(SAYS, [picture(one[1])])).judged(one[0])] += 1

        await asyncio.gather(*(client() for _ in range(LOADED)))
        kill.cancel()  # a server that answers nothing may end this earlier
        return await then(peer, cell)

    return row


@dataclass(frozen=True, slots=True)
class NamedRow:
    name: str
    right: str  # in words: what a cell should have
    ask: Row


def rows(pids: Mapping[str, int]) -> tuple[NamedRow, ...]:
    """In order; the last ones may end a server."""
    refused, all_right = "a refusal (4xx), then right", "all right"
    return (
        NamedRow("questions of the samples", all_right, goldens),
        NamedRow("one picture twice in a request", all_right, duplicates),
        NamedRow("60 pictures at once", all_right, at_once(60)),
        NamedRow("200 pictures at once", all_right, at_once(200)),
        NamedRow("bytes that are no picture", refused, bad(lambda: "data:image/png;base64,AAAA")),
        NamedRow("a picture that is cut off", refused, bad(_cut)),
        NamedRow("a file:// URL", refused, bad(lambda: "file:///nonexistent.png")),
        NamedRow("a URL on loopback", refused, bad(lambda: "http://127.0.0.1:9/x.png")),
        NamedRow("another picture's uuid", "right or refused, then right", uuid_of_another),
        NamedRow("20 clients leave", "then right", clients_leave),
        NamedRow("an encoder is killed under load", "all right, then right", killed(pids)),
        NamedRow("a grid without rows", refused, grid_without_rows),
    )
