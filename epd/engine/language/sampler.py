"""From logits to the next token, reproducibly.

Theory of operation
-------------------
The draw for output token `i` uses one number in [0, 1), a hash of `(seed, i)`, and picks by inverse
cumulative probability in the order of token ids.  Nothing else enters, so neither the batch, nor
the topology, nor a migration in the middle of an answer changes the text.

Order, as vLLM's: log-probabilities of the raw logits (its default `raw_logprobs`); bias, penalties
and masks (`logit_rules`); unless greedy, temperature, min_p, top_k, top_p and the draw.  All of it
happens where the logits are.

A row of logits that is not finite fails its own sequence and no other.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from epd.engine.base import EngineError, StepFailure
from epd.engine.device.copies import to_device, to_host
from epd.engine.device.slices import HUNG_S
from epd.engine.language.logit_rules import NOTHING_LEFT, LogitRules, SampleRequest
from epd.engine.language.token_draw import draw, filtered, likeliest
from epd.messages import SamplingParams, TokenLogprobs

GREEDY_BELOW = 1e-5  # temperature under which sampling is greedy
NOT_FINITE, NONE_LEFT = -1, -2  # in place of a token
Top = tuple[tuple[int, float], ...]  # tokens and their log-probabilities, the likeliest first


def uniform(seed: int, index: int) -> float:
    """In [0, 1), a pure function of its arguments, equal on every platform."""
    key = f"{seed}/{index}".encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


class Draft:
    """Tokens that the device chooses, on their way here.

    `tokens` is int64 `[n]` on the device of the logits, for the next step to read.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        requests: Sequence[SampleRequest],
        sampled: torch.Tensor | None = None,
    ) -> None:
        """logits: `[n, vocabulary]`, as the head gives them; sampled: tokens of the step before.

        Of rows that are all greedy, without rules, nothing but the largest is looked for.
        """
        rules = LogitRules(requests, logits.shape[-1])
        self._faults = rules.faults
        drawn = [row for row, r in enumerate(requests) if r.params.temperature >= GREEDY_BELOW]
        asked = {row: r.params for row, r in enumerate(requests) if r.params.num_logprobs >= 0}
        self._faults |= _unknown_tokens(asked, logits.shape[-1])
        self.tokens, is_finite = likeliest(logits)
        if rules or drawn or asked:
            logits = logits.float()
        wanted = logits
        if rules:
            none = torch.empty(0, dtype=torch.int64, device=logits.device)
            wanted = rules.apply(logits, none if sampled is None else sampled)
            self.tokens = wanted.argmax(dim=-1)
        if drawn:
            whole = len(drawn) == len(requests)
            index = slice(None) if whole else to_device(drawn, torch.int64, logits.device)
            self.tokens[index] = _draw_rows(wanted[index], [requests[row] for row in drawn])
        chosen = torch.where(is_finite, self.tokens, NOT_FINITE)
        if rules:
            said = wanted.gather(1, self.tokens[:, None])[:, 0]
            chosen = torch.where(said.isneginf() & (chosen >= 0), NONE_LEFT, chosen)
        self._marked, self._chosen = chosen, to_host(chosen)
        self._logprobs = _Logprobs(logits, self.tokens, asked) if asked else None

    def is_sound(self) -> torch.Tensor:
        """bool `[n]` on the device: which rows have not failed."""
        sound = self._marked >= 0
        if self._faults:
            sound[to_device(list(self._faults), torch.int64, sound.device)] = False
        return sound

    def token(self, row: int) -> int:
        """The token of a row, below 0 if it failed; once the device has passed this draft's end."""
        return int(self._chosen[row])

    def finish(self) -> Callable[[int], TokenLogprobs | StepFailure]:
        """The outcome of a row, once the device has passed this draft's end.

        A row behind drafts that do not hold may have a fault that nobody asks about.
        """
        chosen: list[int] = self._chosen.tolist()
        told = self._logprobs.finish() if self._logprobs is not None else lambda row: (0.0, ())

        def outcome(row: int) -> TokenLogprobs | StepFailure:
            token = chosen[row]
            if token == NOT_FINITE:
                return StepFailure("the model gave logits that are not finite")
            if fault := self._faults.get(row, NOTHING_LEFT if token == NONE_LEFT else ""):
                return StepFailure(fault, by_rules=True)
            return TokenLogprobs(token, *told(row))

        return outcome


class SentTokens:
    """Tokens that another rank has chosen, and nothing more about them."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens
        self._chosen = to_host(tokens)

    def finish(self) -> Callable[[int], TokenLogprobs | StepFailure]:
        chosen: list[int] = self._chosen.tolist()
        return lambda row: TokenLogprobs(chosen[row], 0.0, ())


@dataclass(frozen=True, slots=True)
class SampledStep:
    """What the step before samples."""

    rows: Mapping[str, int] = field(default_factory=dict)  # by request
    draft: Draft | None = None
    passed: threading.Event | None = None  # the device has come so far; where there is a grammar

    def token(self, row: int) -> int:
        """Waits for it: the device has this step's kernels meanwhile.  Raises ValueError."""
        assert self.draft is not None
        assert self.passed is not None
        if not self.passed.wait(HUNG_S):
            raise EngineError(f"the device has not ended a step in {HUNG_S:.0f} s")
        token = self.draft.token(row)
        if token < 0:
            raise ValueError("the step before has failed")
        return token


def _draw_rows(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """int64 `[n]`: one token per row, filtered and drawn where the logits are."""
    numbers = [uniform(r.params.seed, r.output_index) for r in requests]
    rows = filtered(logits, [r.params for r in requests])
    return draw(logits, rows, to_device(numbers, torch.float64, logits.device))


def _unknown_tokens(asked: Mapping[int, SamplingParams], vocabulary: int) -> dict[int, str]:
    """Faults of rows that ask about tokens which there are not."""
    largest = {row: max(params.logprob_token_ids, default=0) for row, params in asked.items()}
    return {
        row: f"logprob_token_ids names token {token}; the vocabulary has {vocabulary}"
        for row, token in largest.items()
        if token >= vocabulary
    }


class _Logprobs:
    """Of rows whose tokens the device chooses: on their way, a few numbers for each."""

    def __init__(
        self, logits: torch.Tensor, tokens: torch.Tensor, asked: Mapping[int, SamplingParams]
    ) -> None:
        """`asked`: how many of the likeliest, or of which tokens, by row."""
        self._asked = asked
        index = to_device(list(asked), torch.int64, logits.device)
        logprobs = logits[index].log_softmax(dim=-1)
        self._chosen = to_host(logprobs.gather(1, tokens[index, None])[:, 0])
        size = logits.shape[-1]
        count = min(max(params.num_logprobs for params in asked.values()), size)
        values, ids = logprobs.topk(count, dim=-1)
        self._values, self._ids = to_host(values), to_host(ids)
        self._named: torch.Tensor | None = None
        if width := max(len(params.logprob_token_ids) for params in asked.values()):
            padded = [(*p.logprob_token_ids, *[0] * width)[:width] for p in asked.values()]
            places = to_device(padded, torch.int64, logits.device).clamp(max=size - 1)
            self._named = to_host(logprobs.gather(1, places))

    def finish(self) -> Callable[[int], tuple[float, Top]]:
        """The log-probabilities of a row; none, if it did not ask."""
        place = {row: at for at, row in enumerate(self._asked)}
        chosen: list[float] = self._chosen.tolist()

        def told(row: int) -> tuple[float, Top]:
            if row not in place:
                return 0.0, ()
            at, params = place[row], self._asked[row]
            if (ids := params.logprob_token_ids) and self._named is not None:
                return chosen[at], tuple(zip(ids, self._named[at].tolist(), strict=False))
            found = slice(0, params.num_logprobs)
            likeliest, values = self._ids[at, found].tolist(), self._values[at, found].tolist()
            return chosen[at], tuple(zip(likeliest, values, strict=True))

        return told
