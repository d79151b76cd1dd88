"""Rows that need a server's processes: kill -9."""

from __future__ import annotations

import asyncio
import itertools
import random

from epd_lab.bench.truth.client import Json, Peer, Reply, TruthCell, picture
from epd_lab.bench.truth.cluster import Skipped
from epd_lab.bench.truth.rows import SAYS, Row, counted, painted, painted_on, then

KILL_S = 6.0  # of load, half of it before the kill
LOADED = 6  # who asks at once then
STREAMS = 12  # begun before the kill, and as many at the kill
BEGUN_AT = 40  # pieces that half of them have then
BEGUN_S = 60.0  # in which they come, or nothing does


def killed_under_load(role: str, count: int | None = 1) -> Row:
    """So many with that role, or all; those who ask go on."""

    async def row(peer: Peer) -> TruthCell:
        victims = peer.cluster.victims(role)[:count]
        loop, cell = asyncio.get_running_loop(), TruthCell()
        first = random.randrange(1 << 30)
        them = (one for seed in itertools.count(first) for one in painted(50, seed))
        stop_s = loop.time() + KILL_S
        kills = [loop.call_later(KILL_S / 2, kill) for kill in victims]
        doubtful: list[tuple[Reply, str]] = []

        async def client() -> None:
            while loop.time() < stop_s:
                text, url = next(them)
                if (reply := await peer.ask(SAYS, [picture(url)])).judged(text) == "WRONG":
                    doubtful.append((reply, text))
                else:
                    cell.add(reply, text)

        await asyncio.gather(*(client() for _ in range(LOADED)))
        for reply, text in doubtful:  # the bundled model misreads one picture in a thousand
            again = picture(painted_on(text, "#fffffe"))  # which no cache has
            cell.add(reply, (await peer.ask(SAYS, [again])).text)
        for kill in kills:
            kill.cancel()  # a server that answers nothing may end this earlier
        return await then(peer, cell)

    return row


def killed_amid_streams(role: str) -> Row:
    """Right is what the same server streamed before, to the last token; a few at once, since one
    that is late then would make every answer of the row wrong."""

    async def row(peer: Peer) -> TruthCell:
        kill = peer.cluster.victims(role)[0]
        parts = [[picture(url)] for _, url in painted(2 * STREAMS, random.randrange(1 << 30))]
        first, second = parts[:STREAMS], parts[STREAMS:]
        num_begun, begun = itertools.count(1), asyncio.Event()

        def on_piece(count: int) -> None:
            if count == BEGUN_AT and next(num_begun) == STREAMS // 2:
                begun.set()

        async def late(part: list[Json]) -> Reply:
            await begun.wait()
            return await peer.stream(SAYS, part)

        async def strike() -> None:
            await asyncio.wait([asyncio.ensure_future(begun.wait())], timeout=BEGUN_S)
            begun.set()
            await asyncio.sleep(0.05)
            kill()

        before = [
            await asyncio.gather(*(peer.stream(SAYS, part) for part in parts[at : at + LOADED]))
            for at in range(0, len(parts), LOADED)
        ]
        if failed := next((one for some in before for one in some if one.status != 200), None):
            raise Skipped(f"without a kill: {failed.text}")
        wanted = [one.text for some in before for one in some]
        asked = [peer.stream(SAYS, part, on_piece) for part in first]
        asked += [late(part) for part in second]
        striking = asyncio.ensure_future(strike())
        cell = await counted(*zip(asked, wanted, strict=True))
        await striking
        return await then(peer, cell)

    return row
