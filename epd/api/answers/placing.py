"""Beside which text the log-probabilities of a token stand, where calls and reasoning are apart.

A token stands where its text ends.  Text may be held back, as it may be a mark: then its tokens
are, too.  Tokens of marks, of calls, of reasoning and of line breaks between them stand nowhere,
nor does the one that ends an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from epd.messages import TokenLogprobs

Placed = tuple[int, TokenLogprobs]  # characters of the answer's text, up to where it stands


@dataclass(slots=True)
class Placing:
    """Of one answer, which is read token by token."""

    _num_read: int = 0  # characters of all that the model wrote
    _num_shown: int = 0  # and of what of that is text
    _waiting: list[tuple[int, TokenLogprobs]] = field(default_factory=list)  # where each ends

    def read(self, num_chars: int, entry: TokenLogprobs | None) -> None:
        """One token; without a character of its own it is part of the next one."""
        self._num_read += num_chars
        if entry is not None:
            self._waiting.append((self._num_read + (not num_chars), entry))

    def settled(self, num_shown: int, num_held: int) -> list[Placed]:
        """Those of so many more characters of text, while so many are held back."""
        self._num_shown += num_shown
        sure = self._num_read - num_held
        over = [one for one in self._waiting if one[0] <= sure]
        self._waiting = self._waiting[len(over) :]
        return [(self._num_shown, entry) for end, entry in over if end > sure - num_shown]
