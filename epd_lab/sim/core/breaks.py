"""Calls of a process's ports that raise, where their contract has an outcome of failure.

A library, a driver or a slip of ours raises an undeclared exception.  A fault plans which call of
which process does so next, and when: at once, or after the time that the call takes, when part of
its work is done.  Each port asks as it is called.
"""

from __future__ import annotations

from collections import Counter, deque

CALLS = (
    "preprocess", "encode", "to_host", "to_device", "copy_out", "step", "fetch_kv", "write",
    "settle", "fence", "checksum", "get", "put",
)  # fmt: skip


class BrokenCall(RuntimeError):
    """What a planned failure raises: of no type that a port declares."""


class Breaks:
    """Of one process; `fired` counts what really raised."""

    __slots__ = ("_planned", "fired")

    def __init__(self) -> None:
        self._planned: dict[str, deque[bool]] = {}
        self.fired: Counter[str] = Counter()

    def plan(self, call: str, count: int, *, late: bool) -> None:
        """The next `count` calls of this name raise."""
        self._planned.setdefault(call, deque()).extend([late] * count)

    def meet(self, call: str) -> bool:
        """Asked at the beginning of a call.  Raises Broken; True: raise it at the end."""
        planned = self._planned.get(call)
        if not planned:
            return False
        if planned.popleft():
            self.fired[f"raised late {call}"] += 1
            return True
        self.fired[f"raised {call}"] += 1
        raise self.error(call)

    def error(self, call: str) -> BrokenCall:
        return BrokenCall(f"{call} broke down")

    def clear(self) -> None:
        self._planned.clear()
