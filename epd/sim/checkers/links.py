"""A connection that carries nothing any more is noticed, and replaced (F48).

Whoever waits for an answer says its word again, and has to find out why none comes.  Words that
nobody answers may wait in it for ever: whoever misses them does so elsewhere.
"""

from __future__ import annotations

from epd.fsm.transfer import Side
from epd.sim.checkers.base import Checker

NOTICED_WITHIN_S = 6.0
UNANSWERED = ("AbortEncode", "AbortRequest", "CancelTransfer", "StageReport", "CacheEvents")


class Links(Checker):
    name = "links"

    def at_rest(self) -> None:
        for link in self.world.network.links.values():
            since_s = link.mute_since_s
            if since_s is None or self.world.loop.now_s < since_s + NOTICED_WITHIN_S:
                continue
            waiting = [parcel.text for parcel in link.held]
            source, target = link.name
            waiting = [text for text in waiting if not text.startswith(UNANSWERED)]
            waiting = [text for text in waiting if not self._is_unasked(target, text)]
            if waiting:
                self.violate(
                    f"{source} to {target} is mute, and nobody noticed: {waiting[0]} waits"
                )

    def _is_unasked(self, target: str, text: str) -> bool:
        """An encoder that the gateway calls off tells the consumer too, whose room may be over by
        then; who waits for a `CancelAck` says its `CancelTransfer` again."""
        kind, _, rest = text.partition(" ")
        node = self.context.cluster.node(target)
        if kind != "CancelAck" or node is None or node.instance is None:
            return False
        room = node.instance.transfers.find(rest.partition("#")[0], Side.CONSUMER)
        return room is None or room.terminal
