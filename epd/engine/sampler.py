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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from epd.engine.base import StepFailure
from epd.engine.copies import to_device, to_host
from epd.engine.token_draw import draw, filtered
from epd.messages import SamplingParams, TokenLogprobs

GREEDY_BELOW = 1e-5  # temperature under which sampling is greedy
Top = tuple[tuple[int, float], ...]  # tokens and their log-probabilities, the likeliest first


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
    rows = filtered(logits, [r.params for r in requests])
    return draw(logits, rows, to_device(numbers, torch.float64, logits.device))


def _choose(raw: torch.Tensor, request: SampleRequest) -> int:
    """The token of a row `[vocabulary]` that needs the host."""
    params = request.params
    logits = raw.clone()
    _apply_bias(logits, request)
    _apply_penalties(logits, request)
    if request.allowed is not None:
        logits[~torch.from_numpy(request.allowed())] = -torch.inf
    _forbid(logits, request)
    if params.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    return int(_draw_rows(logits[None], [request]))


def _forbid(logits: torch.Tensor, request: SampleRequest) -> None:
    """Tokens that are not among the allowed ones, and the last ones of bad words."""
    params = request.params
    if params.allowed_token_ids:
        others = torch.ones_like(logits, dtype=torch.bool)
        others[list(params.allowed_token_ids)] = False
        logits[others] = -torch.inf
    for word in params.bad_words:
        begun = list(word[:-1])
        if not begun or list(request.output_ids[-len(begun) :]) == begun:
            logits[word[-1]] = -torch.inf
    if (params.allowed_token_ids or params.bad_words) and logits.isneginf().all():
        raise ValueError("nothing is left to be said: allowed_token_ids and bad_words forbid it")


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
