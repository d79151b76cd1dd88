"""The cost file as measured: of the bundled model on a CPU, and what a plan makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd import tiny
from epd.cli.configure.settings import build_settings
from epd.cli.main import main
from epd.config import ConfigError, Settings
from epd_lab.bench.costs import calibration, step_costs
from epd_lab.bench.workload import Closed, Shape, Stream, Workload
from epd_lab.plan.costs import BUNDLED, Costs, read, write
from epd_lab.plan.run import ForecastPlan, run

SMALL = {
    "QUEUED": 2, "REPEATS": 1, "DECODES": 4, "CONTEXT": 128, "CHUNK": 64, "HISTORY": 256,
    "LONGEST": 64, "SIZES": (32, 128), "BATCHES": (2,), "IMAGES": ((64, 64), (128, 128)),
    "CHECKS": ((2, 64, 32, 0), (9999, 1, 0, 0)),
}  # fmt: skip


def settings_for(directory: Path) -> Settings:
    return build_settings(flags={"model_dir": str(directory), "engine.kv_nbytes": 16 << 20})


async def test_measured_on_a_cpu_and_planned_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(step_costs, name, value)
    found = await calibration.measure(settings_for(tiny.CHECKPOINT), budget_s=60.0)
    write(found, tmp_path / "costs.json")
    assert read(tmp_path / "costs.json") == found
    assert found.model.kv_token_nbytes == 4096
    assert [size for size, _ in found.step.tokens_ms] == [1, 2, 4, 32, 64, 128]
    assert [size for size, _ in found.tower.patches_ms] == [64, 256]
    # Of few repeats: beside other work 4 tokens took as long as 128 once.
    assert found.step_s(128, 0, 0, mixed=False) > found.step_s(1, 0, 0, mixed=False)
    assert found.step.longest == 64 + 256
    (check,) = found.checks
    assert (check.decodes, check.prompt) == (2, 32)
    assert found.error(check) > -1
    assert any("not measured" in source for source in found.sources)
    assert not any("left out" in source for source in found.sources)


async def test_a_budget_ends_it_and_the_file_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(step_costs, name, value)
    found = await calibration.measure(settings_for(tiny.CHECKPOINT), budget_s=1e-9)
    assert [size for size, _ in found.step.tokens_ms] == [1, 4, 64], "what is needed is there"
    assert not found.checks
    told = found.sources[1]
    assert "left out for time: a step of 32 tokens, a step of 128 tokens, 2 decodes, " in told
    assert "images of 128 x 128" in told


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
        await calibration.measure(settings_for(tmp_path), 1.0)


def test_the_verb_writes_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Settings, float]] = []

    def measured(settings: Settings, budget_s: float) -> Costs:
        asked.append((settings, budget_s))
        return read(BUNDLED)

    monkeypatch.setattr(calibration, "measured", measured)
    out = tmp_path / "costs.json"
    assert main(["bench", "calibrate", "--out", str(out), "--device", "cuda"]) == 0
    assert read(out) == read(BUNDLED)
    ((settings, budget_s),) = asked
    assert settings.engine.load_format == "dummy"
    assert Path(settings.model_dir).name == "qwen3-vl-4b-shape"
    assert budget_s == 60
    assert "qwen3-vl-4b-shape on NVIDIA H200" in capsys.readouterr().out
    assert main(["bench", "calibrate", "--budget-s", "0"]) == 2
    assert main(["bench", "calibrate", "--out", str(tmp_path / "none" / "costs.json")]) == 2
