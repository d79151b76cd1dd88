"""Equal for copies, different for anything that would change an answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from epd.model_files.checkpoint import ModelError
from epd.model_files.fingerprint import model_fingerprint, processor_fingerprint
from tests.engine.tiny_models import FAMILIES


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_copies_agree_and_families_differ(tmp_path: Path, model_dir: Callable[[str], Path]) -> None:
    copy = shutil.copytree(model_dir("qwen3_vl"), tmp_path / "copy")
    assert model_fingerprint(copy) == model_fingerprint(model_dir("qwen3_vl"))
    assert processor_fingerprint(copy) == processor_fingerprint(model_dir("qwen3_vl"))
    assert len({model_fingerprint(model_dir(family)) for family in FAMILIES}) == len(FAMILIES)


def test_other_weights_of_the_same_shape_differ(
    tmp_path: Path, model_dir: Callable[[str], Path]
) -> None:
    copy = shutil.copytree(model_dir("llama"), tmp_path / "copy")
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    half = len(data) // 2
    data[half:] = bytes(byte ^ 1 for byte in data[half:])
    weights.write_bytes(data)
    assert model_fingerprint(copy) != model_fingerprint(model_dir("llama"))


def test_settings_count(tmp_path: Path, model_dir: Callable[[str], Path]) -> None:
    original = model_dir("qwen3_vl")
    copy = shutil.copytree(original, tmp_path / "copy")
    edit_json(copy / "preprocessor_config.json", image_mean=[0.1, 0.2, 0.3])
    assert processor_fingerprint(copy) != processor_fingerprint(original)
    assert model_fingerprint(copy) != model_fingerprint(original)
    other = shutil.copytree(original, tmp_path / "other")
    edit_json(other / "config.json", image_token_id=5)
    assert model_fingerprint(other) != model_fingerprint(original)
    assert processor_fingerprint(other) == processor_fingerprint(original)


def test_formatting_does_not_count(tmp_path: Path, model_dir: Callable[[str], Path]) -> None:
    copy = shutil.copytree(model_dir("llama"), tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    assert model_fingerprint(copy) == model_fingerprint(model_dir("llama"))


def test_a_missing_directory_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        model_fingerprint(tmp_path / "nowhere")


def test_image_settings_may_lie_in_the_processor_config(
    tmp_path: Path, model_dir: Callable[[str], Path]
) -> None:
    copy = shutil.copytree(model_dir("qwen3_vl"), tmp_path / "copy")
    settings = json.loads((copy / "preprocessor_config.json").read_text())
    (copy / "preprocessor_config.json").unlink()
    (copy / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    assert processor_fingerprint(copy) == processor_fingerprint(model_dir("qwen3_vl"))
