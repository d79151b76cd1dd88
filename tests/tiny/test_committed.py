"""The committed checkpoint and samples: complete, and small enough for a repository."""

from __future__ import annotations

import json

from epd.tiny import CHECKPOINT, SAMPLES
from epd.tiny.samples import read_index

MOST_MEGABYTES = 12


def test_the_checkpoint_is_complete_and_small() -> None:
    files = {path.name: path.stat().st_size for path in CHECKPOINT.iterdir()}
    assert sum(files.values()) <= MOST_MEGABYTES * 1e6
    assert files.keys() >= {
        "config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja",
        "preprocessor_config.json", "generation_config.json",
    }  # fmt: skip
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["vision_config"]["deepstack_visual_indexes"]


def test_the_demo_has_three_questions_and_one_needs_two_pictures() -> None:
    demo = [entry for entry in read_index() if entry.demo]
    assert len(demo) == 3
    assert max(len(entry.images) for entry in demo) == 2
    assert all((SAMPLES / name).is_file() for entry in demo for name in entry.images)
