"""Both sides of a comparison, loaded when a row first asks for them."""

from __future__ import annotations

import gc
from functools import cached_property
from pathlib import Path

import torch

from epd.cli.start.plan import LogOptions
from epd.cli.verify import questions
from epd.cli.verify.findings import Apart
from epd.cli.verify.ours import Ours
from epd.cli.verify.questions import Asked, Body
from epd.cli.verify.theirs import Theirs
from epd.config import Settings
from epd.families.registry import family_of
from epd.model_files.checkpoint import Checkpoint

QUIET = LogOptions("warning", as_json=False)


class Sides:
    """`whole`: the checkpoint as it was given; `directory`, `against`: what each side loads."""

    def __init__(
        self, whole: Checkpoint, directory: Path, against: Path, settings: Settings,
        log: LogOptions = QUIET,
    ) -> None:  # fmt: skip
        self.whole, self.directory, self.against = whole, directory, against
        self.settings, self.log = settings, log
        self.dtype, self.device = settings.engine.dtype, settings.engine.device
        self.sees = bool(family_of(whole.directory, whole.config).vision)
        # Rounding moves a logit a little, unless it gives a token to another expert: in float32
        # where two have the same score in all digits, which is seldom.
        has_experts = any(".experts" in name for name in whole.tensors)
        self.most_jumps = (1 / 8 if self.dtype == "float32" else 1 / 2) if has_experts else 0.0

    @cached_property
    def ours(self) -> Ours:
        return Ours(self.directory, self.settings.engine)

    @cached_property
    def theirs(self) -> Theirs:
        return Theirs(self.against, self.device, self.dtype, sees=self.sees)

    def asked(self, row: str) -> list[Asked]:
        """Pictures or prompts, of which this row compares numbers."""
        if row == "tower":
            return list(map(questions.picture, range(len(questions.SIZES))))
        return questions.prompts(sees=self.sees)[row == "images" :: 2]

    @cached_property
    def right(self) -> dict[str, tuple[list[torch.Tensor], Apart]]:
        """By row: the numbers of transformers, and how far rounding has moved them."""
        rows = ("tower", "text", "images") if self.sees else ("text",)
        right = {row: list(map(self.theirs.numbers, self.asked(row))) for row in rows}
        with self.theirs.in_twice_the_bits():
            exact = {row: list(map(self.theirs.numbers, self.asked(row))) for row in rows}
        return {row: (right[row], Apart.worst(list(map(Apart.of, right[row], exact[row]))))
                for row in rows}  # fmt: skip

    def to_answer(self) -> list[Body]:
        """Every other one with pictures, where the model takes any."""
        return questions.prompts(sees=self.sees)[: questions.NUM_ANSWERS]

    @cached_property
    def answers(self) -> list[tuple[list[int], torch.Tensor]]:
        """The answers of transformers, and the logits of which it chose."""
        ends = self.ours.renderer.end_token_ids
        most = questions.NUM_NEW_TOKENS
        return [self.theirs.answer(body, most, ends) for body in self.to_answer()]

    def unload(self) -> None:
        """Give memory back; what the rows have of transformers is kept."""
        if "ours" in vars(self):
            self.ours.close()
        for name in ("ours", "theirs"):
            vars(self).pop(name, None)
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()
