"""A connection that carries nothing any more is noticed, and replaced (F48).

A process that waits for an answer repeats its message, and has to find out why none comes.
Messages without an answer may wait in it for ever, as may those of a room that ends too soon for a
repeat.
"""

from __future__ import annotations

from epd_lab.sim.checkers.base import Checker
from epd_lab.sim.planes.network import Link, Parcel

NOTICED_WITHIN_S = 6.0
UNANSWERED = ("AbortEncode", "AbortRequest", "CancelTransfer", "StageReport", "CacheEvents")


class Links(Checker):
    name = "links"

    def at_rest(self) -> None:
        for link in self.world.network.links.values():
            since_s = link.mute_since_s
            if since_s is None or self.world.loop.now_s < since_s + NOTICED_WITHIN_S:
                continue
            waiting = [parcel for parcel in link.held if not parcel.text.startswith(UNANSWERED)]
            waiting = [parcel for parcel in waiting if not self._is_unasked(link, parcel)]
            if waiting:
                source, target = link.name
                self.violate(
                    f"{source} to {target} is mute, and nobody noticed: {waiting[0].text} waits"
                )

    def _is_unasked(self, link: Link, parcel: Parcel) -> bool:
        """Whether no process waits for an answer.

        An encoder that the gateway calls off sends that to the consumer too, whose room may be over
        by then; for a `CancelAck` the `CancelTransfer` is repeated.  An abort is for a consumer
        with a room, which repeats its `Grant`; where the offer waits, too, there is none.  Offers
        and grants are repeated while their rooms are open, and doubt the link as soon as no echo is
        trusted: only a room that ended before that misses nothing.
        """
        source, target = link.name
        key = parcel.text.partition(" ")[2].partition("#")[0]
        if parcel.kind in ("CancelAck", "TransferAborted"):
            return self._is_over(target, key, "incoming")
        if parcel.kind == "CommitAck":  # who waits for it says its `Commit` again
            return self._is_over(target, key, "outgoing")
        if parcel.kind in ("KvOffer", "Grant"):
            timing = self.context.cluster.settings.timing
            said_for_s = (parcel.occurrence - 1) * timing.retry_interval_s
            is_brief = said_for_s <= timing.link_timeout_s / 2
            end = "outgoing" if parcel.kind == "KvOffer" else "incoming"
            return is_brief and self._is_over(source, key, end)
        return False

    def _is_over(self, name: str, key: str, end: str) -> bool:
        node = self.context.cluster.node(name)
        if node is None or node.instance is None:
            return False
        room = getattr(node.instance, end).find(key)
        return room is None or room.terminal
