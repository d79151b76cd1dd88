"""Reports what the engines of an instance have at hand (`hands.py`) to its gateways."""

from __future__ import annotations

from typing import Never

from epd.messages import AtHand
from epd.records import HandsList
from epd.roles.base import Actor, Component


class HandsReport(Component[Never]):
    """Reports the list, to each: it may hold requests of all of them."""

    def __init__(self, actor: Actor) -> None:
        super().__init__(actor)
        self._serial = 0
        actor.hands.on_taken = self._tell

    def live(self) -> dict[str, int]:
        hands = self.actor.hands
        return {"at_hand": len(hands.images) + len(hands.requests)}

    def report(self) -> HandsList:
        """As it is now."""
        self._serial += 1
        hands = self.actor.hands
        return HandsList(serial=self._serial, images=hands.images, requests=hands.requests)

    def _tell(self) -> None:
        self.actor.tell_gateways(AtHand(hands=self.report()))
