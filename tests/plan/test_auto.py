"""`epd run --auto`: the plan decides what starts, or nothing does."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from epd import tiny
from epd.cli.main import main
from epd.runtime import cuda_driver
from epd_lab.bench.costs import shape
from epd_lab.plan.search import KNOBS

AUTO = ["run", "--auto", "small", "--load-format", "dummy", "--show-config"]
FIXED = [flag for knob in KNOBS[1:] for flag in ("--set", knob)]  # so that few runs are made


def test_the_first_of_the_plan_is_started(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = shape.write(tmp_path / "4b", tiny.CHECKPOINT, "4b")
    asked = ["--model", str(model), "--device", "cuda:0,cuda:1", "--slo", "ttft=1s,itl=50ms"]
    assert main([*AUTO, *asked, *FIXED]) == 0
    told = capsys.readouterr()
    assert told.err.splitlines()[-1] == "2epd", "replicas, for so little"
    shown = msgspec.json.decode(told.out)
    assert shown["engine"]["device"] == "cuda:0,cuda:1"
    assert shown["engine"]["max_quantum_ms"] == 20


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--topology", "1epd", "--model", "4b"], "--auto finds the topology"),
        ([], "--auto plans for a model on GPUs: add --model"),
        (["--model", "4b"], "--auto plans for GPUs: no card"),
        (["--model", "8b", "--device", "cuda:0"], "is another model or form; measure it"),
        (["--model", "4b", "--device", "cuda:0", "--quantization", "fp8"], "(fp8, KV auto)"),
        (["--model", "4b", "--set", "engine.device=cuda:0", "--kv-cache-dtype", "fp8"], "KV fp8)"),
        (["--config", "FILE", "--device", "cuda:0"], "(fp8, KV auto)"),
        (["--model", "4b", "--device", "cpu"], "leave out --device cpu"),
        (["--model", "4b", "--device", "cuda:0", "-tp", "2"], "leave out --device cpu and -tp"),
        (["--model", "4b", "--device", "cuda:0", "--transport", "tcp"], "no transport 'tcp'"),
    ],
)
def test_what_cannot_be_planned_does_not_start(
    flags: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    file = tmp_path / "epd.toml"
    file.write_text('model_dir = "4b"\n[engine]\nquantization = "fp8"\n')
    flags = [str(file) if flag == "FILE" else flag for flag in flags]

    def none() -> list[int]:
        raise cuda_driver.NoCuda("no card")

    monkeypatch.setattr(cuda_driver, "device_sizes", none)
    assert main([*AUTO, *flags]) == 2
    assert said in capsys.readouterr().err


def test_bounds_are_those_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--topology", "1epd", "--slo", "ttft=1s", "--show-config"]) == 2
    assert "add --auto LOAD" in capsys.readouterr().err
