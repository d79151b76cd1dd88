"""From logits to the next token, reproducibly.

Theory of operation
-------------------
The draw for output token `i` uses one number in [0, 1) that
is a pure function of `(seed, i)`, a hash, and picks by inverse cumulative probability in the order
of token ids.  Nothing else enters, so neither the batch, nor the topology, nor a migration in the
middle of an answer changes the text.

Order, as vLLM's: log-probabilities are taken from the raw logits (before any of the following, its
default `raw_logprobs`), then logit bias, minimum length, penalties, and, unless greedy,
temperature, min_p, top_k, top_p, the draw.

A row of logits that is not finite fails its own sequence and no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from epd.engine.base import StepFailure
from epd.engine.copies import to_device, to_host
from epd.messages import SamplingParams, TokenLogprobs

GREEDY_BELOW = 1e-5  # temperature under which sampling is greedy


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
    token the host chooses has none there.  `host_rows`: those whose logits the host looks at.
    """

    def __init__(self, logits: torch.Tensor, requests: Sequence[SampleRequest]) -> None:
        self._requests = requests
        self.host_rows = [
            row
            for row, r in enumerate(requests)
            if r.params.num_logprobs >= 0 or not is_sampled_on_device(r)
        ]
        drawn = [
            row
            for row, r in enumerate(requests)
            if r.params.temperature >= GREEDY_BELOW and is_sampled_on_device(r)
        ]
        self.tokens = logits.argmax(dim=-1)
        if drawn:
            whole = len(drawn) == len(requests)
            index = slice(None) if whole else to_device(drawn, torch.int64, logits.device)
            self.tokens[index] = _draw_rows(logits[index], [requests[row] for row in drawn])
        # The sum of a row is finite exactly when all of it is: logits are far from overflow.
        finite = torch.isfinite(logits.sum(dim=-1))
        self._chosen = to_host(torch.where(finite, self.tokens, -1))
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

        def outcome(row: int) -> TokenLogprobs | StepFailure:
            token = chosen[row]
            if token < 0:
                return StepFailure("the model gave logits that are not finite")
            if row not in host:
                return TokenLogprobs(token, 0.0)
            assert self._logits is not None
            raw, request = self._logits[host[row]], self._requests[row]
            try:
                if not is_sampled_on_device(request):
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
    probabilities = _probabilities(logits, [r.params for r in requests])
    return draw(probabilities, to_device(numbers, torch.float64, logits.device))


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


def _probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """float64 `[n, vocabulary]`, zero where filtered out; not normalised after the filters."""
    device, size = logits.device, logits.shape[-1]

    def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return to_device(values, dtype, device)[:, None]

    probabilities = (logits.double() / column([p.temperature for p in params])).softmax(dim=-1)
    if any(p.min_p > 0.0 for p in params):
        limit = probabilities.amax(dim=-1, keepdim=True) * column([p.min_p for p in params])
        probabilities = probabilities.where(probabilities >= limit, 0.0)
    kept = [p.top_k if 0 < p.top_k < size else 0 for p in params]
    if any(kept):
        ranked = probabilities.topk(max(kept), dim=-1).values
        limit = ranked.gather(-1, column([max(k - 1, 0) for k in kept], torch.int64))
        limit = limit.where(column(kept, torch.int64) > 0, 0.0)
        probabilities = probabilities.where(probabilities >= limit, 0.0)
    if any(p.top_p < 1.0 for p in params):
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered  # mass of the likelier ones
        top_p = column([p.top_p if p.top_p < 1.0 else 2.0 for p in params])
        dropped = before >= top_p * ordered.sum(dim=-1, keepdim=True)
        dropped[:, 0] = False  # top_p = 0 is greedy
        probabilities = probabilities.scatter(-1, order, ordered.masked_fill(dropped, 0.0))
    return probabilities


def draw(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """int64 `[n]`: where the cumulative weight of each row passes its number (in [0, 1)) of the
    total; never an index of weight zero.

    weights float64 `[n, vocabulary]`, numbers float64 `[n]`.
    """
    cumulative = weights.cumsum(dim=-1)
    target = cumulative[:, -1:] * numbers[:, None]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    size = weights.shape[-1]
    last = size - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(dim=-1)
    return torch.minimum(index, last)  # where the target was rounded up to the total


def _with_logprobs(raw: torch.Tensor, token: int, num_logprobs: int) -> TokenLogprobs:
    if num_logprobs < 0:
        return TokenLogprobs(token, 0.0)
    logprobs = raw.log_softmax(dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if num_logprobs:
        values, indices = logprobs.topk(min(num_logprobs, len(logprobs)))
        top = tuple(zip(indices.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token, float(logprobs[token]), top)
