"""Bodies that arrive at the same time are whole one after the other, in the order of arrival."""

from __future__ import annotations

import asyncio
import json

from epd.api.http.body import INLINE_NBYTES, Body, Intake
from epd.api.http.turns import Turns
from epd.config import Limits

PIECE = 64 << 10


async def test_who_has_the_earliest_place_is_next_and_one_in_each_turn_of_the_loop() -> None:
    turns, loop_turns, came = Turns(), 0, []

    async def come(place: int) -> None:
        await turns.come(place)
        came.append((place, loop_turns))

    places = [turns.place() for _ in range(4)]
    tasks = [asyncio.create_task(come(place)) for place in reversed(places)]
    while len(came) < len(places):
        await asyncio.sleep(0)
        loop_turns += 1
    assert [place for place, _ in came] == places
    assert len({turn for _, turn in came}) == len(places)
    await asyncio.gather(*tasks)


async def test_who_is_cancelled_keeps_nobody_waiting() -> None:
    turns = Turns()
    first, second = turns.place(), turns.place()
    gone = asyncio.create_task(turns.come(first))
    stays = asyncio.create_task(turns.come(second))
    await asyncio.sleep(0)
    gone.cancel()
    async with asyncio.timeout(5):
        await stays
        await turns.come(turns.place())  # and again, when nobody had waited
    assert gone.cancelled()


async def read(body: Body, raw: bytes, ends: list[Body]) -> None:
    for at in range(0, len(raw), PIECE):
        await asyncio.sleep(0)  # it comes from a socket
        await body.read(raw[at : at + PIECE])
    ends.append(body)


async def test_the_body_that_began_first_is_whole_while_the_others_have_hardly_begun() -> None:
    intake = Intake(Limits(), 100)
    raw = json.dumps({"url": "data:image/png;base64," + "QUJD" * (512 << 10)}).encode()
    bodies, ends = [Body(intake) for _ in range(8)], []
    reading = [asyncio.create_task(read(body, raw, ends)) for body in reversed(bodies)]
    while not ends:
        await asyncio.sleep(0)
    assert ends == bodies[:1]
    taken = intake.nbytes - len(raw)  # of all others
    assert taken < 2 * len(raw)
    await asyncio.gather(*reading)
    assert ends == bodies
    for body in bodies:
        body.close()
    intake.close()


async def test_a_short_body_waits_for_no_turn() -> None:
    intake = Intake(Limits(), 100)
    long, short, ends = Body(intake), Body(intake), []
    reading = asyncio.create_task(read(long, b" " * (1 << 20), ends))
    await asyncio.sleep(0)
    await read(short, b" " * INLINE_NBYTES, ends)
    assert ends == [short]
    await reading
    long.close()
    short.close()
    intake.close()
