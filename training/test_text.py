"""No string of four or more characters is in both halves of the split."""

import re

import pytest

from training.dice import Dice
from training.layout import GOODS, SHOPS, Page
from training.painter import Painter
from training.tasks import TASKS, fresh_samples
from training.text import SHORTEST_HELD_OUT, TextSource, is_allowed, is_held_out


def test_training_never_shows_a_held_out_token():
    text = TextSource(Dice("train"), "train")
    tokens = [text.token(limit) for limit in range(1, 13) for _ in range(300)]
    long = [token for token in tokens if len(token) >= SHORTEST_HELD_OUT]
    assert len(long) > 1000
    assert not any(is_held_out(token) for token in long)


def test_evaluation_shows_only_held_out_tokens():
    text = TextSource(Dice("test"), "test")
    tokens = [text.token(12) for _ in range(900)]
    long = [token for token in tokens if len(token) >= SHORTEST_HELD_OUT]
    assert len(long) > 100
    assert all(is_held_out(token) for token in long)


def test_painted_training_lines_hold_no_held_out_token():
    painter = Painter(Dice("lines"), "train")
    for _ in range(100):
        picture = painter.paint("lines", Page(192, 96))
        for token in re.split(r"\s+", picture.content.text):
            assert len(token) < SHORTEST_HELD_OUT or not is_held_out(token)


@pytest.mark.parametrize("task", ["single", "small", "four_all"])
def test_evaluation_pictures_show_held_out_strings(task):
    for sample in fresh_samples(task, 10):
        lines = sample.answer.split("\n")
        if task == "four_all":
            lines = [line.split(": ", 1)[1] for line in lines]
        tokens = [token for line in lines for token in line.split(" ")]
        assert all(is_held_out(token) for token in tokens if len(token) >= SHORTEST_HELD_OUT)


def test_words_whose_case_cannot_be_seen_are_never_shown():
    assert not is_allowed("cow", "train")
    assert not is_allowed("COW", "test")
    assert is_allowed("Cow", "train")


def test_every_token_can_be_painted():
    text = TextSource(Dice("ascii"), "train")
    tokens = [text.token() for _ in range(500)] + list(GOODS) + list(SHOPS)
    assert all(token.isascii() and token.isprintable() for token in tokens)
    assert set(TASKS) >= {"single", "two", "total", "small", "four_all", "lines", "turn2"}
