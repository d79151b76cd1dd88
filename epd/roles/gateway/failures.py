"""The sentence that the client gets of a failure, and the line that the log has.

A client gets what it can act on, in a sentence made for it. The error of an engine, a library or
a transfer may name files and addresses of this host. It goes only into the log, one line per
request, under the id that the client has. When everything fails at once the log stays readable:
lines beyond `MAX_LINES_PER_S` are left out, and counted in one line afterwards.
"""

from __future__ import annotations

from epd.failure import Failure, FailureKind
from epd.frontend import GenerationError
from epd.fsm.generation import Generation
from epd.roles.base import Actor

MAX_LINES_PER_S = 10

# Kinds whose reasons are not words of ours.
SENTENCES = {
    FailureKind.CONTRACT: "instances do not agree on what they exchange",
    FailureKind.ENGINE: "an engine failed",
    FailureKind.RULES: "what is asked for leaves no token that may follow",
    FailureKind.TRANSFER: "a transfer between instances failed",
    FailureKind.INTERNAL: "internal error",
    FailureKind.POISON: "instances ended while they computed it, so it is not tried again",
}


def is_mistake(failure: Failure) -> bool:
    """Whether it is the request that is wrong, wherever it is sent."""
    return failure.kind.status == 400


def error_of(machine: Generation) -> GenerationError:
    """The error in its client's answer."""
    failure = machine.failure
    assert failure is not None  # whatever orders an answer has said why
    kind, reason, status = failure.kind, failure.reason, failure.kind.status
    if status == 500 or kind in SENTENCES:
        sentence = SENTENCES.get(kind, SENTENCES[FailureKind.INTERNAL])
        reason = f"{sentence}; the server's log has the reason"
    is_retryable = status in (429, 503)
    return GenerationError(kind, reason, status, is_retryable, machine.retry_after_s)


class FailureLog:
    """A line for each request that failed by a fault of ours, up to a rate."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._num_told = 0
        self._num_left_out = 0

    def tell(self, machine: Generation) -> None:
        if not self._actor.timers.will_call(self._tell_rest):
            self._actor.timers.call_later(1.0, self._tell_rest)
        self._num_told += 1
        if self._num_told > MAX_LINES_PER_S:
            self._num_left_out += 1
            return
        assert machine.failure is not None  # as above
        placement = machine.placed
        fields: dict[str, object] = {
            "request": machine.key,
            "kind": machine.failure.kind.value,
            "reason": machine.failure.reason,
            "attempts": machine.attempt,
            "instances": ",".join(sorted(placement.instances())) if placement else "",
            "output_tokens": len(machine.token_ids),
        }
        if machine.cause:
            fields["after"] = machine.cause
        if machine.stream.client_request_id:
            fields["client_request"] = machine.stream.client_request_id
        self._actor.log.warning("request failed", **fields)

    def _tell_rest(self) -> None:
        if self._num_left_out:
            self._actor.log.warning("more requests failed", count=self._num_left_out)
        self._num_told = self._num_left_out = 0
