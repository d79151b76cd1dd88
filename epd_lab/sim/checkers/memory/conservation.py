"""Invariant 4: at quiescence nothing is owned: slots, blocks, references, promises, transfers,
timers, tasks.  Memory must be back soon after the last answer, not only when deadlines pass
(F43), whatever messages were lost on the way.  During the run the pools themselves raise when their
books do not balance."""

from __future__ import annotations

from epd_lab.sim.checkers.base import Checker
from epd_lab.sim.cluster import HOUSEKEEPING, MEMBERSHIP
from epd_lab.sim.lives import Node


class Conservation(Checker):
    name = "conservation"

    def at_rest(self) -> None:
        for node in self.context.cluster.living():
            if live := node.live():
                self.violate(f"{node.process.name} owns {live} though every request is answered")

    def at_end(self) -> None:
        for node in self.context.cluster.living():
            live = node.live()
            if live:
                self.violate(f"{node.process.name} still owns {live}")
            if tasks := node.tasks():
                self.violate(f"{node.process.name} still runs {sorted(tasks)[:5]}")
            kept = MEMBERSHIP if self.context.cluster.waited_out else HOUSEKEEPING
            if timers := node.timers(kept):
                self.violate(f"{node.process.name} still has timers {sorted(timers)[:5]}")
            self._pools(node)

    def _pools(self, node: Node) -> None:
        requests = node.instance.requests if node.instance is not None else None
        if requests is not None and requests.pool.num_leased:
            pool = requests.pool
            self.violate(f"{node.process.name}: {pool.num_leased} of {pool.size} blocks leaked")
