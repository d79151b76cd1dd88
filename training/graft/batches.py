"""Batches of one shape: a picture, a conversation about it, and where each token is written.

The tower learns to write: the row of a patch is to be like the embedding of the token that begins
there.  Tokens that begin in one patch move aside, so that the rows, read line by line, are text.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from training.batches import CHARS_PER_CELL, IGNORED
from training.dice import Dice
from training.graft.checkpoint import GRID, ROWS, SIDE, image_text
from training.graft.pages import Asked, SheetPainter
from training.painter import Picture

HEAD = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\n"
)
ANSWER, NEXT, END = "<|im_end|>\n<|im_start|>assistant\n", "\n<|im_start|>user\n", "<|im_end|>"
LENGTH = 768  # tokens of a conversation
NOTHING = -1  # begins in this patch
DENSE_SHARE = 0.35  # of the pictures that are only seen
TRANSCRIBED_FIRST = 0.25


def shape(batch: int, length: int) -> np.dtype[Any]:
    """A batch as one record."""
    return np.dtype(
        [
            ("ids", np.int32, (batch, length)),
            ("targets", np.int32, (batch, length)),
            ("tokens", np.int32, (batch, ROWS)),
            ("chars", np.uint8, (batch, ROWS, CHARS_PER_CELL)),
            ("pixels", np.uint8, (batch, SIDE, SIDE, 3)),
        ]
    )


def prepared(image: Image.Image) -> NDArray[np.uint8]:
    """As the checkpoint's image processor resizes it, in two steps: [SIDE, SIDE, 3]."""
    width, height = image.size
    ratio = width / height
    if ratio >= 1:
        size = (SIDE, _even(SIDE / ratio))
    else:
        size = (_even(SIDE * ratio), SIDE)
    whole = image.convert("RGB").resize(size, Image.Resampling.BILINEAR)
    return np.asarray(whole.resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def _even(side: float) -> int:
    return int(side) + int(side) % 2


class Maker:
    """Paints and writes batches, from one seed."""

    def __init__(self, dice: Dice, faces: tuple[str, ...], tokenizer: Tokenizer) -> None:
        self.dice = dice
        self.painter = SheetPainter(dice, "train", faces)
        self.tokenizer = tokenizer
        self.head = self.encode(HEAD + image_text())

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def fill(self, record: Any, difficulty: float) -> None:
        """Overwrites a batch; one without room for text is of pictures to be seen."""
        record["targets"][:] = IGNORED
        record["ids"][:] = 0
        for number in range(len(record["pixels"])):
            seen = record["ids"].shape[1] == 0
            if seen and self.dice.random() < DENSE_SHARE:
                picture = self.painter.dense(difficulty)
            else:
                sheet = self.painter.sheet(difficulty=difficulty)
                picture = sheet.picture
                if not seen:
                    ids, answers = self.talk(list(sheet.asked), sheet.transcription)
                    record["ids"][number, : len(ids)] = ids
                    places = np.flatnonzero(answers)
                    record["targets"][number, places - 1] = np.array(ids)[places]
            record["pixels"][number] = prepared(picture.image)
            record["tokens"][number] = self.written(picture)
            record["chars"][number] = _chars(picture)

    def talk(self, asked: list[Asked], last: Asked | None) -> tuple[list[int], list[bool]]:
        """Token ids, and which of them are answers; as many turns as fit."""
        if last is not None:
            asked.insert(0 if self.dice.random() < TRANSCRIBED_FIRST else len(asked), last)
        ids, answers = list(self.head), [False] * len(self.head)
        for number, (question, answer) in enumerate(asked):
            before = self.encode((NEXT if number else "") + question + ANSWER)
            after = self.encode(answer + END)
            if len(ids) + len(before) + len(after) > LENGTH:
                continue
            ids += before + after
            answers += [False] * len(before) + [True] * len(after)
        return ids, answers

    def written(self, picture: Picture) -> NDArray[np.int32]:
        """[ROWS]: the token that each patch's row is to be like."""
        lines: dict[int, list[tuple[int, int]]] = {}  # of patches: (column, token)
        glyphs = [(glyph.char, *_cell(picture, glyph.x, glyph.y)) for glyph in picture.glyphs]
        start = 0
        for line in (" " + line for line in picture.content.lines):
            found = self.tokenizer.encode(line, add_special_tokens=False)
            ahead = np.cumsum([char != " " for char in line])  # with the character itself
            for token, (first, end) in zip(found.ids, found.offsets, strict=True):
                char = next((i for i in range(first, end) if line[i] != " "), None)
                if char is not None:
                    _, row, column = glyphs[start + int(ahead[char]) - 1]
                    lines.setdefault(row, []).append((column, token))
            start += int(ahead[-1])
        written = np.full((GRID, GRID), NOTHING, np.int32)
        for row, entries in lines.items():
            columns = _apart([column for column, _ in entries[:GRID]])
            written[row, columns] = [token for _, token in entries[:GRID]]
        if picture.content.reading and not picture.glyphs:  # a clock
            tokens = self.encode(" " + picture.content.reading)[1:]
            first = (GRID - len(tokens)) // 2
            written[GRID // 2, first : first + len(tokens)] = tokens
        return written.flatten()


def _apart(columns: Sequence[int]) -> list[int]:
    """Columns in the same order, each its own, moved right and at the end left."""
    placed: list[int] = []
    for column in columns:
        placed.append(max(column, placed[-1] + 1 if placed else 0))
    for number in range(1, len(placed) + 1):
        placed[-number] = min(placed[-number], GRID - number)
        if number > 1:
            placed[-number] = min(placed[-number], placed[-number + 1] - 1)
    return placed


def _cell(picture: Picture, x: float, y: float) -> tuple[int, int]:
    """Row and column of the patch in which a place of the picture lies."""
    height, width = picture.pixels.shape[:2]
    return math.floor(y / height * GRID), math.floor(x / width * GRID)


def _chars(picture: Picture) -> NDArray[np.uint8]:
    """[ROWS, CHARS_PER_CELL]: the characters whose centre lies in each patch; 0 is none."""
    chars = np.zeros((ROWS, CHARS_PER_CELL), np.uint8)
    filled = np.zeros(ROWS, np.int64)
    for glyph in picture.glyphs:
        row, column = _cell(picture, glyph.x, glyph.y)
        place = row * GRID + column
        if filled[place] < CHARS_PER_CELL:
            chars[place, filled[place]] = ord(glyph.char) - 32
            filled[place] += 1
    return chars
