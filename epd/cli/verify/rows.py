"""The table: one row for each thing that is proved, from the files to the answers of processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epd.later import later

if TYPE_CHECKING:
    from epd.cli.verify.findings import Finding


@dataclass(frozen=True, slots=True)
class Row:
    """`module`: of this folder, whose function of the row's name compares; `needs`: rows without
    which it cannot."""

    name: str
    module: str
    proves: str
    needs: tuple[str, ...] = ()
    of_pictures: bool = False

    @property
    def compare(self) -> Callable[..., Finding]:
        """Of both sides."""
        return later(f"epd.cli.verify.{self.module}:{self.name}")


_FILES, _MODEL = "file_rows", "model_rows"
_LOADS, _ROUNDS = ("tensors",), ("tensors", "rounding")
ROWS = (
    Row("tensors", _FILES, "every tensor of the files is read, or named"),
    Row("config", _FILES, "all that config.json asks for is implemented, and means the same"),
    Row("template", _FILES, "20 conversations (text, images, tools, system) become the same text"),
    Row("tokenizer", _FILES, "their texts become the same tokens, and end at the same ones"),
    Row("pictures", _FILES, "12 pictures of odd sizes become the same patches", of_pictures=True),
    Row("placeholders", _FILES, "prompts with pictures become the same tokens", of_pictures=True),
    Row("rounding", _MODEL, "transformers against itself in twice the bits", _LOADS),
    Row("weights", _MODEL, "what is loaded is what transformers loads, bit for bit", _LOADS),
    Row("tower", _MODEL, "the pictures become the same rows", _ROUNDS, of_pictures=True),
    Row("positions", _MODEL, "tokens of prompts stand at the same places", _LOADS),
    Row("text", _MODEL, "logits behind 10 prompts of text", _ROUNDS),
    Row("images", _MODEL, "logits behind 10 prompts with pictures", _ROUNDS, of_pictures=True),
    Row("answers", _MODEL, "10 greedy answers of 64 tokens, over a paged KV cache", _ROUNDS),
    Row("processes", _MODEL, "the same answers of a process for each stage", _ROUNDS),
)
