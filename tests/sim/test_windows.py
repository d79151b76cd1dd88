"""Blocks behind a window go back before others are taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from epd.config import EngineConfig
from epd.fsm.request import Slid
from epd.roles.steps.requests import Requests
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
