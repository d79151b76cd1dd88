"""Continuous batching: which sequences are in the next step, and with how many tokens.

Policy only, no I/O and no clock.  Every step has one token budget.  Decodes go first, one token
each, so that running streams keep their pace; what is left goes to prompts in chunks, first come
first served.  A request enters only when all blocks that it can ever need are reserved, so memory
is never over-promised and no running request can be stopped by a newer one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Entry:
    """One request as the scheduler sees it."""

    key: str
    num_prompt: int
    num_blocks: int
    num_computed: int = 0
    decoding: bool = False


class BatchScheduler:
    """FCFS admission by blocks, then one token budget per step."""

    def __init__(self, max_step_tokens: int, max_chunk_tokens: int, max_running: int) -> None:
        self._max_step_tokens = max_step_tokens
        self._max_chunk_tokens = max_chunk_tokens
        self._max_running = max_running
        self._waiting: dict[str, Entry] = {}
        self._prefilling: dict[str, Entry] = {}
        self._decoding: dict[str, Entry] = {}
        self._first_decode = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def add(self, entry: Entry) -> None:
        """Join the line (prompt to be computed)."""
        self._waiting[entry.key] = entry

    def add_decoding(self, entry: Entry) -> None:
        """Join the batch directly: its KV is there and its blocks are leased."""
        self._prefilling.pop(entry.key, None)
        entry.decoding = True
        self._decoding[entry.key] = entry

    def remove(self, key: str) -> None:
        for line in (self._waiting, self._prefilling, self._decoding):
            line.pop(key, None)

    def next_admission(self) -> Entry | None:
        """The head of the line, if the batch has room for one more."""
        if not self._waiting or self.num_running >= self._max_running:
            return None
        return next(iter(self._waiting.values()))

    def admit(self, entry: Entry) -> None:
        """Its blocks are leased."""
        del self._waiting[entry.key]
        self._prefilling[entry.key] = entry

    def plan(self) -> list[tuple[Entry, int]]:
        """The next step: `(entry, number of tokens)`, decodes first.

        With more decodes than the budget holds, the window rotates, so that none starves.
        """
        budget = self._max_step_tokens
        decodes = list(self._decoding.values())
        if len(decodes) > budget:
            start = self._first_decode % len(decodes)
            self._first_decode = start + budget
            decodes = (decodes + decodes)[start : start + budget]
        step = [(entry, 1) for entry in decodes]
        budget -= len(step)
        for entry in self._prefilling.values():
            if budget <= 0:
                break
            chunk = min(entry.num_prompt - entry.num_computed, self._max_chunk_tokens, budget)
            if chunk > 0:
                step.append((entry, chunk))
                budget -= chunk
        return step
