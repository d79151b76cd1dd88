"""Training batches of fixed shapes, painted on the CPU into one flat buffer each.

A bucket is one shape: `pictures` per sample, `cells` merged cells per picture (in every aspect
ratio that has them), room for `text_tokens`. A fixed shape per bucket is what lets the GPU replay
one recorded graph per bucket; a flat buffer is what crosses processes and the bus in one copy.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from training.conversation import Shown, converse
from training.dice import Dice
from training.layout import Page, Scene
from training.painter import Painter, Picture, Pixels
from training.vocabulary import CELL, END_OF_TEXT, MERGE, PATCH

Stage = Literal["see", "start", "one", "many"]
Arrays = dict[str, NDArray[Any]]

CHARS_PER_CELL = 4  # that the seeing loss asks for; more do not fit 16 px
IGNORED = -100  # as a target: no loss here
NO_DAMAGE, LOST, LAST_LOST, EXCHANGED, FOREIGN = range(5)  # done to deepstack rows in training
DAMAGED_SHARE = 0.05
ALIGNMENT = 64  # bytes
LARGEST_BATCH, SMALLEST_BATCH = 256, 16


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a batch inside the flat buffer."""

    name: str
    dtype: type[np.generic]
    shape: tuple[int, ...]
    offset: int  # bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Bucket:
    """One fixed batch shape."""

    def __init__(
        self, stage: Stage, cells: int, pictures: int, text_tokens: int, tokens: int
    ) -> None:
        """`tokens`: of the language model in one batch, which gives the batch size."""
        self.stage = stage
        self.cells = cells
        self.pictures = pictures
        self.text_tokens = text_tokens
        self.aspects = [
            (rows, cells // rows)
            for rows in range(2, 17)
            if cells % rows == 0 and 4 <= cells // rows <= 16 and rows <= 2.5 * (cells // rows)
        ]
        self.length = math.ceil((pictures * (cells + 2) + text_tokens) / 8) * 8
        if stage == "see":
            fitting = tokens // (cells * MERGE**2)
        else:
            by_patches = 2 * tokens // (pictures * cells * MERGE**2)
            fitting = min(tokens // self.length, by_patches, LARGEST_BATCH)
        self.batch_size = max(SMALLEST_BATCH, fitting // 8 * 8)
        self.images = self.batch_size * pictures
        self.fields = self._fields()
        self.nbytes = self.fields[-1].offset + self.fields[-1].nbytes

    @property
    def has_text(self) -> bool:
        return self.stage != "see"

    def _fields(self) -> list[Field]:
        batch, length = (self.batch_size, self.length) if self.has_text else (0, 0)
        rows = self.images * self.cells
        shapes: list[tuple[str, type[np.generic], tuple[int, ...]]] = [
            ("patches", np.uint8, (self.images, self.cells * MERGE**2, 3 * PATCH**2)),
            ("aspect", np.float32, (self.images, len(self.aspects))),  # one-hot
            ("ids", np.int64, (batch, length)),
            ("targets", np.int64, (batch, length)),
            ("positions", np.int32, (3, batch, length)),
            ("row_places", np.int64, (rows,)),  # flat token index that each encoder row goes to
            ("chars", np.uint8, (rows, CHARS_PER_CELL)),  # code - 32; 0: none
            ("char_count", np.float32, (1,)),
            ("damage", np.uint8, (self.images,)),  # of the deepstack rows
        ]
        fields, offset = [], 0
        for name, dtype, shape in shapes:
            fields.append(Field(name, dtype, shape, offset))
            offset += math.ceil(fields[-1].nbytes / ALIGNMENT) * ALIGNMENT
        return fields

    def view(self, buffer: NDArray[np.uint8]) -> Arrays:
        """The arrays of a batch inside a buffer of `nbytes` bytes."""
        return {
            field.name: buffer[field.offset : field.offset + field.nbytes]
            .view(field.dtype)
            .reshape(field.shape)
            for field in self.fields
        }


def make_buckets(tokens: int) -> list[Bucket]:
    """All shapes that training uses."""
    buckets = [Bucket("see", cells, 1, 0, tokens) for cells in (12, 24, 36, 60, 96)]
    buckets += [Bucket("start", cells, 1, 72, tokens // 2) for cells in (8, 12, 16, 24)]
    buckets += [
        Bucket("one", cells, 1, 168, tokens)
        for cells in (8, 12, 16, 20, 24, 30, 36, 48, 60, 70, 84, 96, 112, 120, 144, 180, 240)
    ]
    many = {2: (12, 16, 24, 36, 48, 60, 84, 96), 3: (12, 16, 24, 36), 4: (8, 12, 16, 20, 24, 32)}
    for pictures, sizes in many.items():
        buckets += [Bucket("many", cells, pictures, 184, tokens) for cells in sizes]
    return buckets


SHARE_OF_MANY = 0.5
SHARE_BY_PICTURES = {2: 0.4, 3: 0.15, 4: 0.45}


def pick_bucket(dice: Dice, buckets: list[Bucket], difficulty: float, seeing: bool) -> int:
    """The index of the next batch's bucket; pictures grow with difficulty."""
    if seeing:
        return dice.pick([i for i, bucket in enumerate(buckets) if not bucket.has_text])
    share_of_start = max(0.0, 1 - difficulty / 0.35)
    share_of_many = SHARE_OF_MANY * min(1.0, max(0.0, (difficulty - 0.2) / 0.3))
    largest = _largest_cells(difficulty)
    share = {
        "see": 0.0,
        "start": share_of_start,
        "one": (1 - share_of_start) * (1 - share_of_many),
        "many": (1 - share_of_start) * share_of_many,
    }
    usual = {"see": 5, "start": 4, "one": 17, "many": 18}
    weights = []
    for bucket in buckets:
        weight = share[bucket.stage] / usual[bucket.stage] if bucket.cells <= largest else 0.0
        if bucket.stage == "one":
            weight *= 0.6 if bucket.cells <= 24 else 1.0 if bucket.cells <= 120 else 0.8
        elif bucket.stage == "many":
            alike = {2: 8, 3: 4, 4: 6}[bucket.pictures]
            weight *= usual["many"] * SHARE_BY_PICTURES[bucket.pictures] / alike
        weights.append(weight)
    return dice.choices(range(len(buckets)), weights)[0]


def _largest_cells(difficulty: float) -> float:
    if difficulty < 0.2:
        return 16 + 40 * difficulty
    if difficulty < 0.5:
        return 24 + 120 * (difficulty - 0.2)
    return 60 + 400 * (difficulty - 0.5)


def patchify(pixels: Pixels) -> NDArray[np.uint8]:
    """[height, width, 3] -> [patches, 3 * PATCH**2], the four patches of a cell side by side."""
    rows, columns = pixels.shape[0] // CELL, pixels.shape[1] // CELL
    blocks = pixels.reshape(rows, MERGE, PATCH, columns, MERGE, PATCH, 3)
    blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5)
    return blocks.reshape(rows * columns * MERGE**2, 3 * PATCH**2)


def cell_chars(picture: Picture, rows: int, columns: int) -> NDArray[np.uint8]:
    """[cells, CHARS_PER_CELL]: the characters whose centre lies in each cell, in order."""
    chars = np.zeros((rows * columns, CHARS_PER_CELL), np.uint8)
    filled = [0] * (rows * columns)
    for glyph in picture.glyphs:
        cell = int(glyph.y) // CELL * columns + int(glyph.x) // CELL
        if filled[cell] < CHARS_PER_CELL:
            chars[cell, filled[cell]] = ord(glyph.char) - 32
            filled[cell] += 1
    return chars


class BatchMaker:
    """Paints and writes batches, from one seed."""

    def __init__(self, dice: Dice, faces: tuple[str, ...]) -> None:
        self.dice = dice
        self.painter = Painter(dice, "train", faces)

    def fill(self, bucket: Bucket, arrays: Arrays, difficulty: float) -> None:
        """Overwrites the arrays of one batch."""
        for name, empty in (
            ("ids", END_OF_TEXT), ("targets", IGNORED), ("positions", 0), ("aspect", 0),
            ("chars", 0), ("damage", NO_DAMAGE),
        ):  # fmt: skip
            arrays[name][:] = empty
        for sample in range(bucket.batch_size):
            shown = [
                self._add_picture(bucket, arrays, sample * bucket.pictures + number, difficulty)
                for number in range(bucket.pictures)
            ]
            if bucket.has_text:
                self._add_conversation(bucket, arrays, sample, shown, difficulty)
        arrays["char_count"][0] = max(1, np.count_nonzero(arrays["chars"]))

    def _add_picture(self, bucket: Bucket, arrays: Arrays, image: int, difficulty: float) -> Shown:
        aspect = self.dice.between(0, len(bucket.aspects) - 1)
        rows, columns = bucket.aspects[aspect]
        picture = self._paint(rows * CELL, columns * CELL, difficulty, dense=not bucket.has_text)
        arrays["patches"][image] = patchify(picture.pixels)
        arrays["aspect"][image, aspect] = 1
        first = image * bucket.cells
        arrays["chars"][first : first + bucket.cells] = cell_chars(picture, rows, columns)
        return Shown(picture.content, rows, columns)

    def _paint(self, height: int, width: int, difficulty: float, dense: bool) -> Picture:
        dice = self.dice
        smallest = round(10 + 8 * max(0.0, 1 - difficulty / 0.6))
        scene: Scene = "lines"
        noise = None
        largest = 34 + 6 * difficulty
        hard = difficulty > 0.6
        chance = dice.random()
        if difficulty > 0.3 and not dense:
            if height >= 48 and width >= 96 and chance < 0.34:
                scene = "fields"
            elif height >= 48 and width >= 80 and chance < 0.42:
                scene = "meter"
        if hard and scene == "lines" and chance > 0.8:  # small and noisy: the hardest to see
            largest, noise = 12.4, dice.span(8, 25)
        page = Page(width, height, difficulty, smallest, largest, dense)
        return self.painter.paint(scene, page, noise=noise)

    def _add_conversation(
        self, bucket: Bucket, arrays: Arrays, sample: int, shown: list[Shown], difficulty: float
    ) -> None:
        dice = self.dice
        text_only = bucket.pictures == 1 and difficulty > 0.3 and dice.random() < 0.04
        readable = True
        if difficulty > 0.4 and not text_only and dice.random() < DAMAGED_SHARE:
            readable = False
            self._damage(bucket, arrays, sample)
        talk = converse(
            self.painter.text, [] if text_only else shown, difficulty, bucket.text_tokens,
            readable,
        )  # fmt: skip
        used = len(talk.ids)
        assert used <= bucket.length, (used, bucket.length)
        ids = np.array(talk.ids)
        answers = np.array(talk.is_answer)[1:]
        arrays["ids"][sample, :used] = ids
        arrays["targets"][sample, : used - 1][answers] = ids[1:][answers]
        arrays["positions"][:, sample, :used] = talk.positions
        places = np.flatnonzero(talk.is_picture)
        if text_only:  # the rows must go somewhere: under the padding at the end
            places = np.arange(bucket.length - bucket.cells, bucket.length)
        rows = bucket.pictures * bucket.cells
        arrays["row_places"][sample * rows : (sample + 1) * rows] = sample * bucket.length + places

    def _damage(self, bucket: Bucket, arrays: Arrays, sample: int) -> None:
        """Orders damage to the deepstack rows of one or all pictures of a sample."""
        damage = self.dice.pick((LOST, LAST_LOST, EXCHANGED, FOREIGN))
        first, last = sample * bucket.pictures, (sample + 1) * bucket.pictures
        if self.dice.random() < 0.5:
            first = self.dice.between(first, last - 1)
            last = first + 1
        arrays["damage"][first:last] = damage
