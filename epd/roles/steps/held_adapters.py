"""What an instance holds follows the gateway's list of adapters (ADAPTER).

Lists are applied in their order.  A request whose adapter is not listed ends here before the
adapter goes; what the gateway sends of its end may be lost.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Never

from epd.engine.base import HoldsAdapters
from epd.failure import Failure, FailureKind
from epd.fsm.request import AbortReceived, Request
from epd.messages import AdapterList, RequestFailed
from epd.roles.base import Actor, Component, receives
from epd.roles.steps.requests import Requests
from epd.transport.base import Received

MAX_TEXT = 1000  # of a reason in a message (`Where`)


class HeldAdapters(Component[Never]):
    def __init__(
        self, actor: Actor, holders: Sequence[HoldsAdapters], requests: Requests | None
    ) -> None:
        """`holders`: the instance's tower, its language model, or both."""
        super().__init__(actor)
        self._holders = tuple(holders)
        self._requests = requests
        self._taken = (0, 0)  # the last list that came: its gateway's epoch, its serial
        self.listed: AdapterList | None = None  # that list
        self.applied = (0, 0)  # likewise
        self.unheld: tuple[tuple[str, str], ...] = ()  # of that: digest, and why

    @receives(AdapterList)
    def on_list(self, received: Received) -> None:
        message: AdapterList = received.message
        epoch, serial = self._taken
        is_late = received.epoch == epoch and message.serial <= serial
        if is_late or self.actor.is_former(received):
            return
        self._taken = number = received.epoch, message.serial
        self.listed = message
        wanted = {digest: path for digest, path, *_ in message.adapters}
        if (requests := self._requests) is not None:
            for request in requests:
                if request.message.adapter not in {"", *wanted}:
                    self._end(requests, request)
        works = [holder.hold_adapters(wanted) for holder in self._holders]
        self.actor.spawn("adapters", self._follow(number, works), partial(self._done, number))

    async def _follow(
        self, number: tuple[int, int], works: Sequence[Coroutine[object, None, dict[str, str]]]
    ) -> dict[str, str] | None:
        """What cannot be held; None: it could not be applied."""
        try:
            return await _in_turn(works)
        except Exception as error:
            self.actor.fault("adapters", error)
            self._take_again(number)
            return None

    def _take_again(self, number: tuple[int, int]) -> None:
        """The list with this number, when it is repeated; unless a later one has come."""
        if self._taken == number:
            self._taken = number[0], number[1] - 1

    def brought(self) -> tuple[AdapterList | None, int]:
        """The last list, which a new gateway goes on with, and the epoch of whose it is."""
        return self.listed, self._taken[0]

    def _end(self, requests: Requests, request: Request) -> None:
        failure = Failure(FailureKind.UNAVAILABLE, "its adapter was unloaded")
        failed = RequestFailed(
            request_id=request.request_id, attempt=request.attempt, failure=failure
        )
        self.actor.send(request.gateway, failed)
        requests.post(request, AbortReceived())

    def _done(self, number: tuple[int, int], unheld: dict[str, str] | None) -> None:
        if unheld is None:
            return
        told = ((digest, why[:MAX_TEXT]) for digest, why in sorted(unheld.items()))
        self.applied, self.unheld = number, tuple(told)
        for digest, why in self.unheld:
            self.actor.log.warning("an adapter is not held", digest=digest, why=why)


async def _in_turn(works: Sequence[Coroutine[object, None, dict[str, str]]]) -> dict[str, str]:
    """What any of them cannot hold, and why."""
    unheld: dict[str, str] = {}
    try:
        for work in works:
            unheld |= await work
    finally:
        for work in works:  # that was not begun
            work.close()
    return unheld
