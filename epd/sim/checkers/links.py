"""A connection that carries nothing any more is noticed, and replaced (F48).

Whoever waits for an answer says its word again, and has to find out why none comes.  Words that
nobody answers may wait in it for ever: whoever misses them does so elsewhere.
"""

from __future__ import annotations

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
            waiting = [text for text in waiting if not text.startswith(UNANSWERED)]
            if waiting:
                source, target = link.name
                self.violate(
                    f"{source} to {target} is mute, and nobody noticed: {waiting[0]} waits"
                )
