"""The cost file as measured: of the bundled model on a CPU, and what a plan makes of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from epd import tiny
from epd.cli.configure.settings import build_settings
from epd.config import ConfigError, Settings
from epd_lab.bench import gpu
from epd_lab.bench.costs import step_costs
from epd_lab.bench.verbs import gpu as verb_gpu
from epd_lab.bench.workload import Closed, Shape, Stream, Workload
from epd_lab.plan.costs import BUNDLED, Costs, read, write
from epd_lab.plan.run import ForecastPlan, run

SMALL = {
    "QUEUED": 2, "REPEATS": 1, "DECODES": 4, "CONTEXT": 128, "CHUNK": 64, "HISTORY": 256,
    "LONGEST": 64, "SIZES": (32, 128), "IMAGES": ((64, 64), (128, 128)),
}  # fmt: skip


def settings_for(directory: Path) -> Settings:
    return build_settings(flags={"model_dir": str(directory), "engine.kv_nbytes": 16 << 20})


async def test_measured_on_a_cpu_and_planned_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(step_costs, name, value)
    settings = settings_for(tiny.CHECKPOINT)
    found = await step_costs.measure(settings, sustained_s=0.0)
    write(found, tmp_path / "costs.json")
    assert read(tmp_path / "costs.json") == found
    assert found.model.kv_token_nbytes == 4096
    assert [size for size, _ in found.step.tokens_ms] == [1, 4, 32, 128]
    assert [size for size, _ in found.tower.patches_ms] == [64, 256]
    # Of few repeats: beside other work 4 tokens took as long as 128 once.
    assert found.step_s(128, 0, 0, mixed=False) > found.step_s(1, 0, 0, mixed=False)
    assert any("not measured" in source for source in found.sources)


def test_a_plan_runs_with_measured_costs() -> None:
    """On a CPU: nothing is launched ahead, nothing is captured."""
    costs = read(BUNDLED)
    workload = Workload("few", (Stream("few", Shape(16, 4, 1, (112, 112)), Closed(2), 4),))
    (row,) = run(ForecastPlan(costs, "1e1p1d", workload, settings_for(tiny.CHECKPOINT)))
    assert row["figures"]["failed"] == 0


def test_noise_does_not_make_more_cost_less() -> None:
    points = [(8, 2.0), (4, 3.0), (16, 2.5), (32, 4.0)]
    assert step_costs.rising(points) == ((4, 3.0), (8, 3.0), (16, 3.0), (32, 4.0))


async def test_a_family_of_other_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="Qwen-VL only"):
        await step_costs.measure(settings_for(tmp_path))


def test_the_flag_writes_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Settings] = []

    def measured(settings: Settings) -> Costs:
        asked.append(settings)
        return read(BUNDLED)

    def ran(*args: Any, **flags: Any) -> int:
        return 0

    monkeypatch.setattr(step_costs, "measured", measured)
    monkeypatch.setattr(gpu, "run", ran)
    parser = argparse.ArgumentParser()
    verb_gpu.add_to(parser.add_subparsers())
    given = ["gpu", "--gpus", "1", "--device", "cpu", "--out", str(tmp_path / "out")]
    args = parser.parse_args([*given, "--costs", str(tmp_path / "costs.json")])
    (tmp_path / "out").mkdir()
    assert verb_gpu.run(args) == 0
    assert read(tmp_path / "costs.json") == read(BUNDLED)
    assert asked[0].engine.load_format == "dummy"
