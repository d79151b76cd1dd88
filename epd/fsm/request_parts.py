"""Guards and actions of REQUEST's rows."""

from __future__ import annotations

from epd.fsm.kernel import Event
from epd.fsm.request import (
    ChunkComputed,
    DeadlinePassed,
    EmbeddingReady,
    EmbeddingsPromised,
    FirstTokenSampled,
    Grown,
    LastTokenSampled,
    RemoteKvArrived,
    Request,
    Scheduled,
    TokenSampled,
    _Failed,
)


def may_begin(request: Request, event: EmbeddingReady | EmbeddingsPromised) -> bool:
    return request.num_ready(getattr(event, "room", "")) >= request.min_early_tokens


def reaches_missing(request: Request, event: ChunkComputed) -> bool:
    return request.num_computed + event.num_tokens >= request.num_ready()


def goes_on(request: Request, event: EmbeddingReady) -> bool:
    return request.num_ready(event.room) > request.num_computed


def decode_here(request: Request, event: Event) -> bool:
    return request.decode_here


def in_flight(request: Request, event: Event) -> bool:
    return request.in_flight > 0


def keep_rows(request: Request, event: EmbeddingReady) -> None:
    request.missing.discard(event.room)
    request.rows[event.room] = event.rows


def keep_blocks(request: Request, event: Scheduled) -> None:
    request.block_table, request.num_computed = event.blocks, event.num_cached
    if request.num_cached < 0:
        request.num_cached = event.num_cached


def grow(request: Request, event: Grown) -> None:
    request.block_table += event.blocks


def count_chunk(request: Request, event: ChunkComputed) -> None:
    request.num_computed += event.num_tokens


def keep_first_token(request: Request, event: FirstTokenSampled) -> None:
    request.num_computed += event.num_tokens
    request.output.append(event.token)


def keep_token(request: Request, event: TokenSampled) -> None:
    request.num_computed += len(event.confirmed) + 1
    request.output += (*event.confirmed, event.token)


def keep_last_token(request: Request, event: LastTokenSampled) -> None:
    request.output += (*event.confirmed, event.token)
    request.finish_reason = event.finish_reason


def adopt_kv(request: Request, event: RemoteKvArrived) -> None:
    request.block_table = event.blocks
    request.num_computed = event.kv.num_tokens
    request.num_cached = event.kv.num_cached
    request.rope_delta = event.kv.rope_delta
    request.output.append(event.kv.first_token)


def keep_failure(request: Request, event: _Failed) -> None:
    request.failure = (event.kind, event.reason, event.retryable)
    request.culprit = event.culprit


def end_here(request: Request, event: Event) -> None:
    request.finish_reason = "length"


def note_late(request: Request, event: DeadlinePassed) -> None:
    request.failure = ("deadline", "the request did not finish before its deadline", False)
