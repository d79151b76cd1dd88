"""Patterns as ECMA 262 reads them, for Rust's regular expressions, without looking ahead.

What is admitted is admitted by both.  Where they differ, neither a class nor its complement has the
character: U+0085 is a space to Rust, U+FEFF to ECMA 262, U+2028 ends a line to ECMA 262.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from itertools import pairwise

_READ = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\.", re.DOTALL)  # what may differ
_PIECE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_BOTH = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
)
_EITHER = tuple(sorted((*_BOTH, (0x85, 0x85), (0xFEFF, 0xFEFF))))
_OTHER_THAN_LINE_ENDS = r"[^\n\r\x{2028}\x{2029}]"
ANY = rf"[\x{{0}}-\x{{{sys.maxunicode:x}}}]"
MAX_LITERALS = 1000
MAX_DEPTH = 100  # of groups, one for each character of a literal


def _class_of(ranges: Iterable[tuple[int, int]]) -> str:
    return "".join(rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in ranges)


def _others(ranges: tuple[tuple[int, int], ...]) -> str:
    edges = [(-1, -1), *ranges, (sys.maxunicode + 1, sys.maxunicode + 1)]
    return _class_of((before[1] + 1, after[0] - 1) for before, after in pairwise(edges))


_INSIDE = {r"\s": _class_of(_BOTH), r"\S": _others(_EITHER)}
_INSIDE_NEGATED = {r"\s": _class_of(_EITHER), r"\S": _others(_BOTH)}
_OUTSIDE = {name: f"[{inside}]" for name, inside in _INSIDE.items()} | {".": _OTHER_THAN_LINE_ENDS}


def as_rust(pattern: str) -> str:
    """What both read alike."""
    return _READ.sub(_as_rust, pattern)


def _as_rust(found: re.Match[str]) -> str:
    piece = found[0]
    if not piece.startswith("["):
        return _OUTSIDE.get(piece, piece)
    table = _INSIDE_NEGATED if piece.startswith("[^") else _INSIDE
    table = {"[": r"\[", "&": r"\&", "~": r"\~", **table}  # Rust nests and subtracts classes
    return "[" + "".join(table.get(one, one) for one in re.findall(r"(?s)\\.|.", piece[1:]))


# --- looking ahead --------------------------------------------------------------------------------


def ahead(pattern: str) -> tuple[list[str], list[str], str] | None:
    """What `pattern` must and must not begin with, and the pattern without that; None: it does not
    begin by looking ahead, or that is not all of it."""
    pieces = _PIECE.findall(pattern)
    if pieces[:2] != ["^", "("] or _has_branches(pieces):
        return None
    must, must_not, at = list[str](), list[str](), 1
    while (kind := "".join(pieces[at : at + 3])) in ("(?=", "(?!"):
        end = _end_of_group(pieces, at)
        if kind == "(?=":
            must.append("".join(pieces[at + 3 : end]))
        else:
            must_not += _branches(pieces[at + 3 : end])
        at = end + 1
    is_said = at > 1 and "".join(pieces[at : at + 1]) not in ("*", "+", "?", "{")
    return (must, must_not, "^" + "".join(pieces[at:])) if is_said else None


def _has_branches(pieces: list[str]) -> bool:
    depth = 0
    for piece in pieces:
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            return True
    return False


def _branches(pieces: list[str]) -> list[str]:
    """Texts of the branches; one text of all where none ends a line or begins anywhere."""
    found, depth = [""], 0
    for piece in pieces:
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            found.append("")
        else:
            found[-1] += piece
    differ = any(one.endswith("$") or one.startswith(".*") for one in found)
    return found if differ else ["".join(pieces)]


def _end_of_group(pieces: list[str], start: int) -> int:
    depth = 0
    for at in range(start, len(pieces)):
        depth += (pieces[at] == "(") - (pieces[at] == ")")
        if not depth:
            return at
    return len(pieces)


# --- what does not match --------------------------------------------------------------------------


def unmatched(pattern: str) -> str | None:
    """The pattern of what `pattern` is not found in; None: it has more than literals, or has them
    in the middle."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$")
    found = literals(pattern[begins : len(pattern) - ends])
    if found is None or not begins | ends or _has_branches(_PIECE.findall(pattern)):
        return None
    return without(found, begins, ends)


def begun(pattern: str) -> str:
    """The pattern of what begins with `pattern`."""
    return f"^({pattern})" if _has_branches(_PIECE.findall(pattern)) else f"^{pattern}"


def unbegun(pattern: str) -> str | None:
    """The pattern of what does not begin with `pattern`, or less; None as above."""
    if pattern.startswith(".*") and pattern.endswith("$"):
        return unmatched(pattern[2:])  # also of texts of several lines, in which `.*` would end
    return unmatched(begun(pattern))


def without(names: Iterable[str], begins: bool = True, ends: bool = True) -> str | None:
    """The pattern of what does not begin, end, or both, with any of these; None: they are long.

    A tree of their letters: a text leaves it at a letter that no name has there, or is cut short.
    """
    root: _Tree = _Tree()
    for name in names:
        if len(name) > MAX_DEPTH:
            return None
        node = root
        for letter in name if begins else reversed(name):
            node = node.after.setdefault(letter, _Tree())
        node.is_name = True
    branches = root.left(begins, ends)
    return f"^({'|'.join(branches)})$" if branches else None


class _Tree:
    """Letters of names, from the first one, or from the last."""

    def __init__(self) -> None:
        self.after: dict[str, _Tree] = {}
        self.is_name = False

    def left(self, begins: bool, ends: bool) -> list[str]:
        """Patterns of how a text may go on that is no name."""
        is_whole = begins and ends
        if self.is_name and not is_whole:
            return []
        letters = "".join(map(_letter, self.after))
        other = f"[^{letters}]" if letters else ANY
        found = [*([] if self.is_name else [""]), _joined(begins, other, f"{ANY}*")]
        for letter, tree in self.after.items():
            if rest := tree.left(begins, ends):
                found.append(_joined(begins, _letter(letter), f"({'|'.join(rest)})"))
        return found


def _joined(begins: bool, first: str, rest: str) -> str:
    return first + rest if begins else rest + first


def _letter(letter: str) -> str:
    return rf"\x{{{ord(letter):x}}}"


def literals(pattern: str) -> list[str] | None:
    """All texts that match as a whole; None: there are many, or it has more than branches."""
    reader = _Literals(_PIECE.findall(pattern))
    found = reader.branches()
    return None if reader.pieces or reader.is_beyond else found


class _Literals:
    """Reads branches of letters, groups, classes of letters, and what may be absent."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces[::-1]
        self.is_beyond = False

    def branches(self) -> list[str]:
        found = self._row()
        while self.pieces and self.pieces[-1] == "|":
            self.pieces.pop()
            found += self._row()
        return found

    def _row(self) -> list[str]:
        found = [""]
        while self.pieces and self.pieces[-1] not in "|)" and not self.is_beyond:
            ones = self._one()
            if self.pieces and self.pieces[-1] == "?":
                self.pieces.pop()
                ones = [*ones, ""]
            self.is_beyond |= len(found) * len(ones) > MAX_LITERALS
            found = [] if self.is_beyond else [row + one for row in found for one in ones]
        return found

    def _one(self) -> list[str]:
        piece = self.pieces.pop()
        if piece == "(":
            if self.pieces[-2:] == [":", "?"]:
                del self.pieces[-2:]
            found = self.branches()
            self.is_beyond |= not self.pieces
            del self.pieces[-1:]
            return found
        if piece.startswith("[") and re.fullmatch(r"\[[^\]\\^-]+\]", piece):
            return list(piece[1:-1])
        self.is_beyond |= piece in "^$.*+?{}" or piece.startswith("[")
        self.is_beyond |= piece.startswith("\\") and piece[1:].isalnum()
        return [piece.removeprefix("\\") if len(piece) > 1 else piece]
