"""One choice of an answer while it grows: token ids in, text out, and what it counts.

Text is split into reasoning, calls and content.  Stop strings are looked for in content alone: one
in an argument of a call changes nothing (F72), nor does one that spans a call.

An update is detokenized in one piece, unless a stop string or a number of calls may end the answer,
or log-probabilities are asked for.  Then it goes token by token: the answer's end, the number of
tokens and the text of each do not depend on how tokens were bundled on their way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from epd.api.answers.detokenize import Detokenizer
from epd.api.answers.echo import Echo
from epd.api.answers.placing import Placed, Placing
from epd.api.asked.calls.registry import form_named
from epd.api.asked.reasoning import ReasoningParser
from epd.api.asked.stop import StopMatcher
from epd.api.asked.tools import CallPiece, ToolUse, merged
from epd.frontend import GenerationStream, GenerationUpdate, Leave
from epd.later import later
from epd.messages import TokenLogprobs

if TYPE_CHECKING:
    from epd.api.asked.calls.parser import CallParser

call_parser = later("epd.api.asked.calls.parser:CallParser")


@dataclass(slots=True)
class Delta:
    """What is new: text that cannot change any more, and the log-probabilities of its tokens."""

    text: str
    logprobs: list[TokenLogprobs]
    finish_reason: str
    token_ids: list[int]  # that it took; their text may be held back, or none
    calls: list[CallPiece] = field(default_factory=list)
    reasoning: str = ""
    placed: list[Placed] = field(default_factory=list)  # of `logprobs`, those of its text


def joined(deltas: Sequence[Delta]) -> Delta:
    """One for all of an answer."""
    return Delta(
        "".join(delta.text for delta in deltas),
        [entry for delta in deltas for entry in delta.logprobs],
        deltas[-1].finish_reason,
        [token_id for delta in deltas for token_id in delta.token_ids],
        [piece for delta in deltas for piece in delta.calls],
        "".join(delta.reasoning for delta in deltas),
        [entry for delta in deltas for entry in delta.placed],
    )


@dataclass(slots=True)
class _Said:
    """What is new, while it is read."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallPiece] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)


@dataclass(slots=True)
class Choice:
    """Reads updates until `finish_reason` is set; later ones are not offered to it."""

    index: int
    stream: GenerationStream
    detokenizer: Detokenizer
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # such a token ends the answer and is no part of its text
    min_tokens: int = 0  # stop strings are not looked for before
    tells_stop: bool = False  # what ends the answer is part of its text
    num_tokens: int = 0
    num_accepted: int = 0  # of its tokens, those that were drafted
    num_rejected: int = 0  # rejected drafts
    num_cached: int = 0  # tokens of the prompt that were not computed for it
    finish_reason: str = ""
    stop_token_id: int | None = None  # the one that ended it
    failed: bool = False  # its stream ended without an answer
    first_token_s: float = 0.0  # wall-clock; of the first choice, for the trace
    tool_use: ToolUse | None = None
    reasoning: ReasoningParser | None = None
    hides_reasoning: bool = False  # it is counted, and not told
    prompt_index: int = 0  # of the prompts of its request
    prompt_token_ids: Sequence[int] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # from its second token, once it is scored
    echo: Echo | None = None  # to be told ahead of its text; None: nothing is, or it has been
    _matcher: StopMatcher | None = None
    _parser: CallParser | None = None
    _placing: Placing = field(default_factory=Placing)

    def __post_init__(self) -> None:
        if self.tool_use is not None:
            use = self.tool_use
            functions = (tool["function"] for tool in use.tools)
            self._parser = call_parser(
                {function["name"]: function.get("parameters") for function in functions},
                0 if use.parallel else 1,
                is_forced=bool(use.forced),
                form=form_named(use.form),
            )
        if self.stop:
            self._matcher = StopMatcher(self.stop)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def is_parsed(self) -> bool:
        """Whether some of its tokens are marks, of which a client is told nothing."""
        return self._parser is not None or self.reasoning is not None

    @property
    def stop_string(self) -> str:
        """The one that ended it; empty if none did."""
        return self._matcher.found if self._matcher is not None else ""

    @property
    def matched_stop(self) -> str | int | None:
        """The stop string or the token that ended it."""
        return self.stop_string or self.stop_token_id

    def take(self, updates: Iterable[GenerationUpdate]) -> Delta:
        """Several updates at once, none of them an error."""
        said = _Said()
        logprobs: list[TokenLogprobs] = []
        token_ids: list[int] = []
        for update in updates:
            if not self.num_tokens:  # a later attempt finds what an earlier one computed
                self.num_cached = update.num_cached
                self.prompt_logprobs = update.logprobs[0].prompt if update.logprobs else ()
            count = self._take(update, said)
            logprobs.extend(update.logprobs[:count])
            token_ids.extend(update.token_ids[:count])
            self.num_accepted += min(update.num_accepted, count)  # others are behind its end
            self.num_rejected += update.num_rejected
            if self.finish_reason:
                break
        if self.echo is not None and self.num_tokens:
            self._tell_prompt(self.echo, said.texts, logprobs, token_ids)
        if self.finish_reason == "stop" and self._parser is not None and self._parser.num_calls:
            assert self.tool_use is not None
            if not self.tool_use.is_named:
                self.finish_reason = "tool_calls"
        return Delta(
            "".join(said.texts),
            logprobs,
            self.finish_reason,
            token_ids,
            merged(said.calls),
            "" if self.hides_reasoning else "".join(said.reasoning),
            said.placed,
        )

    def _tell_prompt(
        self,
        echo: Echo,
        texts: list[str],
        logprobs: list[TokenLogprobs],
        token_ids: list[int],
    ) -> None:
        """Ahead of its first text.  An answer without tokens was asked for one, and drops it."""
        if echo.alone:
            texts.clear()
            logprobs.clear()
            token_ids.clear()
            self.num_tokens, self.finish_reason, self.stop_token_id = 0, "length", None
        texts.insert(0, echo.text)
        logprobs[:0] = echo.entries(self.prompt_logprobs)
        self.echo = None

    def _take(self, update: GenerationUpdate, said: _Said) -> int:
        """Number of tokens used, all of them unless a stop string or the last call ends the
        answer."""
        shown = update.token_ids
        is_ended = update.finish_reason == "stop" and shown and shown[-1] in self.stop_token_ids
        if is_ended:
            self.stop_token_id = shown[-1]
            shown = shown if self.tells_stop else shown[:-1]
        may_end = self._matcher is not None or (self._parser is not None and self._parser.limit)
        if not may_end and not update.logprobs:
            self.num_tokens += len(shown)
            self._read(self.detokenizer.push(shown), said)
        else:
            entries = update.logprobs or (None,) * len(shown)
            for count, (token_id, entry) in enumerate(zip(shown, entries, strict=False), 1):
                self.num_tokens += 1
                self._read(self.detokenizer.push((token_id,)), said, entry)
                if self.finish_reason:
                    why = "stop string" if self.stop_string else "one tool call was asked for"
                    self.stream.cancel(Leave.ENOUGH, why)
                    return count
        self.num_tokens += len(update.token_ids) - len(shown)
        if update.finish_reason:
            self._finish(update.finish_reason, said)
        return len(update.token_ids)

    def _read(self, text: str, said: _Said, entry: TokenLogprobs | None = None) -> None:
        """More of the answer; it ends here if a stop string, or the last call, is complete."""
        self._placing.read(len(text), entry)
        if self.reasoning is not None:
            reasoning, text = self.reasoning.push(text)
            said.reasoning.append(reasoning)
        calls: list[CallPiece] = []
        if self._parser is not None:
            text, calls = self._parser.push(text)
            said.calls += calls
        said.placed += self._placing.settled(len(text), self._num_held)
        self._match(text, said.texts)
        if self._matcher is not None and any(piece.name for piece in calls):
            said.texts.append(self._matcher.finish())  # it stands ahead of the call
        if self._parser is not None and self._parser.done:
            self.finish_reason = "stop"

    @property
    def _num_held(self) -> int:
        """Characters that may turn out to be no text."""
        return sum(parser.num_held for parser in (self.reasoning, self._parser) if parser)

    def _match(self, text: str, texts: list[str]) -> bool:
        if self._matcher is None or self.num_tokens <= self.min_tokens:
            texts.append(text)
            return False
        text, stopped = self._matcher.push(text)
        texts.append(text)
        if stopped and self.tells_stop:
            texts.append(self._matcher.found)
        if stopped:
            self.finish_reason = "stop"
        return stopped

    def _finish(self, reason: str, said: _Said) -> None:
        """Text held back is settled: it may hold a stop string, or be broken characters."""
        self._read(self.detokenizer.finish(), said)
        if self.finish_reason:
            return
        rest = ""
        if self.reasoning is not None:
            reasoning, rest = self.reasoning.finish()
            said.reasoning.append(reasoning)
        if self._parser is not None:
            text, calls = self._parser.push(rest)
            said.calls += calls
            rest = text + self._parser.finish()
        said.placed += self._placing.settled(len(rest), 0)
        if not self._match(rest, said.texts):
            self.finish_reason = reason
            said.texts.append(self._matcher.finish() if self._matcher is not None else "")
