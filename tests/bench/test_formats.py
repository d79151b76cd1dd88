"""`epd bench formats`: shapes in each format, and a table of whole models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epd import tiny
from epd.cli.main import main
from epd.config import EngineConfig, Settings
from epd.engine.weights import stored
from epd.model_files.checkpoint import read_config
from epd_lab.bench.costs import formats, probe, shape
from tests.engine.draft_models import make_drafting


@pytest.mark.parametrize("name", formats.FORMATS)
def test_a_shape_names_its_format(name: str, tmp_path: Path) -> None:
    """Of the layers alone, in eight or four bits."""
    (one,) = formats.probes(["Qwen3-VL-8B"], [name])
    directory = shape.write(tmp_path / "m", tiny.CHECKPOINT, one.size)
    shape.store(directory, one.stored)
    config = read_config(directory)
    found = stored.format_of(config, "model.language_model.layers.0.mlp.up_proj.weight")
    assert (found is None) == (one.stored is None)
    assert stored.least_nbytes(config) == (
        0 if found is None else 0.5 if "4" in name or "AWQ" in name else 1
    )


def measured(model: str, layers: int, times_ms: float, **more: Any) -> dict[str, Any]:
    names = ("decode_1_ms", "decode_8_ms", "decode_64_ms", "prefill_2048_ms")
    figures = dict.fromkeys(names, 1.0 + times_ms * layers) | {"weights_nbytes": layers << 30}
    head = {"model": model, "whole": 10, "layers": layers, "took_s": 1.0}
    return head | {"figures": figures} | more


def test_whole_models_beside_bfloat16() -> None:
    """And what could not be measured, with the reason."""
    rows = [measured(f"A, {formats.PLAIN}", n, 1.9) for n in (2, 4)]
    rows += [measured("A, NVFP4", n, 0.9) for n in (2, 4)]
    rows += [measured("B, NVFP4", 2, 1.0, failed="cannot be kept"), measured("B, MXFP4", 2, 1.0)]
    for n in (2, 4):
        drafted = {f"drafted_{users}_ms": 1.5 * (1.0 + n) for users in (1, 8, 64)}
        row = measured("C, NVFP4", n, 1.0)
        rows.append(row | {"figures": row["figures"] | drafted})
    table = formats.table({"rows": rows})
    assert "| 1.50 / 1.50 / 1.50 | 0.50 / 0.50 / 0.50 |" in table
    assert "| A | bfloat16 | 10.0 | 50 | 400 | 3200 | 1.00 / 1.00 / 1.00 | 20 |" in table
    assert "| A | NVFP4 | 10.0 | 100 | 800 | 6400 | 0.50 / 0.50 / 0.50 | 10 |" in table
    assert "| B | NVFP4 | cannot be kept |" in table and "| B | MXFP4 | half of it" in table


def test_a_report_is_of_the_device_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what takes too long is a row of it."""
    monkeypatch.setattr(probe, "PRELOADED", [])
    where = ["--device", "cpu", "--limit-s", "0", "--save", str(tmp_path / "a.json")]
    assert main(["bench", "formats", "--only", "VL-8B", "--format", "NVFP4", *where]) == 1
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["card"] == "cpu" and len(report["rows"]) == 2
    assert report["whole"][0]["failed"] == "not done within 0 s"


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    assert main(["bench", "formats", "--only", "9000b"]) == 2
    assert main(["bench", "formats", "--only", "8b", "--format", "int3"]) == 2
    assert main(["bench", "formats", "--only", "8b", "--save", str(tmp_path / "no" / "one")]) == 2


async def test_steps_with_drafts_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an engine of their own, behind the one without a layer for them."""
    monkeypatch.setattr(probe, "CONTEXT", 100)
    directory = make_drafting("qwen3_5", tmp_path, agreeing=False)
    settings = Settings(model_dir=str(directory), engine=EngineConfig(threads=1, kv_nbytes=8 << 20))
    found = probe.Told(lambda figures: None)
    await probe._measure(settings, "", found, probe.Timings((1, 2), (64,), sees=False), 3)
    assert found["drafted_1_ms"] > found["decode_1_ms"] > 0 and found["drafted_2_ms"] > 0
