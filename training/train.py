"""Trains the model from nothing on one GPU: `python -m training.train --out DIR --seconds 500`.

Time is the budget: the learning rate, the curriculum and the end follow the clock. First the vision
tower alone learns to see the characters of each cell.  Then both halves learn to read, with
pictures and questions that get harder while the loss is low. Workers paint, the GPU replays one
recorded CUDA graph per batch shape. The result is a complete checkpoint directory.
"""

import argparse
import json
import math
import shutil
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd.tiny import CHECKPOINT
from training.batches import Bucket, make_buckets
from training.feed import BatchFeed

if TYPE_CHECKING:
    import torch

SEEING_SHARE = 0.14  # of the time, vision alone
RAMP_SHARE = 0.15  # of the time, from the easiest to the hardest once the loss is low
LOW_LOSS = 0.5
CONSTANT_SHARE = 0.3  # of the time at the full learning rate, then a cosine down
GO_ON_RATE = 0.6  # factor on the learning rates when going on from a trained checkpoint
WARM_UP = 200  # steps
LOG_EVERY = 200  # steps


@dataclass(frozen=True, slots=True)
class Rates:
    """Full learning rates and the weight of the seeing loss."""

    adam: float = 1.5e-3
    muon: float = 0.015
    seeing: float = 0.2


class Schedule:
    """What to train on and how fast, from the share of the time that has passed."""

    def __init__(self, can_read: bool) -> None:
        """`can_read`: the weights are trained already; no seeing stage, the hardest at once."""
        self.difficulty = float(can_read)
        self.seeing_share = 0.0 if can_read else SEEING_SHARE
        self.constant_share = 0.0 if can_read else CONSTANT_SHARE
        self.peak = GO_ON_RATE if can_read else 1.0
        self._last = 0.0
        self._loss: float | None = None

    def note_loss(self, reading_loss: float) -> None:
        """The mean reading loss of the last few steps."""
        before = reading_loss if self._loss is None else self._loss
        self._loss = 0.8 * before + 0.2 * reading_loss

    def stage(self, share: float) -> tuple[float, bool]:
        """(difficulty, seeing only) at a share of the time."""
        step, self._last = share - self._last, share
        if share < self.seeing_share:
            return 0.2 + 0.8 * share / self.seeing_share, True
        if self._loss is not None and self._loss < LOW_LOSS:
            self.difficulty += step / RAMP_SHARE
        at_least = (share - self.seeing_share - 0.2) / 0.3  # never wait for ever
        self.difficulty = min(1.0, max(self.difficulty, at_least))
        return self.difficulty, False

    def rate(self, share: float, steps: int, reading_steps: int) -> float:
        """Factor on the learning rates; each stage warms up."""
        warm = self.peak * min(1.0, (steps + 1) / WARM_UP)
        if reading_steps:
            warm *= min(1.0, (reading_steps + 1) / WARM_UP)
        if share < self.constant_share:
            return warm
        falling = (share - self.constant_share) / (1 - self.constant_share)
        return warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * falling)))


class Trainer:
    """The model, its optimizers and the step, eager or replayed."""

    def __init__(
        self, buckets: list[Bucket], device: str, seed: int, start_from: Path | None = None
    ) -> None:
        import torch

        from training.model import AspectTables, Objective, build_model
        from training.muon import Muon, split_parameters

        torch.manual_seed(seed)
        self.buckets = buckets
        self.device = torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        if self.on_gpu:
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape
            torch.backends.cuda.enable_math_sdp(False)
        self.model = build_model(CHECKPOINT, start_from).to(self.device).train()
        self.rates = Rates()
        # Scalars on the device: a recorded step reads their present value.
        self._adam_rate = torch.tensor(self.rates.adam, device=self.device)
        self._muon_rate = torch.tensor(self.rates.muon, device=self.device)
        self._seeing_weight = torch.tensor(self.rates.seeing, device=self.device)
        self.objective = Objective(self.model, self._seeing_weight).to(self.device)
        vision, vision_rest = split_parameters(self.model.model.visual)
        text, text_rest = split_parameters(self.model.model.language_model)
        self._vision_muon, self._text_muon = Muon(vision), Muon(text)
        rest = [*vision_rest, *text_rest]
        heads = list(self.objective.heads.parameters())
        self._adam = torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.ndim >= 2], "weight_decay": 0.01},
                {"params": [p for p in rest if p.ndim < 2] + heads, "weight_decay": 0.0},
            ],
            lr=self._adam_rate, betas=(0.9, 0.98), fused=self.on_gpu, capturable=self.on_gpu,
        )  # fmt: skip
        self._parameters = [*self.model.parameters(), *heads]
        self._tables = [
            AspectTables(self.model.model.visual, bucket.aspects, self.device) for bucket in buckets
        ]
        self._batches: dict[int, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        self._side = torch.cuda.Stream() if self.on_gpu else None  # type: ignore[no-untyped-call]

    def set_rates(self, factor: float, share: float) -> None:
        self._adam_rate.fill_(self.rates.adam * factor)
        self._muon_rate.fill_(self.rates.muon * factor)
        self._seeing_weight.fill_(self.rates.seeing * max(0.1, 1 - share / 0.7))

    def step(self, index: int, flat: "torch.Tensor", recording: threading.Lock) -> "torch.Tensor":
        """One update on a batch; returns [loss, share right, seeing loss, gradient norm]."""
        if index not in self._batches:
            self._batches[index] = self._device_batch(self.buckets[index])
        buffer, batch = self._batches[index]
        buffer.copy_(flat, non_blocking=True)
        if index in self._graphs:
            graph, figures = self._graphs[index]
            graph.replay()
            return figures.clone()
        if not self.on_gpu:
            return self._update(index, batch)
        with recording:
            return self._record(index, batch)

    def _device_batch(self, bucket: Bucket) -> tuple["torch.Tensor", dict[str, "torch.Tensor"]]:
        """A buffer on the device that stays in place, and the arrays in it."""
        import numpy as np
        import torch

        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self.device)
        arrays = {}
        for field in bucket.fields:
            dtype = torch.from_numpy(np.empty(0, field.dtype)).dtype
            flat = buffer[field.offset : field.offset + field.nbytes]
            arrays[field.name] = flat.view(dtype).view(field.shape)
        return buffer, arrays

    def _record(self, index: int, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """Two eager steps on a side stream to warm allocators up, then the recording."""
        import torch

        assert self._side is not None
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            for _ in range(2):
                figures = self._update(index, batch)
            self._forget_gradients()
        torch.cuda.current_stream().wait_stream(self._side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._side, capture_error_mode="thread_local"):
            recorded = self._update(index, batch, forget=False)
        self._graphs[index] = (graph, recorded)
        return figures

    def _forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _update(
        self, index: int, batch: dict[str, "torch.Tensor"], forget: bool = True
    ) -> "torch.Tensor":
        import torch

        if forget:
            self._forget_gradients()
        bucket = self.buckets[index]
        loss, right, seeing = self.objective(bucket, batch, self._tables[index])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, 1.0, foreach=True)
        self._adam.step()
        self._vision_muon.step(self._muon_rate)
        reading = loss.detach()
        if bucket.has_text:
            self._text_muon.step(self._muon_rate)
            reading = reading - self._seeing_weight * seeing
        return torch.stack([reading, right.detach(), seeing, norm.to(reading.dtype)])

    def save(self, directory: Path) -> None:
        """A complete checkpoint directory in bf16; the files beside the weights are copied."""
        import torch
        from safetensors.torch import save_file

        directory.mkdir(parents=True, exist_ok=True)
        weights = {
            name: tensor.detach().to(torch.bfloat16).contiguous().cpu()
            for name, tensor in self.model.state_dict().items()
            if name != "lm_head.weight"  # tied to the embedding
        }
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        for path in [*CHECKPOINT.glob("*.json"), *CHECKPOINT.glob("*.jinja")]:
            if path.resolve() != (directory / path.name).resolve():
                shutil.copyfile(path, directory / path.name)


def train(
    trainer: Trainer,
    feed: BatchFeed,
    recording: threading.Lock,
    seconds: float,
    max_steps: int,
    can_read: bool = False,
) -> dict[str, Any]:
    """Runs until the time or the steps are up; returns what happened."""
    import torch

    schedule = Schedule(can_read)
    started = time.monotonic()
    steps = reading_steps = images = 0
    waited, logged = 0.0, started
    reading_losses: list[torch.Tensor] = []
    figures: deque[torch.Tensor] = deque(maxlen=LOG_EVERY)
    while steps < max_steps and (now := time.monotonic()) - started < seconds:
        share = (now - started) / seconds
        difficulty, seeing = schedule.stage(share)
        feed.set_stage(difficulty, seeing)
        trainer.set_rates(schedule.rate(share, steps, reading_steps), share)
        index, flat = feed.next()
        waited += time.monotonic() - now
        figures.append(trainer.step(index, flat, recording))
        bucket = trainer.buckets[index]
        steps += 1
        images += bucket.images
        if bucket.has_text:
            reading_steps += 1
            reading_losses.append(figures[-1])
        if len(reading_losses) == 10:
            schedule.note_loss(torch.stack(reading_losses)[:, 0].mean().item())
            reading_losses.clear()
        if steps % LOG_EVERY == 0:
            loss, right, seen, norm = torch.stack(list(figures)).mean(0).tolist()
            now = time.monotonic()
            print(
                f"step {steps} {now - started:.0f} s difficulty {difficulty:.2f} "
                f"loss {loss:.4f} right {right:.4f} seeing {seen:.3f} norm {norm:.2f} "
                f"{(now - logged) / LOG_EVERY * 1e3:.1f} ms/step waited {waited:.1f} s "
                f"images {images}",
                flush=True,
            )
            logged = now
    elapsed = time.monotonic() - started
    return {"steps": steps, "images": images, "seconds": round(elapsed), "waited": round(waited)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--steps", type=int, default=10**9, help="stop earlier")
    parser.add_argument("--tokens", type=int, default=20480, help="per batch")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-from", type=Path, help="a trained checkpoint to go on from")
    arguments = parser.parse_args()
    buckets = make_buckets(arguments.tokens)
    feed = BatchFeed(buckets, arguments.seed, arguments.workers)  # forks: before torch is loaded
    trainer = Trainer(buckets, arguments.device, arguments.seed, arguments.start_from)
    recording = threading.Lock()
    feed.start(pin_memory=trainer.on_gpu, pinning=recording)
    try:
        summary = train(
            trainer, feed, recording, arguments.seconds, arguments.steps,
            can_read=arguments.start_from is not None,
        )  # fmt: skip
    finally:
        feed.close()
    trainer.save(arguments.out)
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
