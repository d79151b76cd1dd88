"""Pictures depend on the seed alone, and have the places of their characters."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from training.batches import BatchMaker, Bucket, cell_chars, patchify
from training.dice import Dice
from training.fonts import BUILT_IN_ONLY
from training.layout import Page
from training.painter import Painter
from training.tasks import TASKS, fresh_samples

DIGEST = """
import hashlib
from training.tasks import TASKS, fresh_samples
digest = hashlib.sha256()
for task in TASKS:
    for sample in fresh_samples(task, 2, 7):
        digest.update(sample.answer.encode())
        for image in sample.images:
            digest.update(image.tobytes())
print(digest.hexdigest())
"""


def digest_here():
    digest = hashlib.sha256()
    for task in TASKS:
        for sample in fresh_samples(task, 2, 7):
            digest.update(sample.answer.encode())
            for image in sample.images:
                digest.update(image.tobytes())
    return digest.hexdigest()


def test_one_seed_paints_the_same_pixels_in_another_process():
    command = [sys.executable, "-c", DIGEST]
    environment = {"PYTHONHASHSEED": "1", "PATH": "", "PYTHONPATH": "."}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.strip() == digest_here()


def test_another_seed_paints_another_picture():
    assert fresh_samples("single", 1, 1)[0].answer != fresh_samples("single", 1, 2)[0].answer


def test_a_sample_does_not_depend_on_how_many_are_asked_for():
    assert fresh_samples("two", 3)[2].answer == fresh_samples("two", 5)[2].answer


@pytest.mark.parametrize("scene", ["lines", "fields", "meter"])
def test_characters_lie_inside_the_picture_and_spell_its_text(scene):
    painter = Painter(Dice(scene), "train")
    for number in range(60):
        page = Page(16 * (4 + number % 12), 16 * (2 + number % 10), 0.2 + 0.8 * (number % 5) / 4)
        picture = painter.paint(scene, page)
        assert picture.pixels.shape == (page.height, page.width, 3)
        assert all(0 <= glyph.x < page.width for glyph in picture.glyphs)
        assert all(0 <= glyph.y < page.height for glyph in picture.glyphs)
        spelled = "".join(glyph.char for glyph in picture.glyphs)
        assert spelled == "".join(picture.content.text.split())


def test_ink_is_where_the_characters_are():
    picture = Painter(Dice("ink"), "train").paint("lines", Page(192, 96, 0.0, 20, 30), noise=0.0)
    paper = picture.pixels[0, 0].astype(int)
    for glyph in picture.glyphs:
        x, y = int(glyph.x), int(glyph.y)
        near = picture.pixels[max(0, y - 12) : y + 12, max(0, x - 8) : x + 8].astype(int)
        assert np.abs(near - paper).max() > 40


def test_patches_hold_every_pixel_in_merge_order():
    pixels = np.arange(32 * 48 * 3, dtype=np.uint32).reshape(32, 48, 3) % 251
    patches = patchify(pixels.astype(np.uint8))
    assert patches.shape == (24, 192)
    first = pixels[:8, :8].transpose(2, 0, 1).ravel()
    assert (patches[0] == first).all()
    below_left = pixels[8:16, :8].transpose(2, 0, 1).ravel()  # third patch of the first cell
    assert (patches[2] == below_left).all()


def test_a_batch_has_a_place_for_every_row_and_a_target_for_every_answer():
    bucket = Bucket("many", 12, 2, 184, 2048)
    arrays = bucket.view(np.zeros(bucket.nbytes, np.uint8))
    BatchMaker(Dice("batch"), BUILT_IN_ONLY).fill(bucket, arrays, difficulty=0.9)
    places = arrays["row_places"]
    assert len(set(places.tolist())) == bucket.images * bucket.cells
    assert (arrays["ids"].ravel()[places] == 262).all()
    asked = (arrays["targets"] >= 0).sum(axis=1)
    assert (asked >= 2).all()
    assert arrays["chars"].max() < 96


def test_crowded_cells_keep_their_first_characters():
    picture = Painter(Dice("crowd"), "train").paint("lines", Page(64, 32, 1.0, 10, 11))
    chars = cell_chars(picture, 2, 4)
    assert chars.shape == (8, 4)
    assert np.count_nonzero(chars) <= len(picture.glyphs)
