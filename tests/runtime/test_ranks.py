"""What the ranks of a group tell each other: a step travels whole, but for its rows."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from unittest import mock

import msgspec
import pytest
import torch

from epd.config import InstanceConfig
from epd.engine.base import (
    PENDING,
    EngineError,
    Patches,
    Rows,
    RowSpan,
    Scoring,
    SlotRows,
    StepSequence,
)
from epd.fsm.group import RankEnded
from epd.groups.asks import Fault, Holds, RankLost, Settle
from epd.groups.commands import AskAnswered, Numbered, decode_order, encode_command, frame, frame_of
from epd.groups.following import Rendezvous
from epd.groups.leader import Command, Encode, GoOn, Probe, Step
from epd.groups.processes import RankProcesses, _Rank
from epd.messages import Address, SamplingParams
from tests.patience import PATIENCE_S


def _told(command: Command) -> Command:
    told_frame = encode_command(7, command)
    assert int.from_bytes(told_frame[:4], "big") == len(told_frame) - 4
    told = msgspec.msgpack.decode(told_frame[4:], type=Numbered)
    assert told.number == 7
    return told.command


def _told_step(batch: list[StepSequence]) -> list[StepSequence]:
    told = _told(Step(batch))
    assert isinstance(told, Step)
    return told.batch


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
    told = _told_step(batch)
    for its, ours in zip(told, batch, strict=True):
        assert its.request_id == ours.request_id and its.start == ours.start
        assert list(its.token_ids) == list(ours.token_ids)
        assert list(its.block_table) == list(ours.block_table)
        assert its.positions == ours.positions and its.rope_delta == ours.rope_delta
        assert its.sample == ours.sample and its.output_index == ours.output_index
        assert list(its.prompt_ids) == list(ours.prompt_ids)
        assert its.num_drafts == ours.num_drafts and its.is_pending == ours.is_pending
    assert told[1].scoring is not None
    assert list(told[1].scoring.targets) == [6, 7]


def test_positions_may_be_tensors_and_rows_stay_here() -> None:
    positions = list(torch.arange(6).view(3, 2))
    rows = Rows(torch.zeros(4, 8), 4, 128)
    batch = [StepSequence("r", (1, 2), 0, (0,), positions, spans=(RowSpan(0, 1, 2, rows),))]
    (its,) = _told_step(batch)
    assert its.positions == [[0, 1], [2, 3], [4, 5]]
    assert list(its.spans) == [RowSpan(0, 1, 2, None)]
    assert batch[0].spans[0].rows is rows


def test_where_rows_are_at_the_ranks_is_told() -> None:
    rows = SlotRows((3, 5), 7, is_sharded=True, transport="shm")
    batch = [StepSequence("r", (1, 2), 0, (0,), None, spans=(RowSpan(0, 1, 2, rows),))]
    ((span,),) = (its.spans for its in _told_step(batch))
    assert list(span.rows.slots) == [3, 5]
    assert replace(span.rows, slots=(3, 5)) == rows


def test_of_an_image_its_size_travels_and_no_pixels() -> None:
    pixels = torch.zeros(16, 6, dtype=torch.uint8)
    told = _told(Encode([Patches(pixels, (1, 4, 4), 16, 4)]))
    assert told == Encode([Patches(["torch.uint8", 16, 6], (1, 4, 4), 16, 4)])
    assert _told(Encode([], 3)) == Encode([], 3)
    assert _told(GoOn()) == GoOn()
    assert _told(Probe()) == Probe()


async def test_what_a_rank_was_asked_is_over_with_its_answer_or_with_the_rank() -> None:
    """Nothing is kept of what was answered, and nobody waits for who has ended."""
    ours, theirs = socket.socketpair()
    place = ("h", 0)
    rank, its = _Rank(place, ours), Settle(peer=Address("p0", 1, ""))
    ranks = RankProcesses(
        InstanceConfig(instance_id="d0", roles=("decode",)), Rendezvous(1), {1: rank}
    )
    ranks.leader = mock.Mock()
    ours_reader, rank.writer = await asyncio.open_unix_connection(sock=ours)
    reader, writer = await asyncio.open_unix_connection(sock=theirs)
    reads = asyncio.create_task(ranks._read(1, ours_reader))
    asks = [asyncio.create_task(ranks.ask(1, its)) for _ in range(3)]
    last, *others = reversed([decode_order(await frame_of(reader)) for _ in asks])
    for told, answer in zip(others, (Fault(reason="full"), Holds(holds=True)), strict=True):
        assert told.ask == its
        writer.write(frame(AskAnswered(told.serial, answer)))
    assert await asks[0] == Holds(holds=True)
    with pytest.raises(EngineError, match="rank 1: full"):
        await asks[1]
    assert list(rank.asked) == [last.serial]
    writer.close()
    async with asyncio.timeout(PATIENCE_S):
        for asked in (asks[2], ranks.ask(1, its)):
            with pytest.raises(RankLost):
                await asked
        await reads
    ranks.leader.fire.assert_called_once_with(RankEnded(1, "its process has ended"))
    rank.writer.close()
