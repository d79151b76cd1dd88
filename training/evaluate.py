"""Measures how well a checkpoint reads: `python -m training.evaluate [CHECKPOINT]`.

Greedy answers by transformers on the CPU, compared with the right ones. Every picture is fresh and
shows held-out strings. The table goes to stdout, progress to stderr.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from epd.tiny import CHECKPOINT
from training import fonts
from training.tasks import (
    DEFAULT_SEED,
    TASKS,
    Sample,
    edit_distance,
    exact_match,
    fresh_samples,
)

if TYPE_CHECKING:
    from training.reader import Reader

__all__ = ["Sample", "Score", "edit_distance", "evaluate", "exact_match", "fresh_samples"]

PROGRESS_EVERY = 10  # samples


@dataclass(frozen=True, slots=True)
class Score:
    """Of one task."""

    task: str
    samples: int
    exact_match: float  # share of answers without a single wrong character
    character_error: float  # edit distance by characters asked for
    ms_per_answer: float


def evaluate(
    reader: "Reader", task: str, samples: list[Sample], show_misses: bool = False
) -> Score:
    """Asks all samples and scores the answers."""
    right = distance = 0
    started = time.perf_counter()
    for number, sample in enumerate(samples, 1):
        answer = reader.answer(sample)
        right += exact_match(answer, sample.answer)
        distance += edit_distance(answer, sample.answer)
        if show_misses and not exact_match(answer, sample.answer):
            print(f"\n{task}: {sample.answer!r} read as {answer!r}", file=sys.stderr)
        if number % PROGRESS_EVERY == 0 or number == len(samples):
            progress = f"\r{task}: {right} of {number} right, {len(samples)} in all "
            print(progress, end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    elapsed_ms = (time.perf_counter() - started) * 1e3
    return Score(
        task=task,
        samples=len(samples),
        exact_match=round(right / len(samples), 4),
        character_error=round(distance / sum(len(sample.answer) for sample in samples), 4),
        ms_per_answer=round(elapsed_ms / len(samples), 1),
    )


def table(scores: list[Score]) -> str:
    """The scores as a Markdown table."""
    rows = ["| task | exact match | character error | ms per answer |", "|---|---|---|---|"]
    rows += [
        f"| {score.task} | {score.exact_match:.3f} | {score.character_error:.4f} "
        f"| {score.ms_per_answer:.0f} |"
        for score in scores
    ]
    return "\n".join(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=CHECKPOINT)
    parser.add_argument("--samples", type=int, default=200, help="per task")
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma-separated")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--all-fonts", action="store_true", help="with every installed font")
    parser.add_argument("--corrupt", default="none", help="damage the rows; `list` names the ways")
    parser.add_argument("--show", action="store_true", help="print wrong answers to stderr")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    import torch

    from training.corrupt import CORRUPTIONS, corrupted
    from training.reader import Reader

    if arguments.corrupt == "list":
        print("\n".join(CORRUPTIONS))
        return 0
    torch.set_num_threads(arguments.threads)
    faces = fonts.installed() if arguments.all_fonts else fonts.BUILT_IN_ONLY
    reader = Reader(arguments.checkpoint, getattr(torch, arguments.dtype), arguments.device)
    scores = []
    with corrupted(reader.model, arguments.corrupt):
        for task in arguments.tasks.split(","):
            samples = fresh_samples(task, arguments.samples, arguments.seed, faces)
            scores.append(evaluate(reader, task, samples, arguments.show))
    if arguments.json:
        report = {
            "dtype": arguments.dtype, "seed": arguments.seed, "corrupt": arguments.corrupt,
            "tasks": [asdict(score) for score in scores],
        }  # fmt: skip
        print(json.dumps(report))
    else:
        print(table(scores))
    return 0


if __name__ == "__main__":
    sys.exit(main())
