"""What requests ask of logits before a token is chosen, for many rows at once, where they lie.

Theory of operation
-------------------
Order, as vLLM's: logit bias and forbidden tokens; the repetition penalty over prompt and answer;
frequency and presence penalties over the answer.  Then masks: a grammar's, and the allowed tokens.
Forbidden are the end before `min_tokens`, and the ends of bad words and of repeated runs, by minus
infinity, which no penalty changes.

The host makes lists of places in the matrix of logits; one copy takes each list to the device, and
a few kernels apply it to all rows.  Where a row's last token is still on its way (`pending`), the
device adds it to the lists, from the tokens that the step before has sampled.  A grammar cannot do
without: whoever asks for its mask waits for that token, with this step's kernels queued already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from epd.engine.device.copies import upload
from epd.messages import NoRepeat, SamplingParams

Bits = npt.NDArray[np.uint8]  # of a vocabulary, the first token in the lowest bit
Places = npt.NDArray[np.int64]  # in a matrix of logits, row by row
Values = npt.NDArray[np.float32]
T = TypeVar("T")
MAX_REMEMBERED = 1024  # biases
NOTHING_LEFT = (
    "nothing is left to be said: allowed_token_ids, bad_words and no_repeat_ngram forbid it"
)


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One row's wish; `output_index` numbers the token to be sampled among the output tokens.

    `pending`: of the last output token, which is not among `output_ids` then, the row among the
    tokens that the step before has sampled.  `allowed` gives the tokens that a grammar admits; it
    raises ValueError, and may wait for the pending token.
    """

    params: SamplingParams
    output_index: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    allowed: Callable[[], Bits] | None = None
    pending: int = -1

    @property
    def is_ruled(self) -> bool:
        return self.allowed is not None or self.params.adjusts(self.output_index)


class LogitRules:
    """Of the rows of one step's logits; `apply` gives logits of their own."""

    def __init__(self, requests: Sequence[SampleRequest], vocabulary: int) -> None:
        self._size = vocabulary
        self._ruled = {row: r for row, r in enumerate(requests) if r.is_ruled}
        self.faults = dict(self._found_faults())

    def __bool__(self) -> bool:
        return bool(self._ruled)

    def _found_faults(self) -> Iterator[tuple[int, str]]:
        for row, request in self._ruled.items():
            for token, _ in request.params.logit_bias:
                if not 0 <= token < self._size:
                    yield row, (f"logit_bias names token {token}; the vocabulary has {self._size}")

    def apply(self, logits: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """float32 `[n, vocabulary]`; sampled: int `[m]`, tokens of the step before.

        Kernels that need no newest token on the host are queued before a grammar is asked.
        """
        logits = logits.clone()
        flat = logits.view(-1)
        self._add(flat, sampled)
        self._penalise_repetition(flat, sampled)
        self._penalise_answers(logits, sampled)
        masks = {row: mask for row in self._ruled if (mask := self._mask(row)) is not None}
        if masks:
            rows = upload(np.fromiter(masks, np.int64), logits.device)
            logits[rows] = logits[rows].masked_fill(self._unpacked(masks, logits), -torch.inf)
        return logits

    # --- sums: bias, and what may not be said -----------------------------------------------------

    def _add(self, flat: torch.Tensor, sampled: torch.Tensor) -> None:
        parts = [
            (tokens + row * self._size, values)
            for row, r in self._ruled.items()
            if row not in self.faults
            for tokens, values in self._sums(r)
        ]
        if parts:
            places, values = (np.concatenate(part) for part in zip(*parts, strict=True))
            flat.index_add_(0, self._up(places, flat), self._up(values, flat))
        words = [(row, r.pending, *w) for row, r in self._ruled.items() for w in _unsure(r)]
        if words:  # forbidden if the token on its way is the one before the last
            rows, sources, begun, last = self._up(np.array(words, np.int64).T, flat)
            unsaid = torch.where(sampled[sources] == begun, -torch.inf, 0.0)
            flat.index_add_(0, rows * self._size + last, unsaid)

    def _sums(self, request: SampleRequest) -> Iterator[tuple[Places, Values]]:
        params = request.params
        if params.logit_bias:
            yield _biases(params.logit_bias)
        forbidden = []
        if request.output_index < params.min_tokens:
            forbidden += [t for t in params.stop_token_ids if 0 <= t < self._size]
        for word in params.bad_words:
            begun = word[:-1]
            if not begun or (request.pending < 0 and _ends_with(request.output_ids, begun)):
                forbidden.append(word[-1])
        if request.pending < 0:
            forbidden += [last for _, last in _repeats(params.no_repeat_ngram, request.output_ids)]
        if forbidden:
            yield np.array(forbidden, np.int64), np.full(len(forbidden), -np.inf, np.float32)

    # --- penalties --------------------------------------------------------------------------------

    def _penalise_repetition(self, flat: torch.Tensor, sampled: torch.Tensor) -> None:
        penalties = np.ones(max(self._ruled) + 1, np.float32)
        lists = []
        for row, request in self._ruled.items():
            if request.params.repetition_penalty != 1.0:
                penalties[row] = request.params.repetition_penalty
                lists += [(row, request.prompt_ids), (row, request.output_ids)]
        if lists:
            places = self._places(lists, flat, sampled)
            values, by = flat[places], self._up(penalties, flat)[places // self._size]
            flat[places] = torch.where(values > 0, values / by, values * by)

    def _penalise_answers(self, logits: torch.Tensor, sampled: torch.Tensor) -> None:
        rows = [
            row
            for row, r in self._ruled.items()
            if r.params.frequency_penalty or r.params.presence_penalty
        ]
        if not rows:
            return
        lists = [(row, self._ruled[row].output_ids) for row in rows]
        places = self._places(lists, logits, sampled)
        counts = torch.zeros_like(logits).view(-1)
        counts.scatter_add_(0, places, torch.ones(1, device=logits.device).expand(len(places)))
        index = self._up(np.array(rows, np.int64), logits)
        counted = counts.view_as(logits)[index]
        wishes = [self._ruled[row].params for row in rows]
        both = np.array([(p.frequency_penalty, p.presence_penalty) for p in wishes], np.float32)
        frequency, presence = self._up(both, logits).split(1, dim=-1)
        logits[index] -= frequency * counted + presence * (counted > 0)

    def _places(
        self, lists: Iterable[tuple[int, Sequence[int]]], like: torch.Tensor, sampled: torch.Tensor
    ) -> torch.Tensor:
        """Of these tokens in these rows, and of what is on its way to them."""
        known = [
            np.array(tokens, np.int64) + row * self._size for row, tokens in lists if len(tokens)
        ]
        places = self._up(np.concatenate([np.zeros(0, np.int64), *known]), like)
        waiting = {row: self._ruled[row].pending for row, _ in lists}
        waiting = {row: source for row, source in waiting.items() if source >= 0}
        if not waiting:
            return places
        rows, sources = self._up(np.array(list(waiting.items()), np.int64).T, like)
        return torch.cat([places, rows * self._size + sampled[sources]])

    # --- masks ------------------------------------------------------------------------------------

    def _mask(self, row: int) -> Bits | None:
        request = self._ruled[row]
        mask = None
        if request.params.allowed_token_ids:
            mask = _bits(request.params.allowed_token_ids, self._size)
        if request.allowed is not None:
            try:
                admitted = request.allowed()
            except ValueError as error:
                self.faults[row] = str(error)
                return None
            mask = admitted if mask is None else mask & admitted
        return mask

    def _unpacked(self, masks: Mapping[int, Bits], logits: torch.Tensor) -> torch.Tensor:
        """bool `[rows, vocabulary]`: what is not allowed."""
        bits = self._up(np.stack(list(masks.values())), logits)
        shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
        return ((bits[..., None] >> shifts) & 1).flatten(1)[:, : self._size] == 0

    @staticmethod
    def _up(values: npt.NDArray[Any], like: torch.Tensor) -> torch.Tensor:
        return upload(np.ascontiguousarray(values), like.device)


def _unsure(request: SampleRequest) -> Iterator[tuple[int, int]]:
    """What is forbidden behind one token on its way: that token, and what would follow it."""
    if request.pending >= 0:
        params, said = request.params, request.output_ids
        for word in params.bad_words:
            if len(word) > 1 and _ends_with(said, word[:-2]):
                yield word[-2], word[-1]
        yield from _repeats(params.no_repeat_ngram, said, 1)


def _repeats(
    rule: NoRepeat | None, said: Sequence[int], num_pending: int = 0
) -> Iterator[tuple[int, int]]:
    """The last two tokens of each run that the next token would repeat.

    With a token on its way the first of the two is what that token would have to be.
    """
    if rule is None:
        return
    end = len(said) + num_pending
    first = max(0, end - rule.window_size)
    tail = list(said[first:])
    last_start = end - first - rule.ngram_size
    begun = tail[last_start + 1 :]
    for start in range(last_start + 1):
        if tail[start : start + len(begun)] == begun:
            last_two = tail[start + rule.ngram_size - 2 : start + rule.ngram_size]
            # The run that ends with the token on its way is one token, said all the time.
            if last_two[-1] not in rule.whitelist_token_ids:
                yield last_two[0], last_two[-1]


def _ends_with(said: Sequence[int], begun: Sequence[int]) -> bool:
    return len(said) >= len(begun) and list(said[len(said) - len(begun) :]) == list(begun)


def _remembered(make: Callable[[tuple[Any, ...]], T]) -> Callable[[tuple[Any, ...]], T]:
    """What is made of a tuple, which is not read again: every step shows the same object."""
    known: dict[int, tuple[tuple[Any, ...], T]] = {}

    def made(values: tuple[Any, ...]) -> T:
        found = known.get(id(values))
        if found is None or found[0] is not values:
            if len(known) >= MAX_REMEMBERED:
                known.clear()
            found = known[id(values)] = values, make(values)
        return found[1]

    return made


@_remembered
def _biases(pairs: tuple[tuple[int, float], ...]) -> tuple[Places, Values]:
    tokens, values = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(tokens, np.int64), np.array(values, np.float32)


@lru_cache(maxsize=256)
def _bits(tokens: tuple[int, ...], size: int) -> Bits:
    among = np.zeros(size, np.bool_)
    among[list(tokens)] = True
    return np.packbits(among, bitorder="little")
