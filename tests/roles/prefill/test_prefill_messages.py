"""A prompt with images at prefill: what it promises itself, wants, lacks and lets go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from epd.engine.base import ChunkScores
from epd.failure import Failure, FailureKind
from epd.fsm import membership
from epd.fsm import request as fsm
from epd.fsm.request import Request, S
from epd.messages import (
    Address,
    CancelTransfer,
    MediaItem,
    PrefillRequest,
    RequestAborted,
    RequestFailed,
    SamplingParams,
    Span,
    StageReport,
    TokenLogprobs,
)
from epd.roles.steps.prompt_scores import PromptScores
from epd.roles.steps.record import Record
from epd.roles.steps.reports import MAX_CHUNKS
from epd.transport.base import Received
from epd_lab.sim.cluster import GATEWAY
from epd_lab.sim.engine import golden
from epd_lab.sim.engine.engines import SimLanguageEngine
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.workload import mm_hash_of
from tests.fsm.tables import at as in_state
from tests.roles.desk import Desk, desk

NAMES = ("one", "two")
FRONT, DECODE = Address(GATEWAY, 1, ""), Address("d0", 1, "")


def items(request_id: str, *names: str) -> tuple[MediaItem, ...]:
    made, at = [], 1
    for index, name in enumerate(names):
        image = Image(name)
        room, encoder = f"{request_id}/1/{index}", Address("e0", 1, "")
        grid, key = image.grid_thw, mm_hash_of(image)
        made.append(
            MediaItem(
                index=index,
                mm_hash=key,
                offset=at,
                num_rows=image.num_rows,
                grid_thw=grid,
                room=room,
                encoder=encoder,
            )
        )
        at += image.num_rows
    return tuple(made)


def begin(at: Desk, request_id: str = "r", *names: str, **other: Any) -> Request:
    wanted = items(request_id, *(names or NAMES))
    rows = [golden.IMAGE_TOKEN] * sum(item.num_rows for item in wanted)
    due_s = at.actor.cluster_s() + 20.0
    message = PrefillRequest(
        **{
            "request_id": request_id,
            "attempt": 1,
            "token_ids": (11, *rows, 12, 13),
            "num_emitted": 0,
            "items": wanted,
            "sampling": SamplingParams(max_tokens=5),
            "decode": DECODE,
            "gateway": FRONT,
            "deadline_s": due_s,
            "first_token_deadline_s": due_s - 5.0,
            **other,
        }
    )
    at.said.clear()
    at.do(at.role.on_prefill_request, Received(GATEWAY, 1, message, ()))
    request: Request = at.whole.requests.get(f"{request_id}/1")
    return request


def wanted(at: Desk) -> list[Any]:
    """What its embeddings were asked for."""
    return [call.args[0] for call in at.whole.embeddings.want.call_args_list]


def images() -> Any:
    return desk("1e1p1d", "p0", "prefill")


def record(at: Any, request: Request) -> Record:
    found: Record = at.whole.requests.record(request)
    return found


def test_all_images_are_wanted_once_all_are_promised() -> None:
    with images() as at:
        embeddings = at.whole.embeddings
        with (
            mock.patch.object(embeddings, "promise") as promise,
            mock.patch.object(embeddings, "want"),
        ):
            request = begin(at)
            assert request.state is S.WAITING_FOR_EMBEDDINGS
            assert request.missing == {"r/1/0", "r/1/1"}
            assert request.min_early_tokens == at.cluster.settings.prefill.min_early_tokens
            key, of, granted = promise.call_args.args
            assert (key, of) == ("r/1", request.message.items) and not wanted(at)
            at.do(granted)
            found = wanted(at)
            assert [want.item for want in found] == list(of)
            due_s = request.message.first_token_deadline_s
            assert [(want.attempt, want.deadline_s) for want in found] == [(1, due_s)] * 2
            assert request.state is S.RUNNING, "its text can be computed before"
            at.do(found[0].ready, "r/1/0", "rows")
            assert request.missing == {"r/1/1"}
            assert record(at, request).rows == {"r/1/0": "rows"}
            at.do(found[1].failed, Failure(FailureKind.MEDIA, "because", "e0"))
        (failed,) = [m for m in at.messages() if isinstance(m, RequestFailed)]
        assert failed.failure == Failure(FailureKind.MEDIA, "because", "e0")
        assert request.ended_for_client


def test_who_has_ended_wants_nothing_more() -> None:
    with images() as at:
        embeddings = at.whole.embeddings
        with (
            mock.patch.object(embeddings, "promise") as promise,
            mock.patch.object(embeddings, "want") as want,
        ):
            request = begin(at)
            want.side_effect = lambda one: at.whole.requests.fire(
                request, fsm.EmbeddingFailed(Failure(FailureKind.MEDIA, "because", "e0"))
            )
            at.do(promise.call_args.args[2])
            assert want.call_count == 1


def test_a_request_lets_go_of_what_it_has_and_calls_off_what_it_lacks() -> None:
    with images() as at:
        embeddings = at.whole.embeddings
        request = begin(at)
        request.missing, record(at, request).rows = {"r/1/1"}, {"r/1/0": "rows"}
        with (
            mock.patch.object(embeddings, "unwant", return_value=False) as unwant,
            mock.patch.object(embeddings, "dismiss") as dismiss,
            mock.patch.object(embeddings, "give_up") as give_up,
        ):
            at.do(at.role.release_embeddings, request, None)
            first, second = request.message.items
            assert [call.args for call in unwant.call_args_list] == [
                (item.mm_hash, item.room) for item in (first, second)
            ]
            dismiss.assert_called_once_with(second, 1)
            give_up.assert_called_once_with("r/1")
            assert not record(at, request).rows
            unwant.return_value = True
            at.do(at.role.release_embeddings, request, None)
            assert dismiss.call_count == 1, "its turn had come"
            bare: Any = SimpleNamespace(message=SimpleNamespace(items=()))
            at.do(at.role.release_embeddings, bare, None)
            at.do(at.role.release_embeddings, SimpleNamespace(message=None), None)
            assert give_up.call_count == 2
        assert at.actor.counters["faults"] == 0


def test_who_is_turned_away_has_its_images_dismissed() -> None:
    with images() as at:
        in_state(at.actor.memberships["gateway"], membership.S.DRAINING)
        begin(at)
        rooms = [(to, m.room) for to, m in at.said if isinstance(m, CancelTransfer)]
        assert rooms == [("e0", "r/1/0"), ("e0", "r/1/1")]
    text_only = mock.patch.object(SimLanguageEngine, "row_contract", None)
    with text_only, desk("1p1d", "p0", "prefill") as at:
        begin(at, "s")
        assert not [m for m in at.messages() if isinstance(m, CancelTransfer)]


def test_positions_of_images_are_those_of_the_model() -> None:
    with images() as at:
        request = begin(at)
        rope = golden.rope_positions(
            len(request.prompt),
            [
                SimpleNamespace(offset=i.offset, num_rows=i.num_rows, grid_thw=i.grid_thw)
                for i in request.message.items
            ],  # type: ignore[misc]
        )
        assert record(at, request).positions == rope.positions
        assert request.rope_delta == rope.delta != 0
        related = at.whole.requests.reports.related[0](request)
        assert len(related) == 3 and [t.key for t in related[:2]] == ["r/1/0", "r/1/1"]
        assert related[2].key == "r/1/kv"


def test_a_prompt_that_is_computed_again_is_scored_again() -> None:
    scores = PromptScores()
    tokens = tuple(TokenLogprobs(n, 0.0) for n in range(6))
    request: Any = SimpleNamespace(key="r", num_computed=0)
    assert scores.take(request, ChunkScores(tokens[:4])) is None
    request.num_computed = 2  # it gave way, and went on behind what it found
    assert scores.take(request, ChunkScores(tokens[4:5])) is None
    first = TokenLogprobs(9, 0.0)
    request.num_computed = 3
    said = scores.take(request, first.with_prompt(tokens[5:]))
    assert said == first.with_prompt((*tokens[:2], *tokens[4:6])) and len(scores) == 0
    scores.take(request, ChunkScores(tokens))
    request.num_computed = 1
    assert scores.take(request, first) == first.with_prompt(tokens[:1])
    assert scores.take(request, first) == first, "nothing was kept"


# --- reports --------------------------------------------------------------------------------------


def test_chunks_are_noted_for_who_wants_a_timeline_and_so_many() -> None:
    with images() as at:
        reports = at.whole.requests.reports
        request, other = begin(at, "r", reports=True), begin(at, "s")
        reports.note_chunk(other, 0.1, 4)
        assert reports.live() == {"chunk_logs": 0}
        now_s = at.actor.clock.wall_s()
        for _ in range(MAX_CHUNKS + 1):
            reports.note_chunk(request, 0.1, 4)
        at.said.clear()
        at.do(reports.send_aborted, request, None)
        spans = at.messages()[0].spans
        chunks = [span for span in spans if span.machine == "CHUNK"]
        assert (
            chunks
            == [
                Span(
                    machine="CHUNK",
                    state="COMPUTED",
                    at_s=now_s - 0.1,
                    key="r/1",
                    lasted_s=0.1,
                    num_tokens=4,
                )
            ]
            * MAX_CHUNKS
        )
        machines = {span.machine for span in spans}
        assert {"REQUEST", "INCOMING"} <= machines
        assert at.said == [
            (GATEWAY, StageReport(request_id="r", attempt=1, spans=spans)),
            (GATEWAY, RequestAborted(request_id="r", attempt=1)),
        ]
        at.said.clear()
        at.do(reports.send_aborted, other, None)
        assert at.said == [(GATEWAY, RequestAborted(request_id="s", attempt=1))]
        for one, told in ((request, spans), (other, ())):
            one.failure = Failure(FailureKind.ENGINE, "because", "e0")
            at.said.clear()
            at.do(reports.send_failure, one, None)
            ((to, failed),) = at.said
            assert to == GATEWAY and failed == RequestFailed(
                request_id=one.request_id, attempt=1, failure=one.failure, spans=told
            )
        reports.forget(request)
        assert reports.live() == {"chunk_logs": 0}
