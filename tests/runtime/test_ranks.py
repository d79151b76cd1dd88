"""What the ranks of a group tell each other: a step travels whole, but for its rows."""

from __future__ import annotations

import msgspec
import torch

from epd.engine.base import PENDING, Rows, RowSpan, Scoring, StepSequence
from epd.messages import SamplingParams
from epd.runtime.ranks import Command, encode_command


def _told(batch: list[StepSequence]) -> Command:
    frame = encode_command(7, batch)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    return msgspec.msgpack.decode(frame[4:], type=Command)


def test_a_step_travels_as_it_is() -> None:
    batch = [
        StepSequence("r/1", (PENDING,), 9, (3, 4), None, -2, output_index=3),
        StepSequence(
            "r/2",
            (5, 6, 7),
            0,
            (1,),
            [[0, 1, 2], [0, 1, 1], [0, 1, 1]],
            sample=SamplingParams(max_tokens=4, temperature=0.5, seed=11),
            prompt_ids=(5, 6, 7),
            num_drafts=1,
            scoring=Scoring((6, 7), 2),
        ),
    ]
    told = _told(batch)
    assert told.number == 7
    for its, ours in zip(told.batch, batch, strict=True):
        assert its.request_id == ours.request_id and its.start == ours.start
        assert list(its.token_ids) == list(ours.token_ids)
        assert list(its.block_table) == list(ours.block_table)
        assert its.positions == ours.positions and its.rope_delta == ours.rope_delta
        assert its.sample == ours.sample and its.output_index == ours.output_index
        assert list(its.prompt_ids) == list(ours.prompt_ids)
        assert its.num_drafts == ours.num_drafts and its.is_pending == ours.is_pending
    assert told.batch[1].scoring is not None
    assert list(told.batch[1].scoring.targets) == [6, 7]


def test_positions_may_be_tensors_and_rows_stay_here() -> None:
    positions = list(torch.arange(6).view(3, 2))
    rows = Rows(torch.zeros(4, 8), 4, 128)
    batch = [StepSequence("r", (1, 2), 0, (0,), positions, spans=(RowSpan(0, 1, 2, rows),))]
    (its,) = _told(batch).batch
    assert its.positions == [[0, 1], [2, 3], [4, 5]]
    assert list(its.spans) == [RowSpan(0, 1, 2, None)]
    assert batch[0].spans[0].rows is rows
