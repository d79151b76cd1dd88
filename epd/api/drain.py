"""`POST /drain`: an operator has one instance take no new work, and leave; `POST /role`: and return
with other roles.

It answers at once; `/ready` and `/state` show how far it is.  Strangers may not ask: beyond this
host it takes a key, or certificates, as `/state` does.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from msgspec import Meta

from epd.api.http.access import warning
from epd.api.http.body import Intake
from epd.api.http.errors import ApiError
from epd.api.http.exchange import Exchange
from epd.api.http.shapes import Shape, read_shape
from epd.config import GatewayConfig
from epd.frontend import Frontend, Refused
from epd.topology import ROLES, Roles

OFF = "instances do not drain for whoever comes: set an API key, or listen on 127.0.0.1"


class Leaving(Shape, kw_only=True):
    instance: Annotated[str, Meta(min_length=1, max_length=120)]
    within_s: Annotated[float, Meta(ge=0, le=86400)] | None = None
    force: bool = False


class DrainBody(Leaving, kw_only=True):
    restart: bool = False


class RoleBody(Leaving, kw_only=True):
    roles: Annotated[list[Literal["encode", "prefill", "decode"]], Meta(min_length=1, max_length=3)]


Body = TypeVar("Body", bound=Leaving)


class DrainVerb:
    """Over one gateway."""

    def __init__(self, frontend: Frontend, config: GatewayConfig, intake: Intake) -> None:
        self._frontend = frontend
        self._default_s = config.timing.drain_timeout_s
        self._intake = intake
        self._is_off = bool(warning(config.host, config.access))

    async def ask(self, exchange: Exchange) -> None:
        """Raises ApiError, ClientGone."""
        asked = await self._read(exchange, DrainBody)
        await self._drain(exchange, asked, (), restarts=asked.restart)

    async def ask_role(self, exchange: Exchange) -> None:
        """Raises ApiError, ClientGone."""
        asked = await self._read(exchange, RoleBody)
        roles = tuple(role for role in ROLES if role in asked.roles)
        await self._drain(exchange, asked, roles, restarts=True)

    async def _read(self, exchange: Exchange, shape: type[Body]) -> Body:
        if self._is_off:
            raise ApiError(403, OFF, code="drains_are_off")
        body = await exchange.read_json(self._intake, self._intake.limits.read_timeout_s)
        return read_shape(body, shape)

    async def _drain(
        self, exchange: Exchange, asked: Leaving, roles: Roles, *, restarts: bool
    ) -> None:
        name = asked.instance
        within_s = self._default_s if asked.within_s is None else asked.within_s
        try:
            self._frontend.drain(name, within_s, forced=asked.force, restarts=restarts, roles=roles)
        except Refused as refusal:
            raise ApiError(refusal.status, refusal.message, param="instance") from None
        await exchange.respond_json(200, {"instance": name, "within_s": within_s})
