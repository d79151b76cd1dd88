"""How long slices of a tower's run are, by what they and steps cost."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from epd.scheduling.slice_cost import SHARE, SliceCost
from epd.scheduling.step_cost import MIN_SEEN, RECENT_S

NUM_LAYERS, QUANTUM_S = 24, 0.010
LARGE, SMALL = 8160, 1225  # patches of an image
patch_costs = st.floats(1e-9, 1e-5)  # in a layer
steps = st.floats(1e-4, 1.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def started(patch_s: float, quantum_s: float = QUANTUM_S, clock: Clock | None = None) -> SliceCost:
    """With runs of one large image, as an engine starts."""
    cost = SliceCost(NUM_LAYERS, quantum_s, clock or Clock())
    for _ in range(4):
        cost.observe(LARGE, LARGE, NUM_LAYERS, patch_s * LARGE * NUM_LAYERS)
    return cost


def serve(cost: SliceCost, patch_s: float, num_runs: int, largest: int = LARGE) -> int:
    """So many runs, in the slices that it says; those of the next one."""
    for _ in range(num_runs):
        each = -(-NUM_LAYERS // cost.num_slices(LARGE, largest))
        for first in range(0, NUM_LAYERS, each):
            count = min(each, NUM_LAYERS - first)
            cost.observe(LARGE, largest, count, patch_s * LARGE * count)
    return cost.num_slices(LARGE, largest)


def let_in(cost: SliceCost, step_s: float) -> None:
    for _ in range(int(MIN_SEEN) + 2):
        cost.between.observe(1, step_s)


@given(patch_s=patch_costs, step_s=steps)
def test_streams_wait_for_a_quantum_or_a_share_of_a_step(patch_s: float, step_s: float) -> None:
    """Or for one layer, which is not cut; and a slice less would be too few."""
    cost = started(patch_s)
    let_in(cost, step_s)
    most_s = max(QUANTUM_S, SHARE * step_s) * (1 + 1e-9)
    num_slices, layer_s = cost.num_slices(LARGE, LARGE), patch_s * LARGE
    each = -(-NUM_LAYERS // num_slices)
    assert each == 1 or each * layer_s <= most_s
    if num_slices > 1:
        assert -(-NUM_LAYERS // (num_slices - 1)) * layer_s > most_s * (1 - 1e-6)


@given(patch_s=patch_costs, step_s=steps)
def test_images_wait_for_a_multiple_of_their_own_time(patch_s: float, step_s: float) -> None:
    """And one step, however long steps are."""
    cost = started(patch_s)
    let_in(cost, step_s)
    waits_s = cost.num_slices(LARGE, LARGE) * step_s
    layer_s = patch_s * LARGE
    assume(2 * layer_s < SHARE * step_s)
    assert waits_s <= step_s + 2 * layer_s * NUM_LAYERS / SHARE * (1 + 1e-9)


@given(patch_s=patch_costs, busy=st.floats(1.0, 20.0))
def test_a_busy_start_is_over_when_the_load_is(patch_s: float, busy: float) -> None:
    """Whatever the card was doing: slices end up as those of a start alone, give or take a
    layer."""
    cost = started(busy * patch_s)
    found, alone = serve(cost, patch_s, 200), started(patch_s).num_slices(LARGE, LARGE)
    near = {started(patch_s * near).num_slices(LARGE, LARGE) for near in (0.98, 1.02)}
    assert min(near) <= found <= max(near) and min(near) <= alone <= max(near)


@given(patch_s=patch_costs, busy=st.floats(1.0, 20.0))
def test_a_load_that_comes_later_makes_slices_shorter(patch_s: float, busy: float) -> None:
    cost = started(patch_s)
    found = serve(cost, busy * patch_s, 200)
    near = [started(busy * patch_s * near).num_slices(LARGE, LARGE) for near in (0.9, 1.02)]
    assert near[0] <= found <= near[1]


def test_sizes_are_followed_apart() -> None:
    """Small images are cheap by the patch, and make no slice of a large one too long."""
    patch_s = QUANTUM_S / LARGE / 8.5
    cost = started(patch_s)
    assert cost.num_slices(LARGE, SMALL) == cost.num_slices(LARGE, LARGE) == 3
    assert serve(cost, patch_s / 2.5, 10, SMALL) == 2
    assert cost.num_slices(LARGE, LARGE) == 3
    assert cost.patch_s == pytest.approx(patch_s * NUM_LAYERS), "of large ones"


def test_long_steps_count_while_their_cost_is_sure() -> None:
    clock = Clock()
    cost = started(QUANTUM_S / LARGE / 8.5, clock=clock)
    for _ in range(int(MIN_SEEN)):
        cost.between.observe(1, 8 * QUANTUM_S)
    assert cost.quantum_s == QUANTUM_S, "they are few"
    let_in(cost, 8 * QUANTUM_S)
    assert cost.quantum_s == pytest.approx(SHARE * 8 * QUANTUM_S)
    assert cost.num_slices(LARGE, LARGE) == 2
    clock.now_s += RECENT_S + 1
    assert cost.quantum_s == QUANTUM_S, "they are old"


def test_what_is_not_measured_or_has_no_quantum_stays_whole() -> None:
    cost = SliceCost(NUM_LAYERS, QUANTUM_S, Clock())
    assert cost.num_slices(LARGE, LARGE) == 1 and not cost.patch_s
    whole = started(1.0, quantum_s=0.0)
    let_in(whole, 1.0)
    assert whole.num_slices(LARGE, LARGE) == 1 and not whole.quantum_s
    assert whole.patch_s == pytest.approx(NUM_LAYERS)
