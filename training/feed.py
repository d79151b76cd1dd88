"""Worker processes that paint batches ahead of the trainer.

Batches travel in shared memory slots.  A worker takes a free slot, paints a batch into it and
announces it; a thread of the trainer copies it to pinned memory and frees the slot. The fork
happens before torch is loaded, so a worker carries numpy and Pillow alone.
"""

import mmap
import multiprocessing
import queue
import threading
from typing import TYPE_CHECKING

import numpy as np

from training import fonts
from training.batches import BatchMaker, Bucket, pick_bucket
from training.dice import Dice

if TYPE_CHECKING:
    import torch

SLOTS = 64
READY_AHEAD = 6  # batches in pinned memory


class BatchFeed:
    """An endless supply of batches at a difficulty that may be changed at any time."""

    def __init__(self, buckets: list[Bucket], seed: int, workers: int) -> None:
        self.buckets = buckets
        context = multiprocessing.get_context("fork")
        self._free = context.Queue()
        self._full = context.Queue()
        self._stage = context.Array("d", [0.2, 1.0])  # difficulty, seeing only
        size = max(bucket.nbytes for bucket in buckets)
        self._slots = [mmap.mmap(-1, size) for _ in range(SLOTS)]
        for slot in range(SLOTS):
            self._free.put(slot)
        self._processes = [
            context.Process(target=self._work, args=(f"{seed}/{number}",), daemon=True)
            for number in range(workers)
        ]
        for process in self._processes:
            process.start()
        self._ready: queue.Queue[tuple[int, torch.Tensor]] = queue.Queue(READY_AHEAD)

    def set_stage(self, difficulty: float, seeing: bool) -> None:
        """What workers paint from now on."""
        self._stage[0] = difficulty
        self._stage[1] = float(seeing)

    def start(self, pin_memory: bool, pinning: threading.Lock) -> None:
        """Starts the copying thread. `pinning` is held while memory is pinned, which no graph
        may be recorded alongside."""
        threading.Thread(target=self._copy, args=(pin_memory, pinning), daemon=True).start()

    def next(self) -> tuple[int, "torch.Tensor"]:
        """(bucket index, flat bytes of the batch), waiting for one if need be."""
        return self._ready.get()

    def close(self) -> None:
        for process in self._processes:
            process.terminate()

    def _work(self, seed: str) -> None:
        dice = Dice(seed)
        maker = BatchMaker(dice, fonts.installed())
        while True:
            slot = self._free.get()
            difficulty, seeing = self._stage[0], self._stage[1] > 0
            index = pick_bucket(dice, self.buckets, difficulty, seeing)
            bucket = self.buckets[index]
            buffer = np.frombuffer(self._slots[slot], np.uint8, bucket.nbytes)
            maker.fill(bucket, bucket.view(buffer), difficulty)
            self._full.put((slot, index))

    def _copy(self, pin_memory: bool, pinning: threading.Lock) -> None:
        import torch

        while True:
            slot, index = self._full.get()
            count = self.buckets[index].nbytes
            batch = torch.frombuffer(self._slots[slot], dtype=torch.uint8, count=count)
            with pinning:
                batch = batch.pin_memory() if pin_memory else batch.clone()
            self._free.put(slot)
            self._ready.put((index, batch))
