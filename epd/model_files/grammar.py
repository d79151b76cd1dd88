"""Constrained output: which tokens may come next, by a grammar that travels with the request.

Theory of operation
-------------------
The gateway turns `response_format` and its relatives into one text, a grammar of llguidance, and
checks it; the text is part of the sampling parameters.  An engine holds no request, so the state of
a grammar is a function of the tokens of the answer so far.  The instance that samples token `i`,
also after a migration, replays the first `i` into a matcher.  Matchers of recent requests are kept,
so that a step usually replays one token.

Native code may overflow its stack, so the gateway proves a grammar in a child that may die.  It
compiles the grammar, makes masks and takes tokens along some answers (`proof`), under an engine's
limits and on a sixteenth of the launch thread's stack (`engine.base`).  What has passed there
passes at every instance.

Masks come from llguidance (https://github.com/guidance-ai/llguidance): an abi3 wheel without
dependencies, which needs no torch and so serves the gateway as well.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from epd.model_files.checkpoint import read_eos_token_ids
from epd.model_files.finite import loosened

MAX_MATCHERS = 1024  # a forgotten one is replayed from the first token
MAX_BUILD_S = 0.15  # of a processor: steps of others wait as long, at prefill and at decode
NUM_BUILDS = 3  # the shortest counts: on a busy machine the same work takes up to twice as long
NUM_WALKS, MAX_WALK_TOKENS = 5, 32  # answers that a proof begins
NUM_LONG, MAX_LONG_TOKENS = 2, 512  # under a count each token may cost more than the last
NUM_DIGITS, MAX_DIGIT_TOKENS = 6, 128  # among multiples a step may search every remainder
# A choice of thousands is one row.  A lexer's state has 1 to 2 KiB, and a few thousand are many.
_limits = partial(
    LLParserLimits, max_items_in_row=32_000, max_lexer_states=32_000, verbose_errors=False
)
LIMITS = _limits(step_lexer_fuel=400_000)
# A quarter: an answer may become longer than those of a proof, and come by dearer places.
PROOF_LIMITS = _limits(step_lexer_fuel=LIMITS.step_lexer_fuel // 4)
_COUNTED = re.compile(r"\{\d")
_ENDS = frozenset(b'"]}')


def _alike(_: int) -> int:
    """A walk that prefers no token."""
    return 0


class Matcher:
    """Of a grammar, and of what its numbers may be.  As LLMatcher, which never raises."""

    def __init__(self, *both: LLMatcher) -> None:
        self._both = both

    def deep_copy(self) -> Matcher:
        return Matcher(*(one.deep_copy() for one in self._both))

    def mask(self) -> npt.NDArray[np.uint8]:
        """Bits of the vocabulary, the first token's the lowest."""
        masks = [np.frombuffer(one.compute_bitmask(), np.uint8) for one in self._both]
        return np.bitwise_and.reduce(masks)

    def take(self, token_id: int) -> bool:
        return all(one.try_consume_tokens([token_id]) for one in self._both)

    def rollback(self, count: int) -> bool:
        return all(one.rollback(count) for one in self._both)

    def is_stopped(self) -> bool:
        """Nothing but the end can follow."""
        return any(one.is_stopped() for one in self._both)

    def is_accepting(self) -> bool:
        return all(one.is_accepting() for one in self._both)

    def is_error(self) -> bool:
        return any(one.is_error() for one in self._both)

    def reason(self) -> str:
        """Of an error: its words, without the dump of its state that follows them."""
        errors = (one.get_error().partition("<state>")[0].strip() for one in self._both)
        return next(filter(None, errors), "")


@dataclass(slots=True)
class _Replayed:
    grammar: str
    matcher: Matcher
    token_ids: list[int]

    def go_back(self, count: int) -> bool:
        """To the first `count` tokens, as behind drafts that did not hold; False: it cannot."""
        behind = len(self.token_ids) - count
        self.token_ids = self.token_ids[:count]
        return not behind or self.matcher.rollback(behind)


class _Vocabulary:
    """What llguidance asks of a tokenizer.  Text that spells a special token is ordinary text here:
    no answer may hold the token where its grammar has the letters."""

    def __init__(self, text: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._whole = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
        added = json.loads(text).get("added_tokens") or ()
        special = {token["id"]: token["content"] for token in added if token.get("special")}
        self.special_token_ids = [i for i in sorted(special) if i < vocab_size]
        self._special = frozenset(special)
        self.eos_token_id = self._whole.eos_token
        self.bos_token_id = None
        self.tokens = [
            special[i].encode() if i in special else self._whole.decode_bytes([i])
            for i in range(vocab_size)
        ]

    def __call__(self, text: str) -> list[int]:
        token_ids = self._whole.tokenize_str(text)
        if self._special.isdisjoint(token_ids):
            return token_ids
        return self._whole.greedy_tokenize(text)


class Grammars:
    """Matchers over the vocabulary of one model; for one thread at a time."""

    def __init__(self, model_dir: Path | str, vocab_size: int) -> None:
        self._directory = Path(model_dir)
        self._vocab_size = vocab_size
        self._kept: OrderedDict[str, _Replayed] = OrderedDict()
        self._loose: dict[str, LLMatcher] = {}  # the last

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        path = self._directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{self._directory} has no tokenizer.json, which grammars need")
        text = path.read_text("utf-8")
        eos = list(read_eos_token_ids(self._directory))
        vocabulary = _Vocabulary(text, self._vocab_size, eos)
        wrapper = TokenizerWrapper(vocabulary)
        return LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=eos or None)

    def warm_up(self) -> None:
        """Read the vocabulary now: a part of a second for a large one."""
        with contextlib.suppress(ValueError):  # told to those who send a grammar
            _ = self._tokenizer

    def fault(self, grammar: str) -> str:
        """Why no answer can follow this grammar; empty if one can."""
        matcher = Matcher(self._made(grammar))
        if not matcher.is_error():
            matcher.mask()
        if matcher.is_error():
            return matcher.reason()
        if matcher.is_stopped() and not matcher.is_accepting():
            return "nothing satisfies it"
        return ""

    def proof(self, grammar: str) -> str:
        """Of a grammar without fault: why an engine could not work with it; empty if it can."""
        for _ in range(NUM_BUILDS):
            began_s = time.process_time()
            matcher = self._matcher(grammar, PROOF_LIMITS)
            if time.process_time() - began_s <= MAX_BUILD_S:
                break
        else:
            return f"to compile it takes more than {MAX_BUILD_S:g} s of a processor; simplify it"
        walks: list[tuple[int, Callable[[int], int]]] = [(MAX_WALK_TOKENS, _alike)] * NUM_WALKS
        if _COUNTED.search(grammar):  # a long one stays in its strings
            named = partial(self._is_unnamed, frozenset(grammar.encode()))
            walks += [(MAX_LONG_TOKENS, self._is_end), (MAX_LONG_TOKENS, named)] * NUM_LONG
        if '"multipleOf"' in grammar:
            walks += [(MAX_DIGIT_TOKENS, self._behind_digits)] * NUM_DIGITS
        reasons = (self._walk(matcher.deep_copy(), n, *each) for n, each in enumerate(walks))
        return next(filter(None, reasons), "")

    def _walk(self, matcher: Matcher, seed: int, count: int, avoids: Callable[[int], int]) -> str:
        """Begin one answer of those that it admits, and go back in it; why that failed.

        A long one that comes to the end goes on from the last place that had others: what
        costs most may follow there alone."""
        draw, others = random.Random(seed), list[list[int]]()  # of each token, those beside it
        for _ in range(count):
            if matcher.is_stopped():
                behind = next((n for n, one in enumerate(reversed(others), 1) if one), 0)
                if count != MAX_LONG_TOKENS or not behind or not matcher.rollback(behind):
                    break
                some = others[-behind]
                del others[-behind:]
            else:
                admitted = np.flatnonzero(np.unpackbits(matcher.mask(), bitorder="little"))
                if not len(admitted):
                    return matcher.reason() or "an answer may come to where nothing can follow"
                places = draw.sample(range(len(admitted)), min(8, len(admitted))) if seed else [0]
                some = admitted[places].tolist()
            token = min(some, key=avoids)
            if not matcher.take(token):
                return matcher.reason() or f"token {token} cannot follow, though it is admitted"
            some.remove(token)
            others.append(some)
        if not matcher.is_error():
            matcher.rollback(len(others) // 2)
            matcher.mask()
        return matcher.reason()

    def _is_end(self, token_id: int) -> bool:
        text = self._tokenizer.decode_bytes([token_id])
        return token_id in self._tokenizer.eos_tokens or not _ENDS.isdisjoint(text)

    def _is_unnamed(self, named: frozenset[int], token_id: int) -> int:
        """Ends last, ahead of them what has bytes that are not `named`: those of the grammar's text
        lead into more of its parts than most do."""
        is_named = named.issuperset(self._tokenizer.decode_bytes([token_id]))
        return 2 if self._is_end(token_id) else not is_named

    def _behind_digits(self, token_id: int) -> int:
        """Ends come next, lest a walk stay in a text before its number."""
        is_digits = self._tokenizer.decode_bytes([token_id]).isdigit()
        return 0 if is_digits else 1 if self._is_end(token_id) else 2

    def _matcher(self, grammar: str, limits: LLParserLimits = LIMITS) -> Matcher:
        made = self._made(grammar, limits)
        if not (text := loosened(grammar)):
            return Matcher(made)
        if text not in self._loose:  # but for tools there is one
            self._loose = {text: self._made(text)}
        return Matcher(made, self._loose[text].deep_copy())

    def _made(self, grammar: str, limits: LLParserLimits = LIMITS) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)

    def allowed(
        self, request_id: str, grammar: str, token_ids: Sequence[int], ends: Sequence[int] = ()
    ) -> npt.NDArray[np.uint8]:
        """Bits of the vocabulary, the first token's the lowest: what may follow the answer's tokens
        so far.

        Only the end of the text may follow a complete answer: a token that the files name, or one
        of `ends`, the request's own.  Raises ValueError when these tokens cannot have come from
        this grammar, or it is too complex.
        """
        kept = self._replay(request_id, grammar, list(token_ids), ends)
        bits = kept.matcher.mask()
        if kept.matcher.is_error():
            del self._kept[request_id]
            # Without masks between them all tokens of an answer share the fuel of one.
            kept = self._replay(request_id, grammar, list(token_ids), ends, with_masks=True)
            bits = kept.matcher.mask()
        if kept.matcher.is_error():
            del self._kept[request_id]
            raise ValueError(f"the grammar cannot go on: {kept.matcher.reason()}")
        bits = bits[: -(-self._vocab_size // 8)]
        if not ends or not kept.matcher.is_accepting():
            return bits
        bits = bits.copy()
        for end in ends:
            if end < self._vocab_size:
                bits[end >> 3] |= 1 << (end & 7)
        return bits

    def _replay(
        self,
        request_id: str,
        grammar: str,
        token_ids: list[int],
        ends: Sequence[int],
        *,
        with_masks: bool = False,
    ) -> _Replayed:
        kept = self._kept.get(request_id)
        same = 0
        if kept is not None:
            pairs = zip(kept.token_ids, token_ids, strict=False)
            shorter = min(len(kept.token_ids), len(token_ids))
            same = next((at for at, (a, b) in enumerate(pairs) if a != b), shorter)
        if kept is None or kept.grammar != grammar or not kept.go_back(same):
            matcher = self._matcher(grammar)
            self._kept[request_id] = kept = _Replayed(grammar, matcher, [])
        self._kept.move_to_end(request_id)
        while len(self._kept) > MAX_MATCHERS:
            self._kept.popitem(last=False)
        for token_id in token_ids[len(kept.token_ids) :]:
            if with_masks:
                kept.matcher.mask()
            is_read = kept.matcher.take(token_id)
            if not is_read and token_id in ends:  # to the matcher there is one end
                is_read = kept.matcher.take(self._tokenizer.eos_token)
            if not is_read:
                del self._kept[request_id]  # one of the two may have taken it
                raise ValueError(f"the answer left its grammar: token {token_id} cannot follow")
            kept.token_ids.append(token_id)
        return kept
