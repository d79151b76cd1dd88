"""Probes of true sizes: shapes are those of the record, and a line through two is the whole."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from epd import tiny
from epd.cli.configure.model_check import check_model
from epd.cli.configure.settings import build_settings
from epd.cli.main import main
from epd.config import Settings
from epd.families.registry import family_of
from epd.model_files.checkpoint import ModelError
from epd.model_files.config_sizes import Sizes, counted
from epd_lab.bench.costs import probe, probe_table, shape, step_costs
from tests.engine.tiny_models import cached_model
from tests.model_files.published_checkpoints import PUBLISHED, config_of
from tests.model_files.published_tensors import tensors_of

RECORDED = {
    "4b": "Qwen/Qwen3-VL-4B-Instruct",
    "8b": "Qwen/Qwen3-VL-8B-Instruct",
    "32b": "Qwen/Qwen3-VL-32B-Instruct",
    "30b-a3b": "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "235b-a22b": "Qwen/Qwen3-VL-235B-A22B-Instruct",
    "qwen3.5-9b": "Qwen/Qwen3.5-9B",
    "qwen3.6-27b": "Qwen/Qwen3.6-27B",
    "qwen3.6-35b-a3b": "Qwen/Qwen3.6-35B-A3B",
    "kimi-k2.5": "moonshotai/Kimi-K2.5",
    "paddleocr-vl": "PaddlePaddle/PaddleOCR-VL",
}
SMALL = {"PROMPTS": (32, 96), "DECODES": (1, 2), "CONTEXT": 32, "IMAGE": (64, 64)}


@pytest.mark.parametrize("size", RECORDED)
def test_a_shape_has_as_many_numbers_as_what_is_published(size: str, tmp_path: Path) -> None:
    """But for layers that draft, and others that nothing here computes with."""
    directory = shape.write(tmp_path / size, tiny.CHECKPOINT, size)
    config = check_model(str(directory), weights=False).config
    family = family_of(directory, config)
    counts = counted(family, Sizes(directory / "config.json", config, family))
    published = PUBLISHED[RECORDED[size]]
    stored = tensors_of(published, config_of(published))
    unread = re.compile("|".join((r"^mtp\.", *family.skipped)))
    expected = sum(math.prod(s) for name, s in stored.items() if not unread.search(name))
    assert counts.tower + counts.language == expected


def small_settings(directory: Path) -> Settings:
    flags = {"model_dir": str(directory), "engine.kv_nbytes": 4 << 20}
    flags |= {"engine.load_format": "dummy", "engine.threads": 1, "engine.max_step_tokens": 64}
    return build_settings(flags=flags)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5_moe", "kimi_k25"])
def test_memory_is_as_computed_and_steps_take_time(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(probe, name, value)
    monkeypatch.setattr(step_costs, "QUEUED", 2)
    monkeypatch.setattr(step_costs, "REPEATS", 1)
    told: list[Any] = []
    found = probe.Told(told.append)
    directory = cached_model(family)
    timed = probe.Timings(probe.DECODES, probe.PROMPTS)
    asyncio.run(probe._measure(small_settings(directory), str(directory), found, timed))
    biases = 0.001  # of a router, which are no parameters
    assert found["weights_nbytes"] == pytest.approx(found["computed_nbytes"], rel=biases)
    assert found["tower_nbytes"] == found["tower_computed_nbytes"]
    assert found["kv_token_nbytes"] > 0
    assert {name for name in found if name.endswith("_ms")} == {
        "image_ms", "prefill_32_ms", "prefill_96_ms", "decode_1_ms", "decode_2_ms",
    }  # fmt: skip
    assert all(found[name] > 0 for name in found if name.endswith("_ms"))
    assert len(told) == len(found), "each is told when it is there"


def test_a_process_that_takes_too_long_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PRELOADED", [])
    cut_off = probe.Probe("slow", (1,), "4b")
    (row,) = probe.run([cut_off], small_settings(tiny.CHECKPOINT), limit_s=0.0)
    assert row["failed"] == "not done within 0 s" and row["whole"] == 36


def test_layers_that_are_not_there_are_refused_before_anything_is_measured() -> None:
    found = probe.run([probe.Probe("few", (1, 99), "", tiny.CHECKPOINT)], Settings(), limit_s=0.0)
    with pytest.raises(ModelError, match="give 1 to 4"):
        next(found)


def test_a_report_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    assert main(["bench", "probe", "--only", "8b", "--save", str(tmp_path / "no" / "one")]) == 2


def measured(layers: int, **figures: float) -> dict[str, Any]:
    """Of a model of ten layers."""
    fixed = {
        "tower_nbytes": 1e9, "tower_workspace_nbytes": 0.0, "reserve_nbytes": 1e9,
        "rows_nbytes": 1e9, "pool_tokens": 1000, "kv_heads": 4, "image_ms": 25.0,
        "outside_nbytes": 2e9, "workspace_nbytes": 1e9, "kv_token_nbytes": 1e6 * layers,
        "weights_nbytes": 2e9 + 10e9 * layers, "prefill_2048_ms": 1.0 + 2 * layers,
        "decode_1_ms": 1.0 + 0.5 * layers,
    }  # fmt: skip
    head = {"model": "made", "whole": 10, "layers": layers, "took_s": 1.0}
    return head | {"figures": fixed | figures}


def test_a_line_through_both_is_the_whole() -> None:
    line = probe_table.Line(measured(2), measured(4))
    assert line.whole("prefill_2048_ms") == 21.0
    assert line.layer("weights_nbytes") == 10e9 and line.whole("weights_nbytes") == 102e9
    # Of each card 6 GB are for what is not shared out; then there are 100 of layers and 10 of KV.
    assert line.num_cards(116_000_000_000, 1.0) == 1
    assert line.num_cards(115_000_000_000, 1.0) == 2
    assert line.num_cards(61_000_000_000, 1.0) == 2
    # Ranks beyond the heads of the KV have no less of it.
    assert line.num_cards(int(6e9 + 100e9 / 8 + 10e9 / 4), 1.0) == 8
    assert line.num_cards(int(6e9 + 100e9 / 8 + 10e9 / 8), 1.0) is None


def test_a_report_is_a_row_a_line_and_a_table() -> None:
    failed = measured(4) | {"model": "broken", "failed": "not done within 9 s"}
    report = {"card": "made", "share": 0.9, "rows": [measured(2), measured(4), failed]}
    assert json.loads(probe_table.as_json(report)) == report
    assert probe_table.as_json(report).count("\n  {") == 3
    table = probe_table.table(report)
    assert "| made | 2, 4 of 10 | 1.0 | 102 | 10.00 |" in table and "broken" not in table
    assert "not done within 9 s" in probe_table.line(failed)
