"""Both sides of a comparison, loaded when a row first asks for them."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from epd.cli.verify.questions import NUM_ANSWERS, NUM_NEW_TOKENS, Body, question
from epd.config import Settings
from epd.model_files.checkpoint import Checkpoint
from epd.model_files.families import family_of

if TYPE_CHECKING:
    import torch

    from epd.cli.verify.ours import Ours
    from epd.cli.verify.theirs import Theirs


class Sides:
    """`whole`: the checkpoint as it was given; `directory`, `against`: what each side loads."""

    def __init__(
        self, whole: Checkpoint, directory: Path, against: Path, settings: Settings
    ) -> None:
        self.whole, self.directory, self.against = whole, directory, against
        self.settings = settings
        self.dtype, self.device = settings.engine.dtype, settings.engine.device
        self.sees = bool(family_of(whole.directory, whole.config).vision)
        self.right_answers: list[tuple[list[int], torch.Tensor]] = []

    @cached_property
    def ours(self) -> Ours:
        from epd.cli.verify.ours import Ours

        return Ours(self.directory, self.settings.engine)

    @cached_property
    def theirs(self) -> Theirs:
        from epd.cli.verify.theirs import Theirs

        return Theirs(self.against, self.device, self.dtype, sees=self.sees)

    @property
    def ends(self) -> Sequence[int]:
        """Tokens that end an answer."""
        return self.ours.renderer.end_token_ids

    def questions(self) -> list[Body]:
        """Those that are answered; every other one with pictures, where the model takes any."""
        return [question(n, *([n] if self.sees and n % 2 else ())) for n in range(NUM_ANSWERS)]

    def answers(self) -> list[tuple[list[int], torch.Tensor]]:
        """The answers of transformers, and the logits of which it chose."""
        for body in self.questions()[len(self.right_answers) :]:
            inputs = self.theirs.inputs(body)
            self.right_answers.append(self.theirs.answer(inputs, NUM_NEW_TOKENS, self.ends))
        return self.right_answers

    def unload(self) -> None:
        """Give memory back, for processes that serve the same."""
        for name in ("ours", "theirs"):
            self.__dict__.pop(name, None)
        gc.collect()
        if self.device != "cpu":
            import torch

            torch.cuda.empty_cache()
