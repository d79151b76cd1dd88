"""A request and a step: what it brings to a step, and what the step's outcome means for it.

Tokens are those of the prompt, then those generated; after a preemption both are computed again, so
a chunk may begin in one and end in the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from epd.engine.base import PENDING, MediaLayout, RowSpan, StepSequence
from epd.fsm.kernel import Event
from epd.fsm.request import FirstTokenSampled, LastTokenSampled, PromptHeld, Request, TokenSampled
from epd.messages import MediaItem, TokenChunk, TokenLogprobs
from epd.roles.steps import pictures
from epd.roles.steps.prompt_scores import scoring_of
from epd.roles.steps.record import Record


def sequence_of(
    request: Request, record: Record, count: int, drafts: Sequence[int] = (), num_wanted: int = 0
) -> StepSequence:
    """Its next `count` tokens, then `drafts`; one that the step under way samples is PENDING."""
    start = request.num_computed + request.num_under_way
    stop = start + count
    num_prompt, num_tokens = len(request.prompt), request.num_tokens
    sampling = request.sampling
    first_output = num_prompt - request.num_emitted
    looks_back = sampling.reads_output
    return StepSequence(
        request_id=request.key,
        token_ids=(*request.tokens(start, stop), *drafts) if start < num_tokens else (PENDING,),
        start=start,
        block_table=request.block_table,
        positions=_positions(request, record, start, stop),
        rope_delta=request.rope_delta,
        spans=_spans(request, record, start, count) if start < num_prompt else (),
        sample=sampling if stop >= num_tokens else None,
        output_index=stop - first_output,
        prompt_ids=record.asked_of(request) if looks_back else (),
        output_ids=record.said_of(request) if looks_back else (),
        num_drafts=len(drafts),
        num_wanted=num_wanted,
        is_followed=record.is_followed,
        next_id=request.tokens(stop, stop + 1)[0] if stop < num_tokens else -1,
        scoring=scoring_of(request, start, stop),
        copies=_copies(request, start),
        adapter=request.message.adapter,
    )


def uncut(request: Request, count: int) -> int:
    """Its next tokens, about `count`, so that no picture is cut."""
    start = request.num_computed + request.num_under_way
    runs = (run for item in request.message.items for run in item.runs())
    return pictures.uncut(start, count, ((at, at + num_rows) for at, _, num_rows in runs))


def _copies(request: Request, start: int) -> list[tuple[int, int]]:
    """Of states, before the chunk that begins at `start`: a table begins with its own."""
    if not (request.states_found or request.states_kept):
        return []
    if start == request.num_found:
        return list(zip(request.states_found, request.block_table, strict=False))
    return list(zip(request.block_table, request.states_kept.get(start, ()), strict=False))


def new_tokens(request: Request, record: Record, but_last: int = 0) -> TokenChunk:
    """What the gateway has not been sent yet, numbered; from now on it has been."""
    num_told = len(request.output) - but_last
    new = request.output[record.num_sent : num_told]
    chunk = TokenChunk(
        request_id=request.request_id,
        attempt=request.attempt,
        start=request.num_emitted + record.num_sent,
        token_ids=tuple(token.token_id for token in new),
        finish_reason=request.finish_reason,
        logprobs=tuple(new) if request.sampling.tells_logprobs else (),
        num_accepted=record.num_accepted,
        num_rejected=record.num_rejected,
        num_cached=0 if record.num_sent else request.num_cached or 0,
    )
    record.num_sent = num_told
    record.num_accepted = record.num_rejected = 0
    return chunk


def runs_ahead(request: Request, sequence: StepSequence) -> bool:
    """Whether the token that this sequence samples may be computed before the host has it: the
    device has it then, it goes on here, and it is not the last.  Behind drafts it is not settled
    yet which one it is."""
    is_last = sequence.output_index + 1 >= request.sampling.max_tokens
    goes_on = sequence.sample is not None and request.decode_here and not request.lease_s
    return goes_on and not (is_last or sequence.num_drafts)


def until_end(request: Request, tokens: Sequence[TokenLogprobs]) -> Sequence[TokenLogprobs]:
    """What counts of the tokens that a step ended with: nothing behind one that ends the answer."""
    num_said = request.num_emitted + len(request.output)
    for count, token in enumerate(tokens, 1):
        if _finish_reason(request, token, num_said + count):
            return tokens[:count]
    return tokens


def _finish_reason(request: Request, token: TokenLogprobs, total: int) -> str:
    """Why this token ends the answer, if it does; it is the `total`th."""
    sampling = request.sampling
    if token.token_id in sampling.stop_token_ids and total > sampling.min_tokens:
        return "stop"
    return "length" if total >= sampling.max_tokens else ""


def token_event(request: Request, tokens: Sequence[TokenLogprobs], *, decoding: bool) -> Event:
    """What the tokens that a step ended with mean: one, or of a sequence with drafts those that
    were accepted and the one behind them."""
    *accepted, token = tokens
    total = request.num_emitted + len(request.output) + len(tokens)
    if reason := _finish_reason(request, token, total):
        ends = PromptHeld if request.lease_s and not decoding else LastTokenSampled
        return ends(token, reason, accepted=tuple(accepted))
    if not decoding:
        return FirstTokenSampled(token)
    return TokenSampled(token, tuple(accepted))


def _positions(
    request: Request, record: Record, start: int, stop: int
) -> list[Sequence[int]] | None:
    """`[3][stop - start]` where the prompt has positions of its own; None: index + delta."""
    known = record.positions
    num_prompt = len(request.prompt)
    if known is None or start >= num_prompt:
        return None
    tail = [index + request.rope_delta for index in range(num_prompt, stop)]
    return [[*axis[start:stop], *tail] if tail else axis[start:stop] for axis in known]


def _spans(request: Request, record: Record, start: int, count: int) -> list[RowSpan]:
    """Which rows replace placeholders of the chunk `[start, start + count)`."""
    spans = []
    for item in getattr(request.message, "items", ()):
        if item.offset >= start + count or start >= item.end:
            continue
        for at, first_row, num_rows in item.runs():
            first, last = max(start, at), min(start + count, at + num_rows)
            if first < last:
                row_start = first_row + first - at
                rows, left = record.rows[item.room], at + num_rows - last
                spans.append(RowSpan(first - start, row_start, last - first, rows, left))
    return spans


def layouts_of(items: Sequence[MediaItem]) -> list[MediaLayout]:
    """Where rows stand without gaps, for position computation.

    A video whose frames stand apart is one still image per frame to it.
    """
    layouts = []
    for item in items:
        frames, height, width = item.grid_thw
        grid = (1, height, width) if item.offsets else (frames, height, width)
        for at, _, num_rows in item.runs():
            layouts.append(MediaLayout(at, num_rows, grid, item.second_per_grid))
    return layouts
