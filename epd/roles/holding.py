"""What a process keeps from one life to the next: its settings, with its roles, and its engines.

Roles change between two lives.  Weights that both role sets need stay; what the new one lacks is
loaded, and memory is planned anew.  Until the new life is welcomed it is on trial: weights of the
former one stay, too.  When loading, the self-test or the join fails, the next life has the former
roles again, and sends the reason."""

from __future__ import annotations

from epd.config import InstanceConfig
from epd.errors import explain
from epd.roles.compose import Engines

MAX_REASON = 500  # characters


class Holding:
    """Of one process."""

    def __init__(self, config: InstanceConfig, engines: Engines) -> None:
        self.config, self.engines = config, engines
        self.asked: tuple[str, ...] = ()  # roles that the next life is to have
        self._anew = engines.anew
        self._former: InstanceConfig | None = None  # of the life before, while this is on trial
        self._failure = ""  # of the trial

    def ask(self, roles: tuple[str, ...]) -> None:
        """The first request counts."""
        self.asked = self.asked or roles

    @property
    def is_on_trial(self) -> bool:
        return self._former is not None

    def fail(self, reason: str) -> None:
        """This life, which is on trial, cannot serve."""
        self._failure = reason

    def settle(self) -> bool:
        """It serves; whether it was on trial, and has its roles for good now."""
        was_on_trial, self._former = self.is_on_trial, None
        if was_on_trial and self.engines.forget is not None:
            self.engines.forget()
        return was_on_trial

    async def renew(self) -> None:
        """Make it what the next life is to have.  Raises what loading for former roles raises."""
        roles, self.asked = self.asked, ()
        if roles:
            self._former = self.config
            try:
                await self._load(self.config.having(roles))
            except Exception as error:
                self._failure = explain(error)[1]
        if self._former is not None and self._failure:
            tried = ", ".join(roles or self.config.roles)
            reason = f"it cannot have the roles {tried}: {self._failure}"[:MAX_REASON]
            self._failure = ""
            await self._load(self._former.having(self._former.roles, reason))
            self.settle()

    async def _load(self, config: InstanceConfig) -> None:
        assert self._anew is not None
        self.engines = Engines()  # memory of the former ones is planned anew
        self.engines = await self._anew(config)
        self.config = config
