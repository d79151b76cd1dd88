"""Profiling on request: the gateway starts or stops it at every instance, and gets the result.

A recording fills memory, so an instance whose stop is lost ends its own after `MAX_PROFILE_S`.
"""

from __future__ import annotations

from typing import Never

from epd.engine.base import EngineError, Profiler
from epd.messages import ProfileReport, ProfileRequest
from epd.roles.base import Actor, Component, receives
from epd.roles.gateway.registry import Registry
from epd.roles.watching.poll import Poll
from epd.transport.base import Received

MAX_PROFILE_S = 120.0
ANSWER_TIMEOUT_S = 60.0  # a trace of many steps takes its time to be written


class Profiled(Component[Never]):
    """An instance that can be profiled."""

    def __init__(self, actor: Actor, profiler: Profiler) -> None:
        super().__init__(actor)
        self._profiler = profiler

    @receives(ProfileRequest)
    def on_request(self, received: Received) -> None:
        message: ProfileRequest = received.message

        def answer(told: tuple[bool, str]) -> None:
            ok, detail = told
            report = ProfileReport(serial=message.serial, ok=ok, detail=detail)
            self.actor.send(received.source, report)

        if message.starts:
            self.actor.timers.call_later(MAX_PROFILE_S, self._end)
        else:
            self.actor.timers.cancel_call(self._end)
        work = self._start() if message.starts else self._stop()
        self.actor.spawn(f"profile {message.serial}", work, answer)

    async def _start(self) -> tuple[bool, str]:
        try:
            await self._profiler.start()
        except (EngineError, OSError) as error:
            return False, str(error)
        return True, "recording"

    async def _stop(self) -> tuple[bool, str]:
        try:
            return True, await self._profiler.stop()
        except (EngineError, OSError) as error:
            return False, str(error)

    def _end(self) -> None:
        self.actor.spawn(
            "profile end",
            self._stop(),
            lambda told: self.actor.log.warning("nobody ended the profile", trace=told[1]),
        )


class Profiles(Component[Never]):
    """The gateway's side."""

    def __init__(self, actor: Actor, registry: Registry) -> None:
        super().__init__(actor)
        self._poll = Poll[tuple[bool, str]](actor, registry, ANSWER_TIMEOUT_S)

    async def ask(self, *, starts: bool) -> dict[str, tuple[bool, str]]:
        """Start or stop at every instance; by its name whether it did, and a trace or a reason."""
        told, silent = await self._poll.ask(
            lambda serial: ProfileRequest(serial=serial, starts=starts)
        )
        late = f"no answer within {ANSWER_TIMEOUT_S:g} s"
        return told | dict.fromkeys(silent, (False, late))

    @receives(ProfileReport)
    def on_report(self, received: Received) -> None:
        message: ProfileReport = received.message
        self._poll.answered(received, message.serial, (message.ok, message.detail))
