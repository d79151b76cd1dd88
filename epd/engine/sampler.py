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


def sample(
    logits: torch.Tensor, requests: Sequence[SampleRequest]
) -> list[TokenLogprobs | StepFailure]:
    """One outcome per row of `logits`, `[n, vocabulary]` float32.

    `logprob` of an outcome is 0.0 when none was asked for (`num_logprobs` below 0).
    """
    finite = torch.isfinite(logits).all(dim=-1).tolist()
    best = logits.argmax(dim=-1).tolist()
    outcomes: list[TokenLogprobs | StepFailure] = []
    for row, request in enumerate(requests):
        if not finite[row]:
            outcomes.append(StepFailure("the model gave logits that are not finite"))
        elif _is_plain_greedy(request):
            outcomes.append(TokenLogprobs(best[row], 0.0))
        else:
            try:
                outcomes.append(_sample_row(logits[row].cpu(), request))
            except ValueError as error:
                outcomes.append(StepFailure(str(error)))
    return outcomes


def _is_plain_greedy(request: SampleRequest) -> bool:
    params = request.params
    return (
        params.temperature < GREEDY_BELOW
        and params.num_logprobs < 0
        and not params.logit_bias
        and request.allowed is None
        and params.min_tokens <= request.output_index
        and params.repetition_penalty == 1.0
        and params.frequency_penalty == 0.0
        and params.presence_penalty == 0.0
    )


def _sample_row(raw: torch.Tensor, request: SampleRequest) -> TokenLogprobs:
    params = request.params
    logits = raw.clone()
    _apply_bias(logits, request)
    _apply_penalties(logits, request)
    if request.allowed is not None:
        logits[~torch.from_numpy(request.allowed())] = -torch.inf
    if params.temperature < GREEDY_BELOW:
        token = int(logits.argmax())
    else:
        probabilities = _probabilities(logits / params.temperature, params)
        token = draw(probabilities, uniform(params.seed, request.output_index))
    return _with_logprobs(raw, token, params.num_logprobs)


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


def _probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """float64 `[vocabulary]`, zero where filtered out; not normalised after the filters."""
    probabilities = logits.double().softmax(dim=-1)
    if params.min_p > 0.0:
        limit = probabilities.max() * params.min_p
        probabilities = probabilities.where(probabilities >= limit, 0.0)
    if 0 < params.top_k < len(probabilities):
        limit = probabilities.topk(params.top_k).values[-1]
        probabilities = probabilities.where(probabilities >= limit, 0.0)
    if params.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True, stable=True)
        before = ordered.cumsum(dim=0) - ordered  # mass of the likelier ones
        dropped = before >= params.top_p * ordered.sum()
        dropped[0] = False  # top_p = 0 is greedy
        probabilities[order[dropped]] = 0.0
    return probabilities


def draw(weights: torch.Tensor, number: float) -> int:
    """The index at which the cumulative weight passes `number` (in [0, 1)) of the total.

    Never an index of weight zero.
    """
    cumulative = weights.cumsum(dim=0)
    target = cumulative[-1] * number
    index = int(torch.searchsorted(cumulative, target, right=True))
    if index >= len(weights) or weights[index] == 0:  # the target was rounded up to the total
        index = int(weights.nonzero()[-1])
    return index


def _with_logprobs(raw: torch.Tensor, token: int, num_logprobs: int) -> TokenLogprobs:
    if num_logprobs < 0:
        return TokenLogprobs(token, 0.0)
    logprobs = raw.log_softmax(dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if num_logprobs:
        values, indices = logprobs.topk(min(num_logprobs, len(logprobs)))
        top = tuple(zip(indices.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token, float(logprobs[token]), top)
