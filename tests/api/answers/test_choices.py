"""Several choices of one answer, of which the first has ended while the others go on."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from epd.frontend import Leave
from tests.api.fakes import FakeFrontend, failed, said, serving
from tests.api.test_server import ask, client_of, finish_of, text_of, whys
from tests.api.wire import HI, Wire, request, until


@pytest.mark.parametrize("ends", ["stop", "length", "stop string"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_has_ended_ends_no_other(ends: str, *, stream: bool):
    """The first is over long before the second: which goes on, is counted, and may fail alone."""
    first = [said("ab!") if ends == "stop string" else said("ab", ends)]
    later: list[Any] = [said("c"), 0.02, said("d"), 0.02, said("e", "length")]
    text = {"ab": "length" if ends == "length" else "stop", "cde": "length"}
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    async with client_of(first, later) as (client, frontend, _):
        answer = await ask(client, n=2, stop=["!"], stream=stream, **usage)
        if stream:
            chunks = [chunk async for chunk in answer]
            found = {text_of(chunks, i): finish_of(chunks, i)[0] for i in (0, 1)}
            answer = chunks[-1]
        else:
            found = {choice.message.content: choice.finish_reason for choice in answer.choices}
        assert found == text
        assert answer.usage.completion_tokens == 5 + (ends == "stop string")
        left = [[Leave.ENOUGH]] if ends == "stop string" else [[]]
        assert whys(frontend) == [*left, []]
    async with client_of(first, [said("c"), 0.05, failed("lost", 503)]) as (client, frontend, _):
        with pytest.raises(openai.APIError, match="it broke"):
            answer = await ask(client, n=2, stop=["!"], stream=stream)
            async for _ in answer:
                assert stream
        assert whys(frontend) == [*left, []], "the one has ended, the other has failed by itself"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_the_choice_that_goes_on(*, stream: bool):
    """Though the first one has ended."""
    scripts = [[said("h", "stop")], [said("i"), asyncio.Event()]]
    async with serving(FakeFrontend(*scripts)) as (server, frontend, _):
        wire = await Wire.to(server)
        wire.writer.write(request({**HI, "stream": stream, "n": 2}))
        await until(lambda: len(frontend.generations) == 2 and frontend.streams[1].updates.empty())
        wire.drop()
        await until(frontend.streams[1].cancelled.is_set)
        await until(lambda: not server._state.tasks)
        assert frontend.streams[1].reasons[0] == (Leave.GONE, "client disconnected")


async def test_drafts_behind_a_stop_string_are_none_of_the_answers_tokens():
    """A step that accepts drafts tells several tokens at once, and the answer ends among them."""
    several = said("b!cdef")._replace(num_accepted=5)
    async with client_of([said("a"), several]) as (client, _, _):
        answer = await ask(client, stop=["!"])
    assert answer.choices[0].message.content == "ab"
    assert answer.usage.completion_tokens == 3
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 2
