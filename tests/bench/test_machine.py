"""What stands beside a figure is what it was measured on."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_lab.bench.machine import gpus


@pytest.mark.parametrize(
    ("visible", "asked"), [("", ""), ("1", "-i 1"), ("0,2", "-i 0,2"), ("GPU-8e3f", "")]
)
def test_the_cards_are_those_that_are_visible(
    visible: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\nshift 2; echo "card $*, 580"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus() == [f"card {asked}, driver 580"]
