"""Directories of adapters: what is read, and the sentence for what is not."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from epd.model_files.checkpoint import ModelError
from epd.model_files.lora import modules_of, read_adapter, read_below

PLACE = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}
SHAPES = {f"{PLACE}.lora_A.weight": (2, 4), f"{PLACE}.lora_B.weight": (6, 2)}


def write(
    place: Path, shapes: dict[str, tuple[int, ...]] = SHAPES, byte: bytes = b"\0", **more: Any
) -> Path:
    place.mkdir(exist_ok=True)
    (place / "adapter_config.json").write_text(json.dumps(CONFIG | more))
    entries, at = {}, 0
    for name, shape in shapes.items():
        end = at + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": (at, end)}
        at = end
    header = json.dumps(entries).encode()
    file = struct.pack("<Q", len(header)) + header + byte * at
    (place / "adapter_model.safetensors").write_bytes(file)
    return place


def test_what_peft_writes_is_read(tmp_path: Path) -> None:
    """Fields that other methods have, empty, are no method."""
    write(tmp_path / "a", use_dora=False, modules_to_save=None, bias="none", loftq_config={})
    files = read_adapter(tmp_path / "a", 2)
    change = files.changes["model.layers.0.self_attn.q_proj"]
    assert (change.a.shape, change.b.shape, change.scale) == ((2, 4), (6, 2), 3.0)
    assert files.max_rank == 2


def test_scales_are_pefts(tmp_path: Path) -> None:
    for more, scale in (
        ({"use_rslora": True}, 6 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 10}}, 5.0),
        ({"alpha_pattern": {"self_attn.q_proj": 8, "q_proj": 10}}, 4.0),
        ({"alpha_pattern": {"proj": 10, "v_proj": 12}}, 3.0),
    ):
        files = read_adapter(write(tmp_path / "a", **more), 2)
        assert [c.scale for c in files.changes.values()] == [pytest.approx(scale)]


def test_a_digest_is_of_all_that_counts(tmp_path: Path) -> None:
    """Not of the place, nor of who trained it and how."""
    one = read_adapter(write(tmp_path / "a"), 2).digest
    assert one == read_adapter(write(tmp_path / "b", lora_dropout=0.1, task_type="X"), 2).digest
    others = [
        {"lora_alpha": 7},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 9}},
        {"byte": b"\1"},
        {"shapes": {name.replace("0", "1"): shape for name, shape in SHAPES.items()}},
    ]
    digests = {read_adapter(write(tmp_path / "c", **more), 2).digest for more in others}
    assert len(digests | {one}) == len(others) + 1


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"use_dora": True}, "use_dora True is not served"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias 'all'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"a_method_to_come": 3}, "a_method_to_come 3"),
        ({"init_lora_weights": "pissa"}, "the model's own weights"),
        ({"lora_alpha": 0}, "positive"),
        ({"lora_alpha": "6"}, "positive"),
        ({"r": True}, "positive"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "alpha_pattern has other keys"),
        ({"rank_pattern": [1]}, "rank_pattern has other keys"),
        ({"r": 2, "shapes": {f"{PLACE}.lora_A.weight": (2, 4)}}, "one of A and B is missing"),
        ({"shapes": SHAPES | {f"{PLACE}.lora_B.weight": (6, 3)}}, "rank 2, and B 3"),
        ({"shapes": SHAPES | {f"{PLACE}.lora_magnitude_vector": (6,)}}, "lora_magnitude_vector"),
        ({"shapes": {f"{PLACE}.lora_embedding_A": (2, 4)}}, "lora_embedding_A is none"),
        ({"shapes": {f"{PLACE}.lora_A.weight": (2,)}}, "not a float matrix"),
        ({"shapes": {}}, "changes no layer"),
        ({"shapes": {n: tuple(3 if x == 2 else x for x in s) for n, s in SHAPES.items()}},
         "rank 3, above 2: raise --max-lora-rank"),
    ],
)  # fmt: skip
def test_what_computes_otherwise_is_refused(
    more: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=match.replace("(", r"\(")):
        read_adapter(write(tmp_path / "a", **more), 2)


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_adapter(tmp_path / "nowhere", 2)
    with pytest.raises(ModelError, match="has no adapter_config"):
        read_adapter(tmp_path, 2)
    place = write(tmp_path / "a")
    (place / "adapter_model.safetensors").rename(place / "adapter_model.bin")
    with pytest.raises(ModelError, match="is a pickle: save it as safetensors"):
        read_adapter(place, 2)


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a") / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="copy it again"):
        read_adapter(tmp_path / "a", 2)


def test_names_and_directories() -> None:
    assert modules_of(["a=/x", "b=y=z"]) == {"a": "/x", "b": "y=z"}
    for wrong, match in ((["a"], "write NAME=DIR"), (["=x"], "write"), (["a=x", "a=y"], "twice")):
        with pytest.raises(ModelError, match=match):
            modules_of(wrong)


def test_what_a_client_names_is_below_the_directory(tmp_path: Path) -> None:
    """By either form of its path; links are followed first, and no sentence has the directory."""
    root = tmp_path / "root"
    root.mkdir()
    digest = read_adapter(write(root / "a"), 2).digest
    write(tmp_path / "outside")
    (root / "inward").symlink_to(root / "a")
    (root / "outward").symlink_to(tmp_path / "outside")
    for path in ("a", "./a", "a/../a", str(root / "a"), "inward"):
        assert read_below(str(root), path, 2).digest == digest
    for path in ("", ".", "..", "../outside", str(tmp_path / "outside"), "outward", "../root"):
        with pytest.raises(ModelError, match="not below the directory") as caught:
            read_below(str(root), path, 2)
    for path in ("nowhere", "a/adapter_config.json", "x" * 500, "a\0b"):
        with pytest.raises(ModelError) as caught:
            read_below(str(root), path, 2)
        assert str(tmp_path) not in str(caught.value)
    with pytest.raises(ModelError, match="raise --max-lora-rank"):
        read_below(str(root), "a", 1)
