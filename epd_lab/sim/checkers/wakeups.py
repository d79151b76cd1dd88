"""Nobody waits on a wake-up that was due.

Whoever waits in a role is woken in the very callback in which its condition came true, or by one
that is ready then.  So while nothing happens in the whole world, nobody may wait whose condition
holds (`waiters`): the wake-up was forgotten, and a later event would only hide it.
"""

from __future__ import annotations

from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.checkers.waiters import overlooked
from epd_lab.sim.wedges import wedged


class WakeUps(Checker):
    name = "wake-ups"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._told: set[str] = set()
        context.world.loop.on_idle.append(self._look)

    def _look(self) -> None:
        for node in self.context.cluster.living():
            if node.process.stalled or node.actor.closing or wedged(node.instance):
                continue
            for text in overlooked(node):
                told = f"{node.process.name}: {text}"
                if told not in self._told:
                    self._told.add(told)
                    self.violate(told)

    def at_end(self) -> None:
        self._look()
