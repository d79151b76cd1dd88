"""Answers drawn at random from constraints, over the bundled model's vocabulary of bytes."""

from __future__ import annotations

import json
import random

import numpy as np

from epd.api.asked.grammar import checked_grammar
from epd.api.asked.structured import Constraint
from epd.model_files.grammar import Grammars, Matcher
from epd.tiny import CHECKPOINT
from tests.grammars import VOCAB_SIZE

MAX_TOKENS = 400
ENDS = b'"}],0'  # of what a random answer would go on with for ever

GRAMMARS = Grammars(CHECKPOINT, VOCAB_SIZE)
GRAMMARS.warm_up()


def grammar_of(asked: object, *, closes: bool = True) -> str:
    return checked_grammar(Constraint("json", asked, "x"), GRAMMARS.fault, closes=closes)


def matcher_of(asked: object, *, closes: bool = True) -> Matcher:
    return GRAMMARS._matcher(grammar_of(asked, closes=closes))


def takes(matcher: Matcher, text: str) -> bool:
    """As a whole answer."""
    return all(map(matcher.take, text.encode())) and matcher.is_accepting()


def admits(asked: object, value: object, *, closes: bool = True) -> bool:
    text = value if isinstance(value, str) else json.dumps(value)
    return takes(matcher_of(asked, closes=closes), text)


def may_follow(matcher: Matcher) -> list[int]:
    """Bytes, not ends."""
    return [int(t) for t in np.flatnonzero(np.unpackbits(matcher.mask(), bitorder="little")[:256])]


def drawn(
    matcher: Matcher, draw: random.Random, *, ends: float = 0.6, likes: bytes = b""
) -> bytes | None:
    """A random answer; None: it was cut.  `ends`: how often it prefers what may end it."""
    text = b""
    for _ in range(MAX_TOKENS):
        if matcher.is_accepting() and (matcher.is_stopped() or draw.random() < 0.1 + ends):
            return text
        may = may_follow(matcher)
        if not may and matcher.is_accepting():
            return text
        assert may, f"nothing can follow {text!r} {matcher.reason()}"
        first = [token for token in may if token in likes] or may
        last = [token for token in may if token in ENDS]
        token = draw.choice(last if last and draw.random() < ends else first)
        assert matcher.take(token), f"{text!r} cannot go on: {matcher.reason()}"
        text += bytes([token])
    return None
