"""Layers with a window, whose blocks go back while a request runs: tokens and logits are those of
transformers over many windows, in chunks, behind a hit, after giving way, and where KV moves."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest

from epd.config import EngineConfig
from epd.engine.language.state_kinds import PagedRows, layout_of
from epd.fsm.incoming import Incoming
from epd.fsm.kernel import Event
from epd.fsm.request import Request, Slid
from epd.layouts import PASSED, RowKind
from epd.roles.decode.role import DecodeRole
from epd.roles.steps.requests import Requests
from epd.scheduling.kv_order import moved
from tests.roles.topologies.golden import Question
from tests.roles.topologies.test_together import CONFIG, Served, golden, kv_layout, model_dir

LONG = "a text of many more tokens than the window of its layers has places for, "


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Blocks that requests gave up while they ran, by the message with which they came."""
    found, give_back = Counter[str](), Requests.return_passed

    def counted(self: Requests, request: Request, event: Slid) -> None:
        found[f"{type(request.message).__name__} {request.key}"] += len(event.passed)
        give_back(self, request, event)

    monkeypatch.setattr(Requests, "return_passed", counted)
    return found


def served_with(
    family: str, asked: list[Question], topology: str = "1epd", rounds: int = 1, **config: Any
) -> Served:
    directory = model_dir(family)
    served = Served(directory, topology, msgspec.structs.replace(CONFIG, **config))
    asyncio.run(served.play(asked, rounds=rounds))
    return served


EACH = pytest.mark.parametrize(
    ("family", "ahead"),
    [
        ("gemma4", False),
        pytest.param("gemma4", True, marks=pytest.mark.long),
        pytest.param("gemma4_moe", False, marks=pytest.mark.long),
        pytest.param("gemma4_moe", True, marks=pytest.mark.long),
    ],
)


@EACH
def test_answers_that_give_way_while_their_windows_slide(
    family: str, ahead: bool, passed: Counter[str]
) -> None:
    asked = [golden(model_dir(family), LONG + end, 0, 60) for end in ("so", "and", "or")]
    layout = kv_layout(model_dir(family))
    total, reach = len(asked[1].generation.token_ids) + 60, 7 * (1 + ahead)
    num_blocks = layout.rows.needed(total, reach) * 5 // 3
    served = served_with(
        family,
        asked,
        kv_nbytes=num_blocks * layout.block_nbytes,
        max_chunk_tokens=7,
        async_scheduling=ahead,
    )
    assert served.total("preemptions")
    assert len(passed) == 3 and min(passed.values()) >= 5


@pytest.mark.parametrize(
    ("family", "topology"),
    [
        ("gemma4_moe", "1epd"),
        ("gemma4", "1e1p1d"),
        pytest.param("gemma4", "1epd", marks=pytest.mark.long),
        pytest.param("gemma4_moe", "1e1p1d", marks=pytest.mark.long),
    ],
)
def test_a_beginning_is_found_with_its_window(
    family: str, topology: str, passed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same again: what is behind the window may be forgotten."""
    directory, found = model_dir(family), list[tuple[int, ...]]()
    scheduled = Requests.fire

    def seen(self: Requests, machine: Request, event: Any) -> None:
        if type(event).__name__ == "Scheduled" and event.num_cached:
            found.append(event.blocks)
        scheduled(self, machine, event)

    monkeypatch.setattr(Requests, "fire", seen)
    asked = [golden(directory, LONG, 1, 40), golden(directory, LONG + "so", 0, 60)]
    served = served_with(family, asked, topology, 2, max_chunk_tokens=32)
    assert served.total("prefix_cache_hit_tokens") and passed
    assert any(PASSED in blocks for blocks in found)


@EACH
def test_decode_is_sent_what_it_sees(
    family: str, ahead: bool, passed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of layers with a window, in the same parts, while both ends give blocks up; and of a prompt
    that begins alike less still."""
    directory, received, publish = model_dir(family), list[Incoming](), DecodeRole.publish

    async def counted(self: DecodeRole, incoming: Incoming) -> Event:
        received.append(incoming)
        return await publish(self, incoming)

    monkeypatch.setattr(DecodeRole, "publish", counted)
    texts = (("so", 0, 40), ("and", 1, 30), ("or", 0, 40))
    asked = [golden(directory, LONG * 3 + end, images, n) for end, images, n in texts]
    layout, chunk = kv_layout(directory), 32
    served_with(family, asked, "1e1p1d", 2, max_chunk_tokens=chunk, async_scheduling=ahead)
    rows, window = layout.rows, layout.kinds[0].window
    assert len(received) == 6 and all(one.num_rows > 3 * window + chunk for one in received)
    for incoming in received:
        num_moved, num_blocks = len(moved(rows, incoming.num_rows)), rows.count(incoming.num_rows)
        written_nbytes = sum(nbytes for nbytes, _ in incoming.parts)
        assert written_nbytes == (num_moved - incoming.num_held) * layout.block_nbytes
        of_windows = rows.num_windowed(num_blocks)
        assert num_moved - (num_blocks - of_windows) <= rows.live(1) < 0.6 * of_windows
    assert max(len(one.parts) for one in received) > 1, "some left while the rest was computed"
    assert all(one.num_held for one in received[3:])
    assert {key.split()[0] for key in passed} == {"PrefillRequest", "KvOffer"}, "at both ends"


def test_a_long_context_has_the_memory_that_windows_allow(
    passed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = model_dir("gemma4_moe")
    layout = kv_layout(directory)
    asked = golden(directory, LONG * 24, 0, 60)
    leased, plan = list[int](), Requests.plan

    def counted(self: Requests, *, alone: bool) -> Any:
        found = plan(self, alone=alone)
        leased.extend(self.pool.num_leased for _, _, decodes in found if decodes)
        return found

    monkeypatch.setattr(Requests, "plan", counted)
    served_with("gemma4_moe", [asked])
    num_tokens = len(asked.generation.token_ids) + len(asked.token_ids)
    assert num_tokens > 1500 and passed.total() > 90
    window, whole = layout.kinds
    allowed = num_tokens / whole.block_size + window.window / window.block_size
    assert leased[-1] <= 1.05 * allowed < 0.6 * layout.rows.count(num_tokens)


@pytest.mark.parametrize(
    ("windowed", "full", "window"),
    [((12, 1), (3, 1), 512), ((20, 2), (4, 2), 512), ((25, 8), (5, 2), 1024)],
    ids=["E2B", "E4B", "26B-A4B"],
)
def test_the_memory_of_32768_tokens(
    windowed: tuple[int, int], full: tuple[int, int], window: int
) -> None:
    """Layers and heads of each kind, as published, in bf16: while it decodes."""
    import torch

    layers = range(windowed[0]), range(windowed[0], windowed[0] + full[0])
    kinds = tuple(
        RowKind(layers=tuple(its), num_kv_heads=heads, head_dim=width, window=seen)
        for its, (_, heads), width, seen in zip(
            layers, (windowed, full), (256, 512), (window, 0), strict=True
        )
    )
    num_layers = windowed[0] + full[0]
    layout = layout_of(
        PagedRows(num_layers, windowed[1], 256, kinds=kinds), (), torch.bfloat16, 16, 4
    )
    of_window, of_whole = (
        len(kind.layers) * 4 * kind.num_kv_heads * kind.head_dim for kind in layout.kinds
    )
    depth = 2 if EngineConfig().async_scheduling else 1
    nbytes = layout.rows.needed(32768, depth) * layout.block_nbytes
    assert nbytes <= 1.05 * (32768 * of_whole + window * of_window)
