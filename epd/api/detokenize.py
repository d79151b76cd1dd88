"""Tokens to text while they arrive.

A token may hold part of a character, and some decoders change text with its left neighbour (a
leading space), so tokens cannot be decoded one by one.  As in vLLM and TGI, a short window is
decoded twice: with and without the new tokens; what the longer text adds is certain unless it ends
in a replacement character, that is in the middle of a character.  Cost is constant per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

WINDOW = 6  # tokens of left context
REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """What is needed of `tokenizers.Tokenizer`."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """One stream's text."""

    def __init__(self, decoder: Decoder, *, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._prefix = 0  # start of the window
        self._read = 0  # tokens whose text was given out

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is certain now; may be empty."""
        self._ids.extend(token_ids)
        return self._advance(final=False)

    def finish(self) -> str:
        """No more tokens come: what is left, with its broken characters."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        if self._read == len(self._ids):
            return ""
        before = self._decode(self._prefix, self._read)
        after = self._decode(self._prefix, len(self._ids))
        if after.endswith(REPLACEMENT) and not final:
            return ""  # in the middle of a character
        self._prefix = max(self._prefix, self._read - WINDOW)
        self._read = len(self._ids)
        self._trim()
        return after[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return self._decoder.decode(self._ids[start:end], skip_special_tokens=self._skip)

    def _trim(self) -> None:
        """Forget what is left of the window."""
        if self._prefix > 4 * WINDOW:
            del self._ids[: self._prefix]
            self._read -= self._prefix
            self._prefix = 0
