"""From logits to the next token, reproducibly.

Theory of operation
-------------------
The draw for output token `i` uses one number in [0, 1) that
is a pure function of `(seed, i)`, a hash, and picks by inverse cumulative probability in the order
of token ids.  Nothing else enters, so neither the batch, nor the topology, nor a migration in the
middle of an answer changes the text.

Every filter (min_p, top_k, top_p) ends as one number per row: the lowest logit that may be drawn;
tokens that tie with it stay.  A number of one row is the same whatever the neighbours ask for.
Nothing of the size of the vocabulary is sorted but for a row that asks for top_p alone: top_k looks
for its values among the chunks of the row with the highest maxima, and top_p within top_k looks at
those values only.  The draw sums the chunks, picks one, and adds up within it.

Order, as vLLM's: log-probabilities are taken from the raw logits (before any of the following, its
default `raw_logprobs`), then logit bias, minimum length, penalties, and, unless greedy,
temperature, min_p, top_k, top_p, the draw.

A row of logits that is not finite fails its own sequence and no other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from epd.engine.base import StepFailure
from epd.engine.copies import to_device, to_host
from epd.messages import SamplingParams, TokenLogprobs

GREEDY_BELOW = 1e-5  # temperature under which sampling is greedy
Top = tuple[tuple[int, float], ...]  # tokens and their log-probabilities, the likeliest first
MAX_CHUNK, MIN_CHUNK = 512, 16  # of a row of logits that is summed or ranked in two steps


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One row's wish; `output_index` numbers the token to be sampled among the output tokens.

    `allowed` gives a bool `[vocabulary]` of the tokens that a grammar admits; it raises ValueError.
    """

    params: SamplingParams
    output_index: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    allowed: Callable[[], npt.NDArray[np.bool_]] | None = None


def uniform(seed: int, index: int) -> float:
    """In [0, 1), a pure function of its arguments, equal on every platform."""
    key = f"{seed}/{index}".encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


class Draft:
    """Tokens on their way: chosen on the device where that can be, the rest by `finish`.

    `tokens` is int64 `[n]` on the device of the logits, for the next step to read; a row whose
    token the host chooses has none there.  `host_rows`: those whose logits come to the host.
    """

    def __init__(self, logits: torch.Tensor, requests: Sequence[SampleRequest]) -> None:
        self._requests = requests
        here = [is_sampled_on_device(request) for request in requests]
        self.host_rows = [row for row, on_device in enumerate(here) if not on_device]
        drawn = [
            row
            for row, r in enumerate(requests)
            if here[row] and r.params.temperature >= GREEDY_BELOW
        ]
        self.tokens = logits.argmax(dim=-1)
        if drawn:
            whole = len(drawn) == len(requests)
            index = slice(None) if whole else to_device(drawn, torch.int64, logits.device)
            self.tokens[index] = _draw_rows(logits[index], [requests[row] for row in drawn])
        # The sum of a row is finite exactly when all of it is: logits are far from overflow.
        finite = torch.isfinite(logits.sum(dim=-1))
        self._chosen = to_host(torch.where(finite, self.tokens, -1))
        asked = {
            row: r.params.num_logprobs
            for row, r in enumerate(requests)
            if here[row] and r.params.num_logprobs >= 0
        }
        self._logprobs = _Logprobs(logits, self.tokens, asked) if asked else None
        self._logits = (
            to_host(logits[to_device(self.host_rows, torch.int64, logits.device)])
            if self.host_rows
            else None
        )

    def finish(self) -> Callable[[int], TokenLogprobs | StepFailure]:
        """The outcome of a row, for whoever wants it; once the device has passed this draft's end.

        Nothing is sampled on the host for a row that nobody asks about.
        """
        host = dict(zip(self.host_rows, range(len(self.host_rows)), strict=True))
        chosen: list[int] = self._chosen.tolist()
        told = self._logprobs.finish() if self._logprobs is not None else lambda row: (0.0, ())

        def outcome(row: int) -> TokenLogprobs | StepFailure:
            token = chosen[row]
            if token < 0:
                return StepFailure("the model gave logits that are not finite")
            if row not in host:
                return TokenLogprobs(token, *told(row))
            assert self._logits is not None
            raw, request = self._logits[host[row]], self._requests[row]
            try:
                token = _choose(raw, request)
                return _with_logprobs(raw, token, request.params.num_logprobs)
            except ValueError as error:
                return StepFailure(str(error))

        return outcome


def sample(
    logits: torch.Tensor, requests: Sequence[SampleRequest]
) -> list[TokenLogprobs | StepFailure]:
    """One outcome per row of `logits`, `[n, vocabulary]` float32.

    `logprob` of an outcome is 0.0 when none was asked for (`num_logprobs` below 0).
    """
    outcome = Draft(logits, requests).finish()
    return [outcome(row) for row in range(len(requests))]


def is_sampled_on_device(request: SampleRequest) -> bool:
    """Whether its token is there for the next step before the host has seen it."""
    return request.allowed is None and request.params.is_chosen_on_device(request.output_index)


def _draw_rows(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """int64 `[n]`: one token per row, filtered and drawn where the logits are."""
    numbers = [uniform(r.params.seed, r.output_index) for r in requests]
    weights = _weights(logits, [r.params for r in requests])
    return draw(weights, to_device(numbers, torch.float64, logits.device))


def _choose(raw: torch.Tensor, request: SampleRequest) -> int:
    """The token of a row `[vocabulary]` that needs the host."""
    params = request.params
    logits = raw.clone()
    _apply_bias(logits, request)
    _apply_penalties(logits, request)
    if request.allowed is not None:
        logits[~torch.from_numpy(request.allowed())] = -torch.inf
    if params.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    return int(_draw_rows(logits[None], [request]))


def _apply_bias(logits: torch.Tensor, request: SampleRequest) -> None:
    params = request.params
    for token, bias in params.logit_bias:
        if not 0 <= token < len(logits):
            raise ValueError(f"logit_bias names token {token}; the vocabulary has {len(logits)}")
        logits[token] += bias
    if request.output_index < params.min_tokens:
        for token in params.stop_token_ids:
            if 0 <= token < len(logits):
                logits[token] = -torch.inf


def _apply_penalties(logits: torch.Tensor, request: SampleRequest) -> None:
    """Repetition over prompt and output; frequency and presence over the output alone."""
    params = request.params
    output = torch.tensor(list(request.output_ids), dtype=torch.int64)
    if params.repetition_penalty != 1.0:
        prompt = torch.tensor(list(request.prompt_ids), dtype=torch.int64)
        seen = torch.cat([prompt, output]).unique()
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if params.frequency_penalty or params.presence_penalty:
        tokens, counts = output.unique(return_counts=True)
        logits[tokens] -= params.frequency_penalty * counts + params.presence_penalty


def _weights(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """float32 `[n, vocabulary]`: probabilities by that of the likeliest; 0: filtered out."""
    device, size = logits.device, logits.shape[-1]

    def column(values: Sequence[float]) -> torch.Tensor:
        return to_device(values, torch.float32, device)[:, None]

    top = logits.amax(dim=-1, keepdim=True)
    temperature = column([p.temperature for p in params])
    limit = None
    if any(p.min_p > 0.0 for p in params):
        limit = top + temperature * column([p.min_p for p in params]).log()  # log 0: no limit
    kept = [p.top_k if 0 < p.top_k < size else size for p in params]
    nuclei = [p.top_p for p in params]
    for rows, count in _by_count(kept, nuclei, size):
        index = slice(None) if len(rows) == len(params) else to_device(rows, torch.int64, device)
        ordered = _largest(logits[index], count)
        if limit is not None:
            ordered = ordered.masked_fill(ordered < limit[index], -torch.inf)
        ranks = torch.arange(count, device=device)
        ordered = ordered.masked_fill(ranks >= column([kept[row] for row in rows]), -torch.inf)
        shares = ((ordered - top[index]) / temperature[index]).exp().double()
        before = shares.cumsum(dim=-1) - shares  # mass of the likelier ones
        nucleus = column([nuclei[row] for row in rows])
        beyond = (before >= nucleus * shares.sum(dim=-1, keepdim=True)) & (nucleus < 1.0)
        beyond |= ordered == -torch.inf
        beyond[:, 0] = False  # top_p = 0 is greedy
        lowest = ordered.masked_fill(beyond, torch.inf).amin(dim=-1, keepdim=True)
        if limit is None:
            limit = torch.full_like(top, -torch.inf)
        limit[index] = lowest
    weights = ((logits - top) / temperature).exp()
    return weights if limit is None else weights.masked_fill(logits < limit, 0.0)


def _by_count(
    kept: Sequence[int], nuclei: Sequence[float], size: int
) -> Iterator[tuple[list[int], int]]:
    """Rows that are filtered by rank, and how many of their largest logits they need: those with
    few together, those that need all of a row by themselves."""
    few = [row for row, count in enumerate(kept) if count < size]
    if few:
        yield few, max(kept[row] for row in few)
    many = [row for row, count in enumerate(kept) if count == size and nuclei[row] < 1.0]
    if many:
        yield many, size


def _largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """`[n, count]`: the largest values of each row, falling.

    Those of a row lie in its `count` chunks with the highest maxima, so that is all that is ranked.
    """
    if count == logits.shape[-1]:
        return logits.sort(dim=-1, descending=True).values
    chunks = _in_chunks(logits)
    if count * chunks.shape[-1] < logits.shape[-1]:
        best = chunks.amax(dim=-1).topk(count, dim=-1, sorted=False).indices
        logits = chunks.gather(1, best[..., None].expand(-1, -1, chunks.shape[-1])).flatten(1)
    return logits.topk(count, dim=-1).values


def _in_chunks(rows: torch.Tensor) -> torch.Tensor:
    """`[n, size]` as `[n, chunks, length]`; a size without a good divisor is one chunk."""
    length = math.gcd(rows.shape[-1], MAX_CHUNK)
    return rows.unflatten(-1, (-1, length if length >= MIN_CHUNK else rows.shape[-1]))


def draw(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """int64 `[n]`: where the cumulative weight of each row passes its number (in [0, 1)) of the
    total; never an index of weight zero.

    weights `[n, vocabulary]`, numbers float64 `[n]`.
    """
    chunks = _in_chunks(weights)
    sums = chunks.sum(dim=-1, dtype=torch.float64)
    target = sums.sum(dim=-1) * numbers
    chunk, before = _passed(sums, target)
    inside = chunks[torch.arange(len(chunks), device=weights.device), chunk].double()
    return chunk * chunks.shape[-1] + _passed(inside, target - before)[0]


def _passed(weights: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 `[n]`, where the cumulative weight of a row passes its target, and what stands before.

    Where rounding keeps it from passing it is the last that weighs something, and where it would
    pass too early the first.
    """
    cumulative = weights.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    positive = (weights > 0).to(torch.uint8)
    last = weights.shape[-1] - 1 - positive.flip(-1).argmax(dim=-1)
    index = torch.minimum(torch.maximum(index, positive.argmax(dim=-1)), last)
    return index, (cumulative.gather(1, index[:, None]) - weights.gather(1, index[:, None]))[:, 0]


class _Logprobs:
    """Of rows whose tokens the device chooses: on their way, a few numbers for each."""

    def __init__(
        self, logits: torch.Tensor, tokens: torch.Tensor, asked: Mapping[int, int]
    ) -> None:
        """`asked`: how many of the likeliest, by row."""
        self._asked = asked
        index = to_device(list(asked), torch.int64, logits.device)
        logprobs = logits[index].log_softmax(dim=-1)
        self._chosen = to_host(logprobs.gather(1, tokens[index, None])[:, 0])
        count = min(max(asked.values()), logits.shape[-1])
        values, ids = logprobs.topk(count, dim=-1)
        self._values, self._ids = to_host(values), to_host(ids)

    def finish(self) -> Callable[[int], tuple[float, Top]]:
        """What a row is told; nothing, if it did not ask."""
        place = {row: at for at, row in enumerate(self._asked)}
        chosen: list[float] = self._chosen.tolist()

        def told(row: int) -> tuple[float, Top]:
            if row not in place:
                return 0.0, ()
            at, count = place[row], self._asked[row]
            ids, values = self._ids[at, :count].tolist(), self._values[at, :count].tolist()
            return chosen[at], tuple(zip(ids, values, strict=True))

        return told


def _with_logprobs(raw: torch.Tensor, token: int, num_logprobs: int) -> TokenLogprobs:
    if num_logprobs < 0:
        return TokenLogprobs(token, 0.0)
    logprobs = raw.log_softmax(dim=-1)
    top: Top = ()
    if num_logprobs:
        values, indices = logprobs.topk(min(num_logprobs, len(logprobs)))
        top = tuple(zip(indices.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token, float(logprobs[token]), top)
