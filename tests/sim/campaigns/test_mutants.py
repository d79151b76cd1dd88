"""Every bug that is put back is noticed by each drill that claims it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec
import pytest

from epd.fsm.outgoing import Outgoing
from epd.messages import Grant
from epd.roles.prefill.kv_producer import KvProducer
from epd_lab.sim import drills
from epd_lab.sim.campaigns.hunt import noticed
from epd_lab.sim.campaigns.measure import MISSED_BY_FEW, DrillMeasures
from epd_lab.sim.campaigns.runner import SimJob, execute
from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill
from epd_lab.sim.engine.device import Costs
from epd_lab.sim.planes.transfer import DataConditions
from epd_lab.sim.run import run
from epd_lab.sim.swarm.plans import draw_plan
from epd_lab.sim.workload import Workload
from tests.sim.mutants import MUTANTS

MEASURED = DrillMeasures.stored()
NOT_MEASURED = range(20)
BEGINS_ANEW = Drill(
    "begins-anew-in-parts",
    ("F6", "F24"),
    topology="1e1pd2d",
    work=Workload(40, image_share=0.0, max_text=30, max_tokens=120, spread_s=0.2),
    data=DataConditions(jitter_s=0.1, nbytes_per_s=1e5),
    settings=Settings(
        num_blocks=80,
        decode=msgspec.structs.replace(Settings().decode, max_running=32),
        engine=msgspec.structs.replace(
            Settings().engine, max_step_tokens=24, max_chunk_tokens=4, prefix_caching=False
        ),
        costs=Costs(step_base_s=0.04),
    ),
)
"""Who gave way has blocks again while a part is awaited that it left: in few of these runs."""
PAIRS = [(drill.name, mutant) for drill in drills.DRILLS for mutant in drill.mutants]


@pytest.mark.long  # test_checkers.py has a mutant of each checker
@pytest.mark.parametrize(("drill", "mutant"), PAIRS)
def test_mutant_is_caught(drill: str, mutant: str) -> None:
    """In one of the very seeds that are run of the drill; first in those that noticed it before."""
    caught = MEASURED.caught.get((drill, mutant))
    seeds = NOT_MEASURED if caught is None else MEASURED.seeds(drill, MISSED_BY_FEW)
    likely = sorted(seeds, key=lambda seed: seed not in (caught or ()))
    assert any(noticed(execute(SimJob("drill", drill, seed, mutant))) for seed in likely)


def test_drills_name_mutants_that_exist() -> None:
    named = {name for drill in drills.DRILLS for name in drill.mutants}
    assert named == set(MUTANTS)


def test_a_mutant_leaves_no_trace() -> None:
    plan = draw_plan(3)
    before = run(plan).digest
    for manager in MUTANTS.values():
        with manager():
            pass
    assert run(plan).digest == before


def test_blocks_are_held_before_who_gives_way_frees_them() -> None:
    """A step that is settled may cause what the plan of the next one relies on; where the plan came
    first, each seed read KV of another text."""
    assert run(BEGINS_ANEW.plan(0)).violations == []


@pytest.mark.long
def test_a_part_is_read_from_the_blocks_that_who_gave_way_has_left() -> None:
    """Too seldom to be a drill; tests/roles/prefill/test_hand_over.py sees it, too."""
    stage = KvProducer.stage

    async def of_the_request(self: KvProducer, transfer: Outgoing, grant: Grant) -> Any:
        request, held = self._requests.get(transfer.owner), self._held.get(transfer.key, {})
        if request is None or transfer.kv is not None:
            return await stage(self, transfer, grant)
        table = {**held, **dict(enumerate(self._by_place(request.block_table)))}
        with mock.patch.object(self, "_held", {**self._held, transfer.key: table}):
            return await stage(self, transfer, grant)

    plans = [BEGINS_ANEW.plan(seed) for seed in range(20)]
    assert all(run(plan).violations == [] for plan in plans)
    with mock.patch.object(KvProducer, "stage", of_the_request):
        assert any("KV of another text" in str(run(plan).violations) for plan in plans)
