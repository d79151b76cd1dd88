"""One HTTP request for a tracing system: the port, and a record that fills as it goes.

The record is plain data.  It is complete when its response has ended *and* every generation behind
it has concluded.  That is later when the client has enough or leaves: instances are asked to stop
and then report.  Then it is handed over, once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from epd.frontend import GenerationStream, Metric, TimelineEntry

if TYPE_CHECKING:
    from epd.api.answers.choice import Choice
    from epd.api.asked.asked import Asked
    from epd.api.prompts.prepare import Prompt

CLIENT_LEFT = 499  # nginx's status for a client that closed the connection
Attribute = str | float | Sequence[str]


class Tracer:
    """Where records go.  This one samples nothing."""

    def begin(self, headers: Mapping[bytes, bytes]) -> object:
        """The context of a new trace, or of the one that the client's headers name; None: this
        request is not sampled."""
        return None

    def response_header(self, context: object) -> bytes:
        """How a client finds the trace: W3C's traceresponse."""
        return b""

    def hand_over(self, record: Record) -> None:
        """Take a complete record; neither blocks nor fails."""

    def samples(self) -> Iterable[Metric]:
        return ()

    async def close(self) -> None:
        """Export what is there, for a bounded time."""


@dataclass(slots=True)
class Record:
    """One request; times are wall-clock seconds."""

    tracer: Tracer
    context: object
    operation: str  # of gen_ai: chat, text_completion
    began_s: float = field(default_factory=time.time)
    ended_s: float = 0.0
    first_token_s: float = 0.0
    num_output_tokens: int = 0
    attributes: dict[str, Attribute] = field(default_factory=dict)
    fetches: tuple[tuple[float, float], ...] = ()  # of images, by the gateway
    timelines: list[list[TimelineEntry]] = field(default_factory=list)  # of choices
    status: int = 0  # of HTTP
    error: tuple[str, str] = ("", "")  # type and words
    _open: int = 1  # the response, and generations that have not concluded

    def failed(self, kind: str, message: str) -> None:
        self.error = (kind, message)

    @property
    def is_sampled(self) -> bool:
        return self.context is not None

    def watch(self, stream: GenerationStream) -> None:
        """Wait for the end of a generation, too."""
        if not self.is_sampled:
            return
        self._open += 1

        def concluded() -> None:
            self.timelines.append(stream.timeline())
            self._closed()

        stream.on_concluded = concluded

    def describe(self, **attributes: Attribute) -> None:
        """Attributes of GenAI: `request_model` is gen_ai.request.model."""
        for name, value in attributes.items():
            self.attributes["gen_ai." + name.replace("_", ".", 1)] = value

    def responded(self, status: int) -> None:
        """The response has ended, or its error is about to be sent."""
        self.status = status
        self.ended_s = time.time()
        self._closed()

    def _closed(self) -> None:
        self._open -= 1
        if not self._open and self.is_sampled:
            self.tracer.hand_over(self)


def describe_request(
    record: Record, asked: Asked, prompts: Sequence[Prompt], model: str, request_id: str
) -> None:
    """What was asked, and what it comes to in tokens."""
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    record.fetches = tuple(fetch for prompt in prompts for fetch in prompt.fetches)
    record.describe(
        provider_name="epd",
        request_model=model,
        response_model=model,
        request_id=request_id,
        response_id=request_id,
        request_n=asked.n,
        request_temperature=asked.temperature,
        request_top_p=asked.top_p,
        usage_input_tokens=num_tokens,
        usage_prompt_tokens=num_tokens,
    )
    if asked.max_tokens is not None:
        record.describe(request_max_tokens=asked.max_tokens)
    record.attributes["epd.num_media"] = sum(len(prompt.items) for prompt in prompts)


def describe_answer(record: Record, choices: Sequence[Choice]) -> None:
    """What came of it."""
    num_tokens = sum(choice.num_tokens for choice in choices)
    record.first_token_s = choices[0].first_token_s
    record.num_output_tokens = num_tokens
    record.describe(
        response_finish_reasons=[choice.finish_reason or "error" for choice in choices],
        usage_output_tokens=num_tokens,
        usage_completion_tokens=num_tokens,
    )
