"""Without faults, a first token comes within the time of its own work and of the work beside it.

The bound is computed: the engines' charges for the request and for all that are open between its
arrival and its first token, one after the other.  All bytes over one link, and the messages on its
way, are added.  A clock that has to end a wait (a retry, a time-out) is no part of it.
"""

from __future__ import annotations

from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.client import Record
from epd_lab.sim.engine import golden
from epd_lab.sim.engine.engines import BLOCK_NBYTES
from epd_lab.sim.engine.hash_states import layout_of
from epd_lab.sim.planes.storage import DiskConditions
from epd_lab.sim.workload import Ask

START_S = 1.0  # before, instances are joining
NUM_MESSAGES = 14  # from asking to the first token, and few of them are slow
NUM_SLOW = 3
NUM_WRITES = 4  # of one room: KV goes in parts


class FirstToken(Checker):
    name = "first token"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._network = context.world.network.conditions  # until the world heals
        self._data = context.world.fabric.conditions
        self._most_ranks = context.cluster.groups.most_ranks
        self._is_sound = context.cluster.disk.conditions == DiskConditions()

    def at_end(self) -> None:
        if not self.context.undisturbed or not self._is_sound:
            return
        records = [r for r in self.context.clients.records if r.request_id and not r.ask.drives]
        costs = {id(record): self._work_s(record.ask) for record in records}
        for record in records:
            if record.asked_s < START_S or not record.first_s:
                continue
            took_s = record.first_s - record.asked_s
            since_s, until_s = record.asked_s, record.first_s
            beside = (r for r in records if r.asked_s < until_s and r.ended_s > since_s)
            limit_s = self._way_s() + sum(costs[id(other)] for other in beside)
            if took_s > limit_s:
                self._tell(record, took_s, limit_s)

    def _tell(self, record: Record, took_s: float, limit_s: float) -> None:
        self.violate(
            f"request {record.ask.index} ({record.request_id}) had its first token after "
            f"{took_s:.3f} s, and all the work there was takes {limit_s:.3f} s"
        )

    def _way_s(self) -> float:
        """Of the messages; each may be slow, and few are."""
        one_s = self._network.delay_s + self._network.jitter_s
        return NUM_MESSAGES * one_s + NUM_SLOW * self._network.slow_s

    def _work_s(self, ask: Ask) -> float:
        """All that it costs, with nothing shared and nothing at the same time."""
        settings, data = self.context.cluster.settings, self._data
        costs = settings.costs
        token_ids, placed = ask.placed()
        work_s = 0.0
        layout = layout_of(0, 1, has_state=False, window=settings.window)
        nbytes = layout.rows.count(len(token_ids)) * layout.block_nbytes
        if settings.has_state:  # of which each rank has blocks, and may fetch and land them apart
            nbytes += golden.NUM_STATE_BLOCKS * BLOCK_NBYTES * self._most_ranks
            work_s += 2 * costs.copy_s
        for _, image in placed:
            patches = image.grid_thw[0] * image.grid_thw[1] * image.grid_thw[2]
            encode_s = costs.encode_base_s + patches * costs.encode_per_patch_s
            work_s += costs.preprocess_s + encode_s * (20 if image.flaw == "slow" else 1)
            work_s += 3 * costs.copy_s
            nbytes += image.num_rows * golden.ROW_NBYTES
        num_steps = 2 + len(token_ids) // settings.engine.max_chunk_tokens
        num_steps += ask.max_tokens + 2 * settings.has_state  # a chunk ends where one is kept
        num_steps += 2 * len(placed) * bool(settings.max_uncut)  # and around each image
        work_s += num_steps * costs.step_base_s
        work_s += (len(token_ids) + ask.max_tokens) * costs.step_per_token_s
        num_rooms = len(placed) + 1
        writes_s = num_rooms * NUM_WRITES * (data.latency_s + data.jitter_s)
        return work_s * (1 + costs.jitter) + writes_s + nbytes / data.nbytes_per_s
