"""Captured steps of decodes: one launch instead of a thousand.

Theory of operation
-------------------
A decode step of a dense model takes less time on the device than launching its kernels takes on
the host.  So for some batch sizes the whole step, embedding to logits, is captured once; a step is
then one copy of its integers and one replay.  A batch is padded to the next captured size with
rows of length 0 that have no slot: they read nothing and write nothing (fault F25).

All graphs read the one buffer of integers (its fields lie elsewhere for each size) and share one
memory pool: replays are serialised by the stream, so one's temporaries may be another's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from epd.engine.flat_batch import FlatBatch, FlatSequence, header_size, pack, view

SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)


class DecodeGraphs:
    """Graphs of `forward`, which maps a batch of decodes on the device to logits."""

    def __init__(
        self,
        forward: Callable[[FlatBatch], torch.Tensor],
        device: torch.device,
        block_size: int,
        max_running: int,
        max_indices: int,
    ) -> None:
        self._block_size = block_size
        self._sizes = [size for size in SIZES if size <= max_running] or [1]
        longest = header_size(self._sizes[-1], self._sizes[-1], 0)
        self._data = torch.zeros(longest + max_indices, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        memory = None
        for size in reversed(self._sizes):  # the largest first: its pool fits all others
            self._fill([], size)
            flat = view(self._data, (size, size, size, 0), 0)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                forward(flat)  # compiles what is compiled and sizes the libraries' workspaces
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                logits = forward(flat)
            memory = memory or graph.pool()
            self._graphs[size] = (graph, logits)

    def replay(self, sequences: Sequence[FlatSequence]) -> torch.Tensor | None:
        """Logits `[n, vocabulary]`, valid until the next replay; None: no graph fits."""
        size = next((size for size in self._sizes if size >= len(sequences)), None)
        if size is None or not self._fill(sequences, size):
            return None
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[: len(sequences)]

    def _fill(self, sequences: Sequence[FlatSequence], size: int) -> bool:
        data, _ = pack(sequences, self._block_size, 1, padded=size)
        if len(data) > len(self._data):
            return False
        pinned = torch.from_numpy(np.ascontiguousarray(data)).pin_memory()
        self._data[: len(data)].copy_(pinned, non_blocking=True)
        return True
