"""Where a JSON value ends in a text that is still coming, found without reading its content.

Only strings and brackets matter for that.  So a mark inside a string is part of it (F72), and a
text of any length is walked once, however it is cut.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PLAIN = re.compile(r'["{}\[\]<]')  # no JSON has `<` outside of a string; all our marks begin so
_QUOTED = re.compile(r'["\\]')


@dataclass(slots=True)
class JsonWalk:
    """Keeps its place between the pieces of a text."""

    depth: int = 0  # of brackets
    is_broken: bool = False  # what comes is no JSON
    broken_at: int = 0  # in the text that was walked last
    _is_quoted: bool = False
    _is_escaped: bool = False

    def end(self, text: str, at: int, depth: int) -> int:
        """Walk from `at`; the place behind the bracket that leads back to `depth`.  -1: it has not
        come, and the whole text is walked; or it is broken."""
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_QUOTED if self._is_quoted else _PLAIN).search(text, at)
            if found is None:
                break
            at, mark = found.end(), found[0]
            if mark == "\\":
                self._is_escaped = True
            elif mark == '"':
                self._is_quoted = not self._is_quoted
            elif mark == "<":
                self.is_broken, self.broken_at = True, at - 1
                break
            elif mark in "{[":
                self.depth += 1
            else:
                self.depth -= 1
                if self.depth == depth:
                    return at
        return -1
