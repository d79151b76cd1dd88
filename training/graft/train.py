"""Trains the graft in parts: `python -m training.graft.train --state DIR --seconds 420`, twice.

The tower first learns to see characters and to write tokens where they stand; then the frozen
model's own loss on answers is added.  Learning rates and stages follow the clock over all parts;
`state.pt` in DIR has what the next part goes on from.
"""

import argparse
import json
import math
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tests.real import checkpoint as smollm2
from training import fonts
from training.batches import IGNORED
from training.dice import Dice
from training.feed import BatchFeed
from training.graft.batches import ANSWER, LENGTH, NOTHING, Maker, prepared, shape
from training.graft.checkpoint import assemble, quantised, restored
from training.graft.evaluate import MOST_TOKENS, Case, accuracy
from training.graft.model import Graft, fresh
from training.muon import Muon

SEEING_SHARE = 0.16  # of all the time, without the language model
CONSTANT_SHARE = 0.45  # of all the time at the full learning rate, then a cosine down
MUON, ADAM = 0.012, 1e-3
WARM_UP = 100  # steps
REPORT_S = 30.0


class Shape:
    """What the feed asks of a kind of batch."""

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.dtype = batch, shape(batch, length)
        self.nbytes = self.dtype.itemsize


class Feed(BatchFeed):
    """Batches to be seen (kind 0) or to be read (kind 1)."""

    def __init__(self, shapes: list[Shape], seed: int, workers: int, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer  # before the workers are forked
        super().__init__(shapes, seed, workers)  # type: ignore[arg-type]

    def _work(self, seed: str) -> None:
        maker = Maker(Dice(seed), fonts.installed(), self.tokenizer)
        while True:
            slot = self._free.get()
            kind = 0 if self._stage[1] > 0 else 1
            record = np.frombuffer(self._slots[slot], self.buckets[kind].dtype, 1)[0]
            maker.fill(record, self._stage[0])
            self._full.put((slot, kind))


class Trainer:
    """The graft, its optimizers and the step."""

    def __init__(self, checkpoint: Path, device: str, compiled: bool, kinds: list[Shape]) -> None:
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape
        self.kinds = kinds
        self.graft = Graft(checkpoint, device, compiled)
        self.device = torch.device(device)
        by_muon, rest = [], []
        for name, parameter in self.graft.named_parameters():
            is_matrix = parameter.ndim == 2 and ("layers." in name or "connector" in name)
            (by_muon if is_matrix else rest).append(parameter)
        self.muon = Muon([(parameter, 1) for parameter in by_muon])
        self.adam = torch.optim.AdamW(rest, lr=ADAM, betas=(0.9, 0.98), weight_decay=0.01)
        self.parameters = [*by_muon, *rest]
        self.seconds, self.steps = 0.0, 0

    def batch(self, kind: int, flat: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arrays of a batch on the device, and the places that the losses look at."""
        dtype = self.kinds[kind].dtype
        record = flat.numpy().view(dtype)[0]
        written = record["tokens"].ravel() != NOTHING
        places = {"tokens": written, "blanks": ~written}
        if kind:
            places["answers"] = record["targets"].ravel() != IGNORED
        where = {n: torch.from_numpy(np.flatnonzero(a)).to(self.device) for n, a in places.items()}
        there, arrays = flat.to(self.device, non_blocking=True), {}
        for name, (part, offset) in dtype.fields.items():
            numbers = torch.from_numpy(np.empty(0, part.base)).dtype
            view = there[offset : offset + part.itemsize]
            arrays[name] = view.view(numbers).view(part.shape)
        return arrays, where

    def step(self, kind: int, flat: Any, factor: float, aside: float, start: int) -> dict[str, Any]:
        """One update; `aside` is the weight of what is thrown away after training."""
        arrays, where = self.batch(kind, flat)
        found = self.graft.losses(arrays, where, start)
        own = found["seeing"] + found["writing"] + 0.3 * found["blank"] + 0.1 * found["size"]
        loss = own if kind == 0 else found["reading"] + aside * own
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward()
        for parameter in self.parameters:  # without text, of the added rows
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        for group in self.adam.param_groups:
            group["lr"] = ADAM * factor
        self.adam.step()
        self.muon.step(torch.tensor(MUON * factor, device=self.device))
        self.steps += 1
        return {name: value.detach() for name, value in found.items()}

    def save(self, path: Path) -> None:
        """In bfloat16: three files of less than 16 MiB when it is split."""
        state = {
            "tensors": self.graft.tensors(), "head": self.graft.see_head.state_dict(),
            "adam": self.adam.state_dict()["state"], "muon": self.muon.velocity,
        }  # fmt: skip
        whole = _each(
            state, lambda tensor: tensor.bfloat16().cpu() if tensor.ndim else tensor.cpu()
        )
        torch.save(whole | {"seconds": self.seconds, "steps": self.steps}, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.seconds, self.steps = state.pop("seconds"), state.pop("steps")
        state = _each(state, lambda tensor: tensor.float())
        self.graft.load(state["tensors"])
        self.graft.see_head.load_state_dict(state["head"])
        groups = self.adam.state_dict()["param_groups"]
        self.adam.load_state_dict({"state": state["adam"], "param_groups": groups})
        self.muon.velocity = state["muon"]


def _each(tree: Any, change: Any) -> Any:
    """The same tree of dicts with every tensor changed."""
    if isinstance(tree, dict):
        return {name: _each(value, change) for name, value in tree.items()}
    return change(tree)


def factor(share: float, steps: int) -> float:
    """Of the learning rates."""
    warm = min(1.0, (steps + 1) / WARM_UP)
    falling = max(0.0, (share - CONSTANT_SHARE) / (1 - CONSTANT_SHARE))
    return warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, falling))))


def train(
    trainer: Trainer, feed: Feed, seconds: float, total: float, start: int, most: int
) -> None:
    """Until this part's time is up."""
    began = reported = time.monotonic()
    before, pictures, waited, count = trainer.seconds, 0, 0.0, 0
    figures: dict[int, list[dict[str, Any]]] = {}
    while (now := time.monotonic()) - began < seconds and count < most:
        trainer.seconds = before + now - began
        share = trainer.seconds / total
        seeing = share < SEEING_SHARE
        feed.set_stage(min(1.0, 0.2 + share / (0.6 * SEEING_SHARE)), seeing)
        kind, flat = feed.next()
        while kind == 0 and not seeing:  # painted before the stage was set
            kind, flat = feed.next()
        waited += time.monotonic() - now
        steps = trainer.steps if seeing else trainer.steps + WARM_UP
        aside = 0.5 * max(0.04, 1 - (share - SEEING_SHARE) / 0.4)
        found = trainer.step(kind, flat, factor(share, steps), aside, start)
        figures.setdefault(kind, []).append(found)
        count += 1
        pictures += trainer.kinds[kind].batch
        if now - reported > REPORT_S:
            _report(trainer, figures, pictures / (now - reported), waited)
            figures, pictures, waited, reported = {}, 0, 0.0, now
    trainer.seconds = before + time.monotonic() - began
    _report(trainer, figures, pictures / max(1e-9, time.monotonic() - reported), waited)


def _report(trainer: Trainer, figures: Any, rate: float, waited: float) -> None:
    for kind, found in figures.items():
        means = {n: torch.stack([one[n] for one in found]).float().mean().item() for n in found[0]}
        shown = " ".join(f"{name} {value:.4f}" for name, value in means.items())
        print(
            f"{trainer.seconds:.0f} s step {trainer.steps} kind {kind} x{len(found)} {shown} "
            f"{rate:.0f} pictures/s waited {waited:.1f} s",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m training.graft.train", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="directory for what is kept")
    parser.add_argument("--seconds", type=float, default=420, help="of this part")
    parser.add_argument("--total", type=float, default=845, help="seconds of all parts")
    parser.add_argument("--steps", type=int, default=10**9, help="stop earlier")
    parser.add_argument("--batch", type=int, default=64, help="pictures with questions")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--cases", type=int, default=100, help="to evaluate on, by task")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.state.mkdir(parents=True, exist_ok=True)
    language = smollm2.make()
    begun, saved = arguments.state / "begun", arguments.state / "state.pt"
    torch.manual_seed(arguments.seed)
    if not begun.exists():
        assemble(begun, language, fresh(json.loads((language / "config.json").read_text())))
    tokenizer = Tokenizer.from_file(str(begun / "tokenizer.json"))
    kinds = [Shape(2 * arguments.batch, 0), Shape(arguments.batch, LENGTH)]
    seed = arguments.seed + saved.exists()
    feed = Feed(kinds, seed, arguments.workers, tokenizer)  # forks: before CUDA is begun
    trainer = Trainer(begun, arguments.device, not arguments.eager, kinds)
    if saved.exists():
        trainer.load(saved)
    maker = Maker(Dice("questions"), fonts.BUILT_IN_ONLY, tokenizer)
    start = maker.head.index(trainer.graft.image)
    feed.start(pin_memory=arguments.device == "cuda", pinning=threading.Lock())
    try:
        train(trainer, feed, arguments.seconds, arguments.total, start, arguments.steps)
    finally:
        feed.close()
    trainer.save(saved)
    kept = quantised(trainer.graft.tensors())
    save_file(kept, arguments.state / "graft.safetensors")
    trainer.graft.load(restored(kept))
    found = {
        "seconds": round(trainer.seconds), "steps": trainer.steps,
        "pictures_by_task": arguments.cases,
        "accuracy": accuracy(lambda asked: answers(trainer, maker, start, asked), arguments.cases),
    }  # fmt: skip
    (arguments.state / "accuracy.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found))
    return 0


def answers(trainer: Trainer, maker: Maker, start: int, asked: Sequence[Case]) -> list[str]:
    pixels = torch.from_numpy(np.stack([prepared(one.image) for one in asked]))
    prompts = [maker.head + maker.encode(one.question + ANSWER) for one in asked]
    found = trainer.graft.answer(pixels.to(trainer.device), prompts, start, MOST_TOKENS)
    return [maker.tokenizer.decode(tokens) for tokens in found]


if __name__ == "__main__":
    sys.exit(main())
