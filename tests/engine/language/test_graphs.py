"""Steps with prompts in captured shapes: the same answers, and nothing of what pads them is seen.

A recorder that runs the call again stands for a captured graph: it reads and writes the same
memory, and no argument of the call can change.  On a GPU, tests/gpu/test_engine.py has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Semaphore

import numpy as np
import pytest
import torch

from epd.engine.base import StepSequence
from epd.engine.language.flat_batch import (
    BatchShape,
    FlatBatch,
    FlatChunk,
    FlatSequence,
    chunks_of,
    pack,
    shape_of,
    view,
)
from epd.engine.language.graphs import (
    COARSE_STEP,
    FINE_STEP,
    FINE_TOKENS,
    MAX_CHUNKS,
    DecodeGraphs,
    GraphRooms,
    PromptGraphs,
)
from epd.engine.language.row_splice import AddedRows
from tests.engine.driver import Driver
from tests.engine.language.test_decoder import fuse, fused  # noqa: F401  (a fixture)
from tests.engine.reference import reference_generate
from tests.engine.test_equality import NEW_TOKENS, cases
from tests.engine.tiny_models import FAMILIES, OF_FOUR_NORMS

TILE = 64
SELDOM = ("kimi_k25", "qwen3_5_moe", "paddleocr_vl")


class Again:
    """A recorder; `replays` counts what it ran again, from cut to cut as what is captured is."""

    def __init__(self) -> None:
        self.replays = 0
        self._on_cut: Callable[[], object] = int
        self._thread = ThreadPoolExecutor(1)

    def cut(self) -> None:
        self._on_cut()

    def __call__(self, call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        (replay,), result = self.parts(call)
        return replay, result

    def parts(
        self, call: Callable[[], torch.Tensor]
    ) -> tuple[list[Callable[[], None]], torch.Tensor]:
        cuts: list[int] = []
        self._on_cut = lambda: cuts.append(0)
        result = call().clone()
        turn, paused = Semaphore(0), Semaphore(0)
        under_way: list[Future[torch.Tensor]] = []

        def pause() -> None:
            paused.release()
            turn.acquire()

        def again(inference: bool) -> torch.Tensor:
            self._on_cut = pause
            with torch.inference_mode(inference):
                try:
                    return call()
                finally:
                    paused.release()

        def begin() -> None:
            self.replays += 1
            inference = torch.is_inference_mode_enabled()
            under_way.append(self._thread.submit(again, inference))
            paused.acquire()

        def go_on() -> None:
            turn.release()
            paused.acquire()

        def end(part: Callable[[], None]) -> None:
            part()
            result.copy_(under_way.pop().result())

        *before, last = [begin, *[go_on] * len(cuts)]
        return [*before, partial(end, last)], result


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.long) if family in SELDOM else family
        for family in (*FAMILIES, "gemma4_moe")
        if family not in OF_FOUR_NORMS
    ],
)
async def test_answers_are_the_same(
    family: str,
    fused: Callable[[str], Driver],  # noqa: F811
) -> None:
    """Prompts with and without images in chunks beside decodes; no block of another moves."""
    serving = fused(family)
    language, again = serving.language, Again()
    language.forward.capture(again, max_running=8, max_prompt_tokens=256)  # type: ignore[attr-defined]
    language.pool.memory.fill_(64)
    asked = cases(family)
    golden = [reference_generate(serving.model_dir, p, i, NEW_TOKENS) for p, i in asked]
    requests = [
        await serving.request(str(i), prompt, images, max_tokens=NEW_TOKENS)
        for i, (prompt, images) in enumerate(asked)
    ]
    used = {block for request in requests for block in request.blocks}
    assert await serving.run(requests, 16) == golden
    has_prompts = language.forward.prompt_graphs is not None  # type: ignore[attr-defined]
    assert has_prompts == (family != "kimi_k25")  # where the host knows what is expanded
    assert again.replays > (NEW_TOKENS if has_prompts else NEW_TOKENS // 2)
    others = [block for block in range(language.num_blocks) if block not in used]
    assert others and bool((language.pool.memory[others] == 64).all())


@pytest.mark.parametrize("captured", [True, False])
def test_who_is_told_of_layers_finds_them_written(
    captured: bool,
    fused: Callable[[str], Driver],  # noqa: F811
) -> None:
    """In captured steps, too: they are replayed in parts, each up to what leaves by itself."""
    language, again = fused("qwen3").language, Again()
    if captured:
        language.forward.capture(again, max_running=8, max_prompt_tokens=256)  # type: ignore[attr-defined]
    layout, told = language.kv_layout, []
    assert layout.slots_per_block > 1
    language.pool.tensor.fill_(3.0)

    def look(index: int) -> None:
        keys = language.pool.tensor[1, :, 0, 0]  # of the first token, by layer
        told.append((index, [layer for layer, key in enumerate(keys) if bool((key != 3.0).all())]))

    prompt = StepSequence("a", list(b"the quick brown fox"), 0, (1, 2), None)
    language._launch([prompt], look)
    assert again.replays == captured
    due = range(0, layout.num_layers, layout.layers_per_slot)[1:]
    assert {index for index, _ in told} >= set(due)
    assert all(written == [*range(index)] for index, written in told), told


def test_the_smallest_room_that_holds_a_step() -> None:
    rooms = GraphRooms(1200, 48, TILE)
    shapes = list(rooms)
    assert len(set(shapes)) == len(shapes) == (16 + 2) * 4
    assert shapes[0] == BatchShape(1280, 48 + MAX_CHUNKS, 48, 20 + MAX_CHUNKS)
    most = {"tokens": [1280], "decodes": [1] * 48 + [1232], "chunks": [2] * MAX_CHUNKS}
    for counts in (
        [5],
        [1] * 9 + [100],
        [1] * 40 + [500],
        [1] * 33,
        [1024],
        [1025],
        *most.values(),
    ):
        needed = shape_of(counts, TILE)
        room = rooms.holding(needed)
        assert room is not None and room in shapes
        assert all(a >= b for a, b in zip(room, needed, strict=True))
        step = FINE_STEP if needed.num_tokens <= FINE_TOKENS else COARSE_STEP
        assert room.num_tokens - needed.num_tokens < step
        fits = [s.num_decodes for s in shapes if s.num_decodes >= needed.num_decodes]
        assert room.num_decodes == min(fits)
    for name, counts in most.items():
        assert rooms.holding(shape_of([*counts, counts[-1]], TILE)) is None, name
    few_decodes = [1, *[2] * MAX_CHUNKS, 1000]  # fewer than their room
    assert rooms.holding(shape_of(few_decodes[1:], TILE)) is None
    assert rooms.holding(shape_of(few_decodes, TILE)) is None
    assert rooms.holding(shape_of([1, *few_decodes[2:]], TILE)) is not None
    assert rooms.holding(shape_of([1] * 49, TILE)) is None
    large = GraphRooms(3000, 48, TILE)
    assert len(list(large)) == (16 + 8) * 4 + 4, "those of more than 2048 tokens without decodes"
    assert large.holding(shape_of([2300], TILE)) == BatchShape(2304, MAX_CHUNKS, 0, 36 + MAX_CHUNKS)
    assert large.holding(shape_of([1, 2300], TILE)) is None
    assert {s.num_tokens for s in GraphRooms(600, 8, TILE)} == set(range(64, 641, 64))
    assert {s.num_decodes for s in GraphRooms(600, 8, TILE)} == {0, 8}
    many = GraphRooms(600, 256, TILE)
    assert all(shape.num_decodes <= shape.num_tokens for shape in many), "a row for each"
    assert len(set(many)) == len(list(many))
    for room in (many.holding(shape_of([1] * count, TILE)) for count in (60, 100, 190, 250)):
        assert room in set(many)


def test_what_pads_is_nobodys() -> None:
    """Whatever the numbers, a room has what the batch has, and behind it nothing that is read."""
    rng = np.random.default_rng(7)
    for _ in range(50):
        counts = [1] * int(rng.integers(0, 9)) + rng.integers(2, 90, rng.integers(0, 5)).tolist()
        starts = rng.integers(0, 60, len(counts)).tolist()
        sequences = []
        for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
            table = np.arange(100 * i, 100 * i + 20, dtype=np.int32)
            ids = rng.integers(1, 99, count).tolist()
            sequences.append(FlatSequence(ids, start, table, start))
        needed = shape_of(counts, TILE)
        room = BatchShape(*(size + int(rng.integers(0, 9)) for size in needed))
        exact = view(*_tensor(pack(sequences, 16, TILE)), TILE)
        padded = view(*_tensor(pack(sequences, 16, TILE, room)), TILE)
        assert padded.shape == room and exact.shape == needed
        assert int(padded.decodes) == needed.num_decodes
        _assert_begins(padded, exact, needed)
        assert (padded.slots[needed.num_tokens :] == -1).all()
        assert (padded.sources == -1).all()
        assert not padded.seq_lens[needed.num_sequences :].any()
        assert (padded.cu_q[needed.num_sequences :] == needed.num_tokens).all()
        assert (padded.tiles[needed.num_tiles :] == -1).all()


def _tensor(packed: tuple[np.ndarray, BatchShape]) -> tuple[torch.Tensor, BatchShape]:  # type: ignore[type-arg]
    return torch.from_numpy(packed[0]), packed[1]


def _assert_begins(padded: FlatBatch, exact: FlatBatch, needed: BatchShape) -> None:
    for name in ("ids", "slots", "seq_lens", "cu_q", "indptr", "tiles", "indices"):
        expected = getattr(exact, name)
        assert torch.equal(getattr(padded, name)[: len(expected)], expected), name
    assert torch.equal(padded.positions[:, : needed.num_tokens], exact.positions)


def test_rows_of_one_step_are_gone_in_the_next() -> None:
    """Deepstack rows are added where they stand, and at no token of a later step."""
    seen: list[torch.Tensor] = []

    def layers(embeds: torch.Tensor, flat: FlatBatch, added: Sequence[AddedRows]) -> torch.Tensor:
        (rows,) = added
        assert rows.at == 0 and rows.rows.shape == (2, len(embeds), 4)
        seen.append(rows.rows.clone())
        return embeds + rows.rows.sum(dim=0)

    graphs = PromptGraphs(
        layers, torch.zeros(1, 4), 2, GraphRooms(256, 4, TILE), 16, TILE, 64, Again()
    )
    for count, at, width in ((200, 50, 100), (90, 0, 10), (130, 100, 20), (40, 0, 0)):
        table = np.arange(20, dtype=np.int32)
        part = FlatSequence([7] * count, 0, table, 0)
        flat = graphs.fill([part], shape_of([count], TILE))
        assert flat is not None
        embeds = torch.randn(len(flat.ids), 4)
        rows = torch.randn(2, width, 4)
        expected = embeds.clone()
        expected[at : at + width] += rows.sum(dim=0)
        added = [AddedRows(at, rows)] if width else []
        torch.testing.assert_close(graphs.replay(flat, embeds, added), expected)


def test_logits_of_all_sizes_lie_in_one_place() -> None:
    """Kept for each size, those of a large vocabulary were a GB."""
    device = torch.device("cpu")

    def forward(flat: FlatBatch) -> torch.Tensor:
        return flat.ids[:, None] + torch.arange(5)

    graphs = DecodeGraphs(forward, device, 16, 8, 64, lambda call: (lambda: None, call()))
    places = {logits.data_ptr() for _, logits in graphs._graphs.values()}
    assert len(graphs._graphs) == 4 and len(places) == 1
    graphs = DecodeGraphs(forward, device, 16, 8, 64, Again())
    for count in (8, 1, 3):
        table = np.arange(2, dtype=np.int32)
        parts = [FlatSequence([10 * n], 0, table, 0) for n in range(count)]
        found = graphs.replay(parts)
        assert found is not None
        assert found.tolist() == [[10 * n + k for k in range(5)] for n in range(count)]


def test_what_all_shapes_give_lies_in_one_place() -> None:
    """A result that is kept is memory that no other graph may use: hundreds of MB."""
    kept: list[torch.Tensor] = []

    class Record(Again):
        def parts(
            self, call: Callable[[], torch.Tensor]
        ) -> tuple[list[Callable[[], None]], torch.Tensor]:
            kept.append(call())
            return [lambda: None], kept[-1]

    def layers(embeds: torch.Tensor, flat: FlatBatch, added: Sequence[AddedRows]) -> torch.Tensor:
        return embeds + 1.0

    PromptGraphs(layers, torch.zeros(1, 4), 0, GraphRooms(256, 4, TILE), 16, TILE, 64, Record())
    assert len(kept) == 8
    assert {result.data_ptr() for result in kept} == {kept[0].data_ptr()}


def test_more_blocks_than_there_is_room_for_are_not_captured() -> None:
    graphs = PromptGraphs(
        lambda embeds, flat, added: embeds, torch.zeros(1, 4), 0, GraphRooms(64, 4, TILE), 16,
        TILE, 4, Again(),
    )  # fmt: skip
    table = np.arange(60, dtype=np.int32)
    for start, fits in ((0, True), (32, True), (900, False)):
        part = FlatSequence([7] * 31, start, table, 0)
        assert (graphs.fill([part], shape_of([31], TILE)) is not None) is fits, start


async def test_a_copied_state_goes_on_in_a_captured_step(
    fused: Callable[[str], Driver],  # noqa: F811
) -> None:
    """Copies come before the graph reads them, and what was copied stays as it was."""
    serving = fused("qwen3_5")
    language, again = serving.language, Again()
    request = await serving.request("r", cases("qwen3_5")[0][0])
    await serving.step([request], 4096)
    size = language.kv_layout.num_state_blocks
    kept, others = request.blocks[:size], [serving.free.pop() for _ in range(size)]
    before = [bytes(view) for view in language.pool.views(kept)]
    language.forward.capture(again, max_running=8, max_prompt_tokens=0)  # type: ignore[attr-defined]
    step = request.next_step(1)
    step.block_table = [*others, *request.blocks[size:]]
    step.copies = list(zip(kept, others, strict=True))
    found = language.logits([step]).clone()
    assert again.replays == 1
    assert [bytes(view) for view in language.pool.views(kept)] == before
    assert [bytes(view) for view in language.pool.views(others)] != before
    assert torch.equal(found, language.logits([request.next_step(1)]))


async def test_a_prompt_that_ends_in_a_row_of_an_image_is_no_decode(
    fused: Callable[[str], Driver],  # noqa: F811
) -> None:
    """Its last chunk may be of one token, too, and graphs of decodes know nothing of rows."""
    serving = fused("qwen3_vl")
    language, again = serving.language, Again()
    request = await serving.request("r", *cases("qwen3_vl")[2])
    (image,) = request.layouts
    del request.token_ids[image.offset + image.num_rows :]
    await serving.step([request], len(request.token_ids) - 1)
    step = request.next_step(1)
    assert len(step.spans) == 1 and step.sample is not None
    expected = language.logits([step]).clone()
    language.forward.capture(again, max_running=8, max_prompt_tokens=0)  # type: ignore[attr-defined]
    assert torch.equal(language.logits([step]), expected) and not again.replays


def test_blocks_of_states_are_a_row_for_each_sequence() -> None:
    """Who pads has nobody's; what the host knows of chunks is behind the decodes."""
    table = np.arange(20, dtype=np.int32)
    states = [np.array([50 + i, 60 + i], dtype=np.int32) for i in range(3)]
    counts, starts = (1, 1, 5), (7, 0, 3)
    sequences = [
        FlatSequence([7] * count, start, table, start, state=state)
        for count, start, state in zip(counts, starts, states, strict=True)
    ]
    room = BatchShape(12, 6, 4, 3, 2)
    padded = view(*_tensor(pack(sequences, 16, TILE, room)), TILE, chunks_of(sequences))
    assert padded.states.tolist() == [[50, 60], [51, 61], [52, 62], *[[-1, -1]] * 3]
    assert padded.chunks == (FlatChunk(2, 2, 5, 3),)
    _, needed = pack(sequences, 16, TILE)
    assert needed == shape_of(counts, TILE, 2) == BatchShape(7, 3, 2, 1, 2)
