"""Blocks behind a window go back before others are taken, and are found until one takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from epd.config import EngineConfig
from epd.fsm.outgoing import GrantReceived
from epd.fsm.request import Slid
from epd.messages import Grant
from epd.roles.steps.requests import Requests
from epd.scheduling.kv_order import moved
from epd_lab.sim.engine.golden import Image, layout_with
from epd_lab.sim.workload import Ask
from tests.roles.simulated import DEFAULTS, TEXT, simulated


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("images", [(), (Image("one"),)], ids=["text", "image"])
@pytest.mark.parametrize("goes_back", ["first", "last", "never"])
def test_an_answer_whose_windows_fit_just_so(
    ahead: bool, images: tuple[Image, ...], goes_back: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks go back before others are taken, so it never gives way to itself."""
    window, chunk, num_tokens = 6, 1, 120
    rows = layout_with(window).rows
    num_blocks = rows.needed(num_tokens, chunk * (1 + ahead))
    assert num_blocks < 0.7 * rows.count(num_tokens)
    engine = EngineConfig(max_step_tokens=16, max_chunk_tokens=chunk, async_scheduling=ahead)
    settings = replace(DEFAULTS, window=window, num_blocks=num_blocks, engine=engine)
    if goes_back != "first":
        monkeypatch.setattr(Requests, "_make_room", _late(goes_back == "last"))
    token_ids, _ = Ask(0, 0.0, TEXT, tuple((1, image) for image in images)).placed()
    max_tokens = num_tokens - len(token_ids)
    with simulated("1epd", settings) as cluster:
        record = cluster.ask(*images, max_tokens=max_tokens, stops_at_eos=False)
        cluster.pass_time(3.0)
        requests = cluster.instance("epd0").requests
        assert requests is not None
        served = (len(record.tokens), requests.totals["preemptions"]) == (max_tokens, 0)
    # Too late is never where it is in a step, or has been promised its blocks: it goes on later.
    late = goes_back == "last" and bool(ahead or images)
    assert served is (goes_back == "first" or late)


def _late(does: bool) -> Callable[[Any], bool]:
    """Growth that takes before it gives back, or never does."""
    make_room = Requests._make_room

    def late(self: Any) -> bool:
        with mock.patch.object(self._scheduler, "passing", lambda: ()):
            could = make_room(self)
        for one, passed in self._scheduler.passing() if does else ():
            self.fire(one, Slid(passed))
        return could

    return late


SHARED = tuple(range(20, 60))  # a system prompt of several windows
ENDS = (70, 71, 72, 73, 74), (80, 81)
OTHER = tuple(range(90, 130))


def asked(topology: str, num_blocks: int, *texts: tuple[int, ...]) -> tuple[int, list[Grant]]:
    """One after another: tokens that prefill found, and decode's grants."""
    engine = EngineConfig(max_step_tokens=16, max_chunk_tokens=8)
    settings = replace(DEFAULTS, window=10, num_blocks=num_blocks, engine=engine)
    grants = list[Grant]()
    with simulated(topology, settings) as cluster:
        cluster.world.watch(lambda *at: grants.append(at[2].grant), GrantReceived)
        for text in texts:
            record = cluster.ask(text=text, max_tokens=4, stops_at_eos=False)
            cluster.pass_time(1.0)
            assert tuple(record.tokens) == record.ask.answer()
        requests = cluster.instance("epd0" if topology == "1epd" else "p0").requests
        assert requests is not None
        return requests.totals["prefix_cache_hit_tokens"], grants


@pytest.mark.parametrize("topology", ["1epd", "1e1p1d"])
def test_a_beginning_that_prompts_share_is_found_at_its_end(topology: str) -> None:
    """Though its windows had gone back before the first prompt had a token."""
    first, second = SHARED + tuple(range(70, 86)), SHARED + ENDS[1]
    assert asked(topology, 256, first, second)[0] == len(SHARED)
    assert asked(topology, 40, first, OTHER, second)[0] == 0, "others have taken them"


def test_decode_asks_for_what_it_lacks() -> None:
    """The last window of a shorter prompt begins before what came with a longer one."""
    rows, texts = layout_with(10).rows, [SHARED + end for end in ENDS]
    _, (first, second) = asked("1e1p1d", 256, *texts)
    assert (first.held, len(first.slots)) == ((), len(moved(rows, len(texts[0]))))
    places, common = moved(rows, len(texts[1])), rows.num_full(len(SHARED))
    came = {place for place in moved(rows, len(texts[0])) if place < common}
    assert second.held == tuple(place for place in places if place in came)
    assert second.held != tuple(places[: len(second.held)]), "some before them are not there"
    assert len(second.slots) == len(places) - second.num_held
