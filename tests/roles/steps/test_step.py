"""What a request brings to a step: the rows of its chunk, and what is left of their run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from epd.fsm.request import Request
from epd.messages import Address, MediaItem, SamplingParams
from epd.roles.steps.record import Record
from epd.roles.steps.step import _spans, sequence_of
from epd.scheduling.prefix_keys import PrefixKeys


def test_a_span_has_what_a_chunk_leaves_of_its_frame() -> None:
    """A video of two frames that stand apart: every chunk of its prompt."""
    runs = {2: range(5), 9: range(5, 10)}  # by place: rows
    item = MediaItem(
        index=0,
        mm_hash="m",
        offset=2,
        num_rows=10,
        grid_thw=(2, 1, 5),
        room="a",
        encoder=Address("e", 1, ""),
        offsets=tuple(runs),
    )
    request: Any = SimpleNamespace(message=SimpleNamespace(items=(item,)))
    record: Any = SimpleNamespace(rows={"a": "rows"})
    for start in range(16):
        for stop in range(start + 1, 17):
            expected = []
            for at, rows in runs.items():
                held = [row for place, row in enumerate(rows, at) if start <= place < stop]
                if held:
                    place = at + held[0] - rows[0]
                    expected.append((place - start, held[0], len(held), rows[-1] - held[-1]))
            found = _spans(request, record, start, stop - start)
            assert [(s.at, s.row_start, s.count, s.left) for s in found] == expected


def test_the_prompt_of_an_attempt_that_goes_on_is_one_object_in_all_steps() -> None:
    """It is not copied for each token, and nothing of it is remembered when the attempt ends."""
    sampling = SamplingParams(max_tokens=9, repetition_penalty=1.1)
    message: Any = SimpleNamespace(
        request_id="r", attempt=2, sampling=sampling, gateway=None, deadline_s=0, items=(),
        num_emitted=2, adapter="",
    )  # fmt: skip
    request, record = Request("r/2", message, (5, 6, 7, 8, 9)), Record(PrefixKeys(4, (), ""))
    first = sequence_of(request, record, 2)
    request.num_computed = 2
    second = sequence_of(request, record, 3)
    assert list(first.prompt_ids) == [5, 6, 7] and second.prompt_ids is first.prompt_ids
    assert list(second.output_ids) == [8, 9]
