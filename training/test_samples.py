"""The committed samples are what the code paints, and the committed model reads them right."""

import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from epd.tiny import SAMPLES
from training.samples import ENTRIES, SCENES, load_questions, paint, read_index
from training.tasks import edit_distance, exact_match, fresh_samples


def test_the_index_and_the_pictures_are_those_of_the_code():
    assert read_index() == list(ENTRIES)
    for scene in SCENES:
        committed = np.asarray(Image.open(SAMPLES / f"{scene.name}.png"), np.int16)
        painted = np.asarray(paint(scene), np.int16)
        # Another FreeType may round an edge otherwise; the picture stays the same to the eye.
        assert np.abs(committed - painted).mean() < 2


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
        "import sys, training.samples, training.painter, training.questions\n"
        "import training.tasks, training.evaluate\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": "."}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.filterwarnings("default")
def test_the_committed_model_answers_the_demo():
    from training.reader import committed_reader

    for question in load_questions(demo_only=True):
        assert exact_match(committed_reader().answer(question), question.answer)


@pytest.mark.filterwarnings("default")
def test_lost_deepstack_rows_show_in_the_answer():
    from training.corrupt import corrupted
    from training.reader import committed_reader

    reader = committed_reader()
    question = load_questions(demo_only=True)[0]
    for damage in ("drop_deepstack", "reorder_deepstack"):
        with corrupted(reader.model, damage):
            assert not exact_match(reader.answer(question), question.answer)
    assert exact_match(reader.answer(question), question.answer)
