"""`--autoscale roles`: instances get other roles by what waits (`scheduling/scaling`)."""

from __future__ import annotations

from collections.abc import Callable

from epd.config import GatewayConfig
from epd.frontend import Refused
from epd.fsm.instance import Instance
from epd.roles.base import Actor
from epd.roles.gateway.dispatch import Dispatcher
from epd.roles.gateway.registry import Registry
from epd.scheduling.predicted_rule import predicted_waits
from epd.scheduling.scaling.role_balance import RoleBalance, RoleLoad

HOLD, APART = 2.0, 6.0  # times as long as until an instance is lost


class RoleMoves:
    """Looks with each heartbeat, while every member takes work."""

    def __init__(
        self,
        actor: Actor,
        registry: Registry,
        dispatcher: Dispatcher,
        config: GatewayConfig,
        drain: Callable[..., None],
    ) -> None:
        self._actor, self._registry, self._dispatcher = actor, registry, dispatcher
        timing, self._max_running = config.timing, config.decode.max_running
        self._within_s = timing.drain_timeout_s
        self._balance = RoleBalance(HOLD * timing.lost_after_s, APART * timing.lost_after_s)
        self._drain = drain
        registry.heartbeat_listeners += (self._look,)

    def _look(self, instance: Instance) -> None:
        members = [one for one in self._registry.instances if one.present]
        if not all(one.takes_work for one in members):
            return
        waits = predicted_waits(self._dispatcher.candidates(), self._max_running)
        roles = {
            o.info.address.instance_id: o.info.roles for o in members if not o.info.other_ranks
        }
        loads = [RoleLoad(name, own, waits[name]) for name, own in roles.items()]
        move = self._balance.look(self._actor.clock.now_s(), loads)
        if move is None:
            return
        log = self._actor.log
        log.info("other roles by what waits", instance=move.instance, roles=move.roles)
        try:
            self._drain(
                move.instance, self._within_s, forced=False, restarts=True, roles=move.roles
            )
        except Refused as refusal:
            log.warning("no other roles", instance=move.instance, reason=refusal.message)
