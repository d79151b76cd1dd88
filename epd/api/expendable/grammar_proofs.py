"""Grammars of strangers, proved in children that may die before any instance sees them.

What was accepted is proved once, and what was refused, or ended its child, is refused at once from
then on.  Requests of one tenant for one text at a time share one proof; another tenant's has its
own, lest its time show the first.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from epd.api.asked.structured import Constraint
from epd.api.asked.tools import ToolUse
from epd.api.expendable.fork_server import ChildBounds
from epd.api.expendable.grammar_child import (
    Broken,
    GrammarAccepted,
    GrammarRefused,
    Trying,
    Word,
    job_text,
)
from epd.api.expendable.work import Cause, Died, ForkServer, Lane, LaneFull, ServerLost, WorkDone
from epd.api.http.errors import ApiError, bad_request
from epd.frontend import Metric

MEMORY_NBYTES = 256 << 20
# No grammar overflows the stack of a launch thread (`engine.base`) that did not overflow this one.
PROOF_STACK_NBYTES = 4 << 20
# Seconds of a processor, how many at a time, how many waiting.  Each text begins in the first: what
# is short passes what is slow.
LANES = ((0.1, 2, 64), (2.0, 1, 8))
WALL_S = 10.0
MAX_REMEMBERED = 4096  # texts
MAX_REMEMBERED_CHARS = 16 << 20  # of their grammars

log = logging.getLogger(__name__)
Outcome = GrammarAccepted | GrammarRefused


class NotProved(Exception):
    """A fault of ours; the text is the child's trace."""


class GrammarProofs:
    """Of one model.  For one loop."""

    def __init__(self, model_dir: Path, vocab_size: int, additional: str = "closed") -> None:
        """`additional`: as `Settings.additional_properties`."""
        module = "epd.api.expendable.grammar_child"
        self._server = ForkServer(module, str(model_dir), str(vocab_size), additional)
        self._lanes = [
            Lane(
                self._server, ChildBounds(cpu_s, WALL_S, MEMORY_NBYTES, PROOF_STACK_NBYTES), *sizes
            )
            for cpu_s, *sizes in LANES
        ]
        self._remembered: OrderedDict[bytes, Outcome] = OrderedDict()
        self._num_chars = 0
        self._running: dict[bytes, asyncio.Task[Outcome]] = {}
        self._counts: Counter[str] = Counter()

    async def close(self) -> None:
        await self._server.close()

    def samples(self) -> Iterator[Metric]:
        text = (
            "proofs of grammars that clients sent; time, memory, crash: what their process died of"
        )
        for outcome, count in sorted(self._counts.items()):
            labels = (("outcome", outcome),)
            yield Metric("epd_grammar_proofs_total", count, labels, "counter", text)

    async def grammar(self, source: Constraint | ToolUse, scope: str = "") -> str:
        """The text that constrains an answer; `scope`: who shares its proof.  Raises ApiError."""
        param = source.param if isinstance(source, Constraint) else "tools"
        try:
            text = await asyncio.to_thread(job_text, source)
        except RecursionError:
            raise bad_request(f"{param} nests too deeply; simplify it", param) from None
        outcome = await self._outcome(text, param, scope)
        if isinstance(outcome, GrammarAccepted):
            return outcome.grammar
        raise bad_request(outcome.message, outcome.param, outcome.code)

    async def _outcome(self, text: bytes, param: str, scope: str) -> Outcome:
        key = hashlib.sha256(hashlib.sha256(scope.encode()).digest() + text).digest()
        if (known := self._remembered.get(key)) is not None:
            self._remembered.move_to_end(key)
            self._counts["remembered"] += 1
            return known
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = asyncio.create_task(self._prove(key, text, param))
            running.add_done_callback(lambda _: self._running.pop(key))
        return await asyncio.shield(running)  # the client of another request may leave

    async def _prove(self, key: bytes, text: bytes, param: str) -> Outcome:
        try:
            for lane in self._lanes:
                ended = await lane.run(text)
                if isinstance(ended, WorkDone) or ended.cause is not Cause.TIME:
                    break
        except (LaneFull, ServerLost) as error:
            is_full = isinstance(error, LaneFull)
            self._counts["full" if is_full else "stall"] += 1
            raise _busy(param, 429 if is_full else 503) from None
        outcome = self._judged(ended, param, lane.bounds)
        self._remember(key, outcome)
        return outcome

    def _judged(self, ended: WorkDone | Died, param: str, bounds: ChildBounds) -> Outcome:
        """Raises ApiError for what was no fault of the text."""
        word: Word = Trying(param)
        if ended.said:
            word = msgspec.msgpack.decode(ended.said, type=Word)
        if isinstance(word, Broken):  # 500, and the log has it
            raise NotProved(word.trace)
        if isinstance(ended, Died):
            self._counts[ended.cause] += 1
            log.info("a process ended that proved %s (%s)", param, ended.cause)
            if ended.cause is Cause.STALL:
                raise _busy(param, 503)
        if isinstance(word, Trying):
            cause = ended.cause if isinstance(ended, Died) else Cause.CRASH
            return GrammarRefused(
                f"{word.param} {_told(cause, bounds)}", word.param, "invalid_schema"
            )
        if isinstance(ended, WorkDone):
            self._counts["accepted" if isinstance(word, GrammarAccepted) else "refused"] += 1
        return word

    def _remember(self, key: bytes, outcome: Outcome) -> None:
        self._remembered[key] = outcome
        self._num_chars += _num_chars(outcome)
        while len(self._remembered) > MAX_REMEMBERED or self._num_chars > MAX_REMEMBERED_CHARS:
            _, forgotten = self._remembered.popitem(last=False)
            self._num_chars -= _num_chars(forgotten)


def _num_chars(outcome: Outcome) -> int:
    return len(outcome.grammar if isinstance(outcome, GrammarAccepted) else outcome.message)


def _told(cause: Cause, bounds: ChildBounds) -> str:
    if cause is Cause.TIME:
        return f"takes more than {bounds.cpu_s:g} s of a processor to compile; simplify it"
    if cause is Cause.MEMORY:
        return f"takes more than {bounds.memory_nbytes >> 20} MiB to compile; simplify it"
    return "nests too deeply or refers too far to be compiled; simplify it"


def _busy(param: str, status: int) -> ApiError:
    message = f"{param} cannot be compiled now, too many others are; try again later"
    code = "overloaded" if status == 429 else "unavailable"
    return ApiError(status, message, param=param, code=code)
