"""The committed files: small enough, up to date, and read right by the committed model."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from epd.tiny import CHECKPOINT, SAMPLES
from epd_lab.tiny.samples import ENTRIES, SCENES, load_questions, paint, read_index
from epd_lab.tiny.tasks import edit_distance, exact_match, fresh_samples

MOST_MEGABYTES = 12


def test_the_checkpoint_is_complete_and_small():
    files = {path.name: path.stat().st_size for path in CHECKPOINT.iterdir()}
    assert sum(files.values()) <= MOST_MEGABYTES * 1e6
    assert files.keys() >= {
        "config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja",
        "preprocessor_config.json", "generation_config.json",
    }  # fmt: skip
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["vision_config"]["deepstack_visual_indexes"]


def test_the_index_and_the_pictures_are_those_of_the_code():
    assert read_index() == list(ENTRIES)
    for scene in SCENES:
        committed = np.asarray(Image.open(SAMPLES / f"{scene.name}.png"), np.int16)
        painted = np.asarray(paint(scene), np.int16)
        # Another FreeType may round an edge otherwise; the picture stays the same to the eye.
        assert np.abs(committed - painted).mean() < 2


def test_the_demo_has_three_questions_and_one_needs_two_pictures():
    demo = load_questions(demo_only=True)
    assert len(demo) == 3
    assert max(len(question.images) for question in demo) == 2


def test_messages_carry_each_picture_as_a_data_url():
    (sample,) = fresh_samples("turn2", 1)
    parts = [part for message in sample.openai_messages() for part in message["content"]]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    assert len(urls) == len(sample.images) == 2
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    assert sample.question == "What does image 2 say?"


def test_answers_are_compared_but_for_blanks_at_the_ends():
    assert exact_match("10.85\n", "10.85")
    assert not exact_match("10.95", "10.85")
    assert edit_distance("kitten", "sitting") == 3


def test_sampling_and_painting_load_neither_torch_nor_transformers():
    code = (
        "import sys, epd_lab.tiny.samples, epd_lab.tiny.painter, epd_lab.tiny.questions\n"
        "import epd_lab.tiny.tasks, epd_lab.tiny.evaluate\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": "."}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.filterwarnings("default")
def test_the_committed_model_answers_the_demo():
    from epd_lab.tiny.reader import committed_reader

    for question in load_questions(demo_only=True):
        assert exact_match(committed_reader().answer(question), question.answer)


@pytest.mark.filterwarnings("default")
def test_lost_deepstack_rows_show_in_the_answer():
    from epd_lab.tiny.corrupt import corrupted
    from epd_lab.tiny.reader import committed_reader

    reader = committed_reader()
    question = load_questions(demo_only=True)[0]
    for damage in ("drop_deepstack", "reorder_deepstack"):
        with corrupted(reader.model, damage):
            assert not exact_match(reader.answer(question), question.answer)
    assert exact_match(reader.answer(question), question.answer)
