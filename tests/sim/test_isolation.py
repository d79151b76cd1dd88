"""What requests with images cost others, and what waiting for images costs themselves.

On virtual time with a cost model, so that ratios are exact and the same on every machine.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from statistics import quantiles

import msgspec
import pytest

from epd.config import EncodeConfig, EngineConfig
from epd.roles.steps import record as roles_record
from epd_lab.sim.client import Clients, Record
from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import NOTHING
from epd_lab.sim.engine.device import Costs
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.engine.sampler import FIRST_WORD
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.network import Conditions
from epd_lab.sim.planes.transfer import DataConditions
from epd_lab.sim.run import Plan, run
from epd_lab.sim.workload import Ask

EXACT = Costs(jitter=0.0)
ROOMY = replace(Settings(), num_blocks=4096, costs=EXACT)


def text(length: int, first: int) -> tuple[int, ...]:
    return tuple(FIRST_WORD + (first * 31 + n) % 900 for n in range(length))


def play(
    topology: str, asks: list[Ask], settings: Settings, faults: tuple[Fault, ...] = ()
) -> list[Record]:
    steady = Conditions(slow_share=0.0)  # or the slowest messages are what a percentile shows
    plan = Plan(1, topology, tuple(asks), faults, steady, DataConditions(), settings, NOTHING)
    result = run(plan)
    assert not result.violations, result.violations[:3]
    return result.records


def ttft_s(record: Record) -> float:
    return record.first_s - record.asked_s


# --- overlap --------------------------------------------------------------------------------------


def with_images(num_text: int, num_images: int, tag: str) -> Ask:
    """Images of 16 patches, evenly spread over the text."""
    spots = [num_text * n // num_images for n in range(num_images)]
    images = [(at, Image(f"{tag}{n}", (1, 4, 4))) for n, at in enumerate(spots)]
    return Ask(0, 1.0, text(num_text, 3), tuple(images), max_tokens=2)


@pytest.mark.parametrize(
    ("encode_s", "token_s"), [(0.2, 0.0002), (0.02, 0.002)], ids=["slow encode", "slow prefill"]
)
def test_encoding_overlaps_the_prompt(encode_s: float, token_s: float) -> None:
    """Four images, one after the other, in a prompt of 400 tokens: TTFT is the longer one."""
    costs = replace(EXACT, encode_base_s=encode_s, encode_per_patch_s=0.0, step_per_token_s=token_s)
    settings = replace(
        ROOMY,
        costs=costs,
        encode=EncodeConfig(max_queue=64, max_batch_patches=16),
        engine=EngineConfig(max_step_tokens=512, max_chunk_tokens=64),
    )
    prompt, *_ = play("1e1p1d", [with_images(400, 1, "only")], settings)
    whole, *_ = play("1e1p1d", [with_images(400, 4, "all")], settings)
    encode_path_s = 4 * encode_s
    prefill_path_s = ttft_s(prompt) - encode_s
    late = msgspec.structs.replace(settings.prefill, min_early_tokens=1 << 30)
    waits, *_ = play("1e1p1d", [with_images(400, 4, "all")], replace(settings, prefill=late))
    assert ttft_s(whole) <= 1.15 * max(encode_path_s, prefill_path_s)
    assert ttft_s(waits) > 1.05 * ttft_s(whole)


# --- isolation ------------------------------------------------------------------------------------


def streams() -> list[Ask]:
    """Sixteen text streams of 200 tokens each."""
    return [
        Ask(n, 1.0 + 0.01 * n, text(20, n), max_tokens=200, stops_at_eos=False) for n in range(16)
    ]


def bursts() -> list[Ask]:
    """Four requests of four images each, five times."""
    return [
        Ask(
            100 + n,
            1.2 + 0.1 * (n // 4),
            text(20, 50 + n),
            tuple((5 * i, Image(f"burst{n}.{i}", (1, 8, 8))) for i in range(4)),
            max_tokens=4,
        )
        for n in range(20)
    ]


def itl_p99_s(
    topology: str, asks: list[Ask], monkeypatch: pytest.MonkeyPatch, quantum_ms: float = 0.0
) -> float:
    """Of the sixteen streams."""
    times: dict[int, list[float]] = defaultdict(list)
    take = Clients._take

    def timed(self: Clients, record: Record, update: object) -> None:
        take(self, record, update)
        if record.ask.index < 16 and getattr(update, "token_ids", ()):
            times[record.ask.index].append(self._loop.now_s)

    monkeypatch.setattr(Clients, "_take", timed)
    pool_nbytes = 1 << 20
    prefill = msgspec.structs.replace(ROOMY.prefill, pool_nbytes=pool_nbytes)
    engine = msgspec.structs.replace(ROOMY.engine, max_quantum_ms=quantum_ms)
    play(topology, asks, replace(ROOMY, prefill=prefill, engine=engine))
    monkeypatch.undo()
    gaps = [b - a for seen in times.values() for a, b in pairwise(seen)]
    return quantiles(gaps, n=100)[98]


def test_bursts_of_images_do_not_slow_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 1e1p1d the streams hardly notice; on 1epd they share the device, and do."""
    ratio = {
        topology: itl_p99_s(topology, streams() + bursts(), monkeypatch)
        / itl_p99_s(topology, streams(), monkeypatch)
        for topology in ("1e1p1d", "1epd")
    }
    assert ratio["1e1p1d"] <= 1.15
    assert ratio["1epd"] > 1.3


def test_quanta_bound_what_images_cost_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """One instance that does everything: large images, whole or in slices of 4 ms.  A stream
    waits for what is under way, then for its own step."""
    large = [
        replace(ask, images=((0, Image(f"large{ask.index}", (1, 32, 32))),)) for ask in bursts()
    ]
    alone = itl_p99_s("1epd", streams(), monkeypatch)
    whole = itl_p99_s("1epd", streams() + large, monkeypatch)
    cut = itl_p99_s("1epd", streams() + large, monkeypatch, quantum_ms=4.0)
    assert whole > 0.1, "an image takes as long as a hundred of its 1,024 patches"
    assert cut <= alone + 2 * 0.004 + Conditions().jitter_s


def test_a_short_prompt_passes_long_ones_that_came_just_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight prompts of 0.3 s together; a ninth of a few tokens comes when they have begun, and
    would wait for all of them.  It passes nobody who came long before."""

    def waited_s(comes_s: float) -> float:
        long = [Ask(n, 1.0, text(800, n), max_tokens=2) for n in range(8)]
        return ttft_s(play("1epd", [*long, Ask(8, comes_s, text(20, 70), max_tokens=2)], ROOMY)[8])

    early, late = waited_s(1.03), waited_s(1.24)
    monkeypatch.setattr(roles_record, "TOKEN_S", 0.0)
    assert early < 0.3 * waited_s(1.03)
    assert late == waited_s(1.24), "what a prompt of 800 tokens costs is 0.2 s of waiting"


def test_text_does_not_wait_behind_images() -> None:
    """TTFT of text-only requests beside bursts of images, at most 1.3 times as long."""
    short = [Ask(n, 1.2 + 0.03 * n, text(20, 70 + n), max_tokens=2) for n in range(16)]
    prefill = msgspec.structs.replace(ROOMY.prefill, pool_nbytes=1 << 20)
    settings = replace(ROOMY, prefill=prefill)
    alone = [ttft_s(r) for r in play("1e1p1d", short, settings)[:16]]
    beside = [ttft_s(r) for r in play("1e1p1d", short + bursts(), settings)[:16]]
    assert sum(beside) <= 1.3 * sum(alone)
