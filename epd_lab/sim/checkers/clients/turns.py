"""Keys take turns: while one has a request in the queue, no other gets much more of the instances.

By what requests cost here, not by what the gateway believes.  Who is refused is refused at once,
and most of those who come back at their time find a place, and have a token in time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from math import prod

from epd.fsm import generation
from epd.fsm.kernel import Event, Machine, State
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.core.process import SimProcess

LEAVES = (
    generation.Placed, generation.NoTopology, generation.TopologyUnknown, generation.PoisonFound,
    generation.CancelRequested, generation.Refused, generation.Abandoned, generation.LateFound,
    generation.TokenTimedOut, generation.DeadlinePassed,
)  # fmt: skip
Who = tuple[str, str]  # process and key
IN_VAIN = 1 / 3  # of those who come back: what a place is held for is learnt
LATE = 0.2  # of those who would come back, and were let in: predictions err
MOST = 4  # times the largest request: those at hand, and a round
AT_ONCE_S = 0.25


class Turns(Checker):
    name = "turns"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        context.world.watch(self._watch, generation.Prepared, *LEAVES)
        self._waiting: Counter[Who] = Counter()
        self._behind_s: defaultdict[Who, defaultdict[Who, float]] = defaultdict(
            lambda: defaultdict(float)
        )
        self._largest_s = 0.0

    def _watch(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if not isinstance(machine, generation.Generation) or target is source:
            return
        who = process.name, machine.who
        if target is generation.S.QUEUED:
            self._waiting[who] += 1
            self._largest_s = max(self._largest_s, self._cost_s(machine))
        elif source is generation.S.QUEUED:
            self._leaves(who, self._cost_s(machine) * (target is generation.S.PLACED))

    def _leaves(self, who: Who, cost_s: float) -> None:
        self._waiting[who] -= 1
        for key, waiting in self._waiting.items():
            if waiting and key != who and key[0] == who[0]:
                self._behind_s[key][who] += cost_s
                self._check(key, who)
            self._behind_s[who][key] = max(0.0, self._behind_s[who][key] - cost_s)
        if not self._waiting[who]:
            self._behind_s[who].clear()

    def _check(self, key: Who, who: Who) -> None:
        more_s, most_s = self._behind_s[key][who], MOST * self._largest_s
        if more_s > most_s:
            self._behind_s[key].clear()
            self.violate(
                f"{who[1]!r} got {more_s:.2f} s more than {key[1]!r}, which was waiting; the "
                f"largest request costs {self._largest_s:.2f} s"
            )

    def _cost_s(self, machine: generation.Generation) -> float:
        costs, prompt = self.context.cluster.settings.costs, machine.prompt
        num_patches = sum(prod(item.grid_thw) for item in prompt.items)
        tokens_s = costs.step_per_token_s * len(prompt.token_ids)
        return costs.encode_per_patch_s * num_patches + costs.step_base_s + tokens_s

    def at_end(self) -> None:
        records = self.context.clients.records
        num_back = sum(record.num_refused > 0 for record in records if record.ask.num_returns)
        num_in_vain = sum(max(0, record.num_refused - 1) for record in records)
        if num_in_vain > IN_VAIN * num_back + 2:
            self.violate(f"{num_in_vain} of {num_back} came back when they were told to, in vain")
        late = [
            r.error is not None and r.error.kind == "deadline" for r in records if r.ask.num_returns
        ]
        if sum(late) > LATE * len(late):
            self.violate(f"{sum(late)} of {len(late)} were let in, and had no token in time")
        for record in records:
            if record.error is None or record.error.kind != "overloaded":
                continue
            if record.ended_s - record.asked_s > AT_ONCE_S and not record.ask.limits:
                self.violate(f"{record.request_id} was refused late: {record.error.message}")
