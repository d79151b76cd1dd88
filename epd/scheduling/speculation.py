"""Speculative decoding by prompt lookup: the earlier text gives the drafts.

Theory of operation
-------------------
Answers repeat: names, quoted passages, code that is edited, tables.  So the last few tokens of a
text are looked for earlier in it, prompt and answer alike, and their successors there are drafts.
A draft costs no model.  The step that computes the last token computes the drafts behind it as
well, and samples behind each of them.  As long as the sampled token equals the draft, the next one
counts too (`engine.base.verify`).  Tokens are those of the target model by construction, drawn with
their own numbers of their own seed: speculation never changes an answer, greedy or sampled.

The longest suffix of `longest` to `shortest` tokens that occurred before wins, and of its places
the most recent one.  Where the text ends before there are enough drafts, the copy goes on with the
drafts themselves, as in LZ77: a short period gives drafts of any length.

`_after` has for each n-gram the place behind its most recent occurrence.  The suffix itself has no
successor yet, so it is not in there.  Each new token adds one entry for each length, and a look-up
reads at most that many.

Source: prompt lookup decoding (Saxena, 2023); the options are those of vLLM's `ngram` method.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

MAX_READ = 4096  # tokens that one call takes in: a long prompt must not hold up the event loop


class PromptLookup:
    """Drafts for one text that grows."""

    __slots__ = ("_after", "_longest", "_never", "_shortest", "_tokens")

    def __init__(self, shortest: int, longest: int, never: Container[int] = ()) -> None:
        """Suffixes of `shortest` to `longest` tokens are looked for.

        `never`: tokens that are not drafted, such as placeholders, whose rows are not text.
        """
        self._shortest = shortest
        self._longest = longest
        self._never = never
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def draft(
        self, tokens: Callable[[int, int], Sequence[int]], num_tokens: int, limit: int
    ) -> tuple[int, ...]:
        """At most `limit` tokens that may follow the text's `num_tokens`, whose ids
        `tokens(start, stop)` gives; the text of the last call and what came since."""
        known = len(self._tokens)
        self._read(tokens(known, min(num_tokens, known + MAX_READ)))
        return self._copy(limit) if len(self._tokens) == num_tokens else ()

    def _read(self, news: Sequence[int]) -> None:
        text, after = self._tokens, self._after
        for token in news:
            at = len(text)
            for size in range(self._shortest, min(self._longest, at) + 1):
                after[tuple(text[at - size :])] = at
            text.append(token)

    def _copy(self, limit: int) -> tuple[int, ...]:
        text = self._tokens
        for size in range(min(self._longest, len(text)), self._shortest - 1, -1):
            at = self._after.get(tuple(text[-size:]))
            if at is not None:
                break
        else:
            return ()
        drafts: list[int] = []
        for n in range(limit):
            place = at + n - len(text)
            token = text[at + n] if place < 0 else drafts[place]
            if token in self._never:
                break
            drafts.append(token)
        return tuple(drafts)
