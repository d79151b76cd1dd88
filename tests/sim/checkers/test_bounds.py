"""Every number of the configuration that bounds something is compared with what is held.

`test_a_bound_that_roles_ignore_is_noticed` is the mutant of each of them: roles are given a loose
setting, and the checkers are told the tight one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from epd import config
from epd.setting import settings
from epd_lab.sim import checkers, drills
from epd_lab.sim.checkers import durations
from epd_lab.sim.checkers.memory import bounds, unseen
from epd_lab.sim.cluster import Cluster, Settings
from epd_lab.sim.drills.drill import Drill
from epd_lab.sim.faults import Fault
from epd_lab.sim.run import run
from epd_lab.sim.workload import Workload
from epd_lab.sim.world import World

NUMBERS = {one.key for one in settings(config.Settings) if one.type in {int, float}}
LASTING = {lasts.setting for lasts in durations.LASTS}
LOOKED_AT = (NUMBERS & set(bounds.BOUNDS)) | LASTING
MAX_SEEDS = 12
WORK = Workload(12, max_tokens=48)
DRAINED = Drill("drained", (), topology="1e1p2d", work=WORK, faults=(Fault("drain", "d0"),))

# By setting: the drill in which it is reached, what roles are given, what the checkers are told.
IGNORED: dict[str, tuple[str, Any, Any]] = {
    "limits.max_open_requests": ("two-hundred-at-once", 64, 8),
    "encode.max_queue": ("small-pool", 64, 4),
    "prefill.max_queue": ("small-pool", 64, 4),
    "decode.max_queue": ("few-blocks-at-decode", 64, 4),
    "prefill.pool_nbytes": ("small-pool", None, 256),
    "prefill.min_early_tokens": ("late-images", 1, 64),
    "timing.max_attempts": ("sick-encode", 4, 1),
    "engine.max_step_tokens": ("quiet", 48, 8),
    "engine.max_chunk_tokens": ("quiet", 16, 4),
    "decode.max_running": ("few-blocks-at-decode", 16, 2),
    "engine.speculative.num_speculative_tokens": ("drafts", 5, 2),
    "encode.max_batch_patches": ("small-pool", 64, 8),
    "encode.cache_device_nbytes": ("cache-tiers", 4096, 1),
    "encode.cache_host_nbytes": ("cache-tiers", 4096, 1),
    "encode.send_buffer_nbytes": ("small-send-ring", None, 1),
    "encode.pixels_nbytes": ("few-pixels-at-a-time", 200, 50),
    "prefill.max_slots_share_per_peer": ("small-pool", 1.0, 0.1),
    "encode.max_send_share_per_peer": ("small-send-ring", 1.0, 0.1),
    "timing.accept_timeout_s": ("deaf-prefill", 1.0, 0.5),
    "timing.abort_timeout_s": ("cancel-mid-transfer", 1.0, 0.0001),
    "timing.topology_timeout_s": ("lose-the-only-prefill", 15.0, 0.1),
    "timing.kv_lease_s": ("proxy-dies-between-stages", 1.0, 0.1),
    "timing.link_timeout_s": ("mute-to-encode", 1.0, 0.3),
    "timing.suspect_after_s": ("kill-encode", 1.0, 0.5),
    "timing.lost_after_s": ("stall-encode", 2.0, 1.5),
    "timing.drain_timeout_s": ("drained", 3.0, -4.0),
    "encode.cache_load_timeout_s": ("cache-tiers", 2.0, 0.0001),
    "prefill.rows_timeout_s": ("hung-encode-is-left", 0.5, 0.2),
}


def _changed(settings: Any, path: str, value: Any) -> Any:
    head, _, rest = path.partition(".")
    new = _changed(getattr(settings, head), rest, value) if rest else value
    change = replace if isinstance(settings, Settings) else msgspec.structs.replace
    return change(settings, **{head: new})


def test_every_number_is_looked_at_or_has_a_reason() -> None:
    lists = (LOOKED_AT, set(unseen.ELSEWHERE), set(unseen.NOT_SEEN))
    named = set().union(*lists)
    assert named == NUMBERS
    assert sum(map(len, lists)) == len(named), "in two lists"
    assert all(unseen.NOT_SEEN.values())
    assert set(unseen.ELSEWHERE.values()) <= {checker.name for checker in checkers.ALL}


QUICK = {"engine.max_step_tokens", "timing.lost_after_s"}  # one of each checker


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, marks=() if setting in QUICK else pytest.mark.long)
        for setting in sorted(LOOKED_AT)
    ],
)
def test_a_bound_that_roles_ignore_is_noticed(setting: str) -> None:
    name, given, told = IGNORED[setting]
    drill = DRAINED if name == DRAINED.name else drills.by_name(name)

    def prepare(world: World, cluster: Cluster) -> None:
        if given is not None:
            cluster.settings = _changed(drill.settings, setting, given)
        else:
            cluster.settings = drill.settings

    for seed in range(MAX_SEEDS):
        plan = drill.plan(seed)
        plan = replace(plan, settings=_changed(plan.settings, setting, told))
        found = run(plan, prepare=prepare).violations
        if any(setting in text for text in found):
            return
    pytest.fail(f"nobody noticed in {name}")
