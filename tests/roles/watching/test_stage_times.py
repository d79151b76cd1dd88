"""Histograms of stages and hops, from the stories of machines that have ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from epd.fsm.encoding import Encoding
from epd.fsm.generation import Generation
from epd.messages import KvOffer
from epd.records import STAGES, Histogram
from epd.roles.watching.stage_times import NBYTES, SECONDS, StageTimes
from epd.scheduling.step_cost import KEPT


def story(*entries: tuple[str, str, float]) -> list[Any]:
    return [SimpleNamespace(source=a, target=b, at_s=at_s) for a, b, at_s in entries]


def machine(table: str, kind: type[Any] | None, *entries: tuple[str, str, float]) -> Any:
    """A machine of this kind, or a request, with this story."""
    made = mock.Mock(spec=kind, message=None) if kind is not None else SimpleNamespace(message=None)
    made.table, made.story = SimpleNamespace(name=table), story(*entries)
    return made


def found(times: StageTimes) -> dict[tuple[str, str], Histogram]:
    """By role and stage."""
    return {(dict(h.labels)["role"], dict(h.labels)["stage"]): h for h in times.told()}


def bucket(histogram: Histogram) -> list[int]:
    return [at for at, count in enumerate(histogram.counts) if count]


def test_the_stays_in_a_stage_are_added_up_and_counted_once() -> None:
    times = StageTimes(lambda: 0.0)
    assert times.told() == ()
    prompt = STAGES["REQUEST", "RUNNING"]
    waiting = STAGES["REQUEST", "WAITING"]
    one = machine(
        "REQUEST",
        None,
        ("WAITING", "WAITING", 1.0),
        ("WAITING", "RUNNING", 1.5),
        ("RUNNING", "WAITING", 2.5),
        ("WAITING", "RUNNING", 2.75),
        ("RUNNING", "RUNNING", 3.0),
        ("RUNNING", "FINISHED", 4.75),
    )
    times.note_stages(one)
    told = found(times)
    assert {key: h.total for key, h in told.items()} == {
        ("prefill", waiting): 0.75,
        ("prefill", prompt): 3.0,
    }
    for histogram in told.values():
        assert sum(histogram.counts) == 1 and len(histogram.counts) == len(SECONDS) + 1
        (at,) = bucket(histogram)
        assert SECONDS[at - 1] < histogram.total <= SECONDS[at]
        assert histogram.name == "epd_stage_seconds"
    assert times.told() is times.told()
    times.note_stages(one)
    assert [sum(h.counts) for h in times.told()] == [2, 2]
    assert found(times)["prefill", prompt].total == 6.0


@pytest.mark.parametrize(
    ("table", "kind", "state", "role"),
    [
        ("GENERATION", Generation, "PREPARING", "gateway"),
        ("ENCODING", Encoding, "ENCODING", "encode"),
        ("REQUEST", None, "WAITING_FOR_REMOTE_KV", "decode"),
        ("REQUEST", None, "DECODING", "decode"),
        ("REQUEST", None, "RUNNING", "prefill"),
    ],
)
def test_whose_stage_it_was(table: str, kind: Any, state: str, role: str) -> None:
    times = StageTimes(lambda: 0.0)
    times.note_stages(machine(table, kind, (state, state, 1.0), (state, "END", 2.0)))
    ((found_role, _),) = found(times)
    assert found_role == role


def test_what_was_received_is_decoded_in_all_of_its_states() -> None:
    times, one = StageTimes(lambda: 0.0), machine("REQUEST", None, ("RUNNING", "X", 1.0))
    one.story = story(("RUNNING", "RUNNING", 0.0), ("RUNNING", "X", 1.0))
    one.message = mock.Mock(spec=KvOffer)
    times.note_stages(one)
    assert [role for role, _ in found(times)] == ["decode"]


@pytest.mark.parametrize(("key", "hop"), [("r/1/kv", "kv"), ("r/1/0", "rows")])
def test_a_hop_lasts_while_bytes_move(key: str, hop: str) -> None:
    times = StageTimes(lambda: 0.0)
    moved = story(
        ("PENDING", "STREAMING", 1.0),
        ("STREAMING", "STREAMING", 1.5),
        ("STREAMING", "WRITING", 2.0),
        ("WRITING", "WRITTEN", 2.5),
        ("WRITTEN", "DELIVERED", 9.0),
    )
    peer = SimpleNamespace(instance_id="d0")
    transfer: Any = SimpleNamespace(
        key=key, story=moved, sent_nbytes=5000, egress_nbytes=5000, peer=peer
    )
    times.note_hop(transfer, "shm")
    (link,) = times.counts()
    assert (link.name, link.value) == ("epd_link_nbytes_total", 5000)
    assert dict(link.labels) == {"peer": "d0", "transport": "shm"}
    nbytes, seconds = times.told()
    assert (nbytes.name, seconds.name) == ("epd_hop_nbytes", "epd_hop_seconds")
    assert dict(nbytes.labels) == dict(seconds.labels) == {"hop": hop, "transport": "shm"}
    assert (nbytes.total, seconds.total) == (5000, 1.5)
    (at,) = bucket(nbytes)
    assert NBYTES[at - 1] < 5000 <= NBYTES[at]


def test_how_long_a_byte_of_rows_takes_is_of_rows_that_went_elsewhere() -> None:
    times = StageTimes(lambda: 0.0)
    assert times.rows_cost.unit_s == 0

    def moves(key: str, transport: str, nbytes: int, lasts_s: float) -> None:
        moved = story(("PENDING", "WRITING", 1.0), ("WRITING", "WRITTEN", 1.0 + lasts_s))
        peer = SimpleNamespace(instance_id="p0")
        transfer: Any = SimpleNamespace(
            key=key, story=moved, sent_nbytes=nbytes, egress_nbytes=nbytes, peer=peer
        )
        times.note_hop(transfer, transport)

    moves("r/1/kv", "shm", 1000, 50.0)
    moves("r/2/0", "local", 1000, 70.0)
    assert times.rows_cost.unit_s == 0, "neither KV nor what stayed"
    moves("r/3/0", "shm", 1000, 1.0)
    moves("r/4/0", "tcp", 3000, 7.0)
    assert times.rows_cost.unit_s == pytest.approx((KEPT * 1.0 + 7.0) / (KEPT * 1000 + 3000))


def test_the_ends_of_rooms_are_told_apart() -> None:
    times = StageTimes(lambda: 0.0)
    for key, state in (("r/1/kv", "EXPIRED"), ("r/1/0", "FAILED"), ("r/2/0", "FAILED")):
        times.note_room("incoming", SimpleNamespace(key=key, state=SimpleNamespace(name=state)))  # type: ignore[arg-type]
    told = {tuple(dict(one.labels).values()): one.value for one in times.counts()}
    assert told == {("incoming", "kv", "expired"): 1, ("incoming", "rows", "failed"): 2}


def test_gaps_between_tokens_and_their_mean() -> None:
    now = [10.0]
    times = StageTimes(lambda: now[0])
    answer: Any = SimpleNamespace(key="r", token_ids=[])
    for wait_s, num_tokens in ((0.0, 1), (0.5, 2), (1.5, 2)):
        now[0] += wait_s
        times.note_token(answer)
        answer.token_ids += [0] * num_tokens
    times.note_answer(answer)
    gaps, mean = times.told()
    assert (gaps.name, mean.name) == (
        "epd_inter_token_seconds",
        "epd_time_per_output_token_seconds",
    )
    assert (sum(gaps.counts), gaps.total, gaps.labels) == (2, 2.0, ())
    assert (sum(mean.counts), mean.total) == (1, 0.5)  # four tokens behind the first, in 2 s
    times.note_answer(answer)  # told of its end again
    answer.token_ids = [0]
    times.note_token(answer)
    times.note_answer(answer)
    assert sum(times.told()[1].counts) == 1  # one token has no gap


@pytest.mark.parametrize(
    ("num_decodes", "num_prompt_tokens", "batch"),
    [(3, 0, "decodes"), (0, 70, "prompts"), (3, 70, "mixed")],
)
def test_steps_are_told_apart_by_what_is_in_them(
    num_decodes: int, num_prompt_tokens: int, batch: str
) -> None:
    times = StageTimes(lambda: 0.0)
    times.note_step(num_decodes, num_prompt_tokens, 0.003)
    (told,) = times.told()
    assert (told.name, told.labels, told.total) == ("epd_step_seconds", (("batch", batch),), 0.003)


def test_how_late_the_loop_was_is_counted() -> None:
    times = StageTimes(lambda: 0.0)
    times.note_lag(0.0)
    times.note_lag(0.02)
    (told,) = times.told()
    assert (told.name, told.labels, told.total) == ("epd_loop_lag_seconds", (), 0.02)
    assert [SECONDS[at] for at in bucket(told)] == [0.0005, 0.025]
