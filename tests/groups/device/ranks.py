"""Ranks as processes: each runs the same function over its own shard, joined by gloo."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from epd.engine.preload import NVML_ANSWERS
from tests.patience import PATIENCE_S

SIZES = (1, 2, 4)
IMPORTED = [  # once for all
    "tests.groups.device.ranks_cases",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe",
    "transformers.models.kimi_k25.modeling_kimi_k25",
    "transformers.models.qwen3_5.modeling_qwen3_5",
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
]


class Ranks:
    """As many processes as the largest group has ranks; smaller groups are the first of them."""

    def __init__(
        self,
        directory: Path,
        count: int = SIZES[-1],
        backend: str = "gloo",
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`directory`: where they find each other; `backend`: nccl, with a GPU for each.
        `patience_s`: for what they are asked to do."""
        self._patience_s = patience_s
        os.environ.update(NVML_ANSWERS)
        context = multiprocessing.get_context("forkserver")  # a fork of threads would be unsound
        context.set_forkserver_preload(IMPORTED)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, count, backend, directory, there, patience_s),
                daemon=True,
            )
            process.start()
            there.close()  # so that the end of the process is seen
            self._pipes.append(here)
            self._processes.append(process)
        self._results(count)

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(shard, *arguments)` gives on each rank of a group of this size."""
        for pipe in self._pipes[:size]:
            pipe.send((size, function, arguments))
        return self._results(size)

    def _results(self, size: int) -> list[Any]:
        results = []
        for rank, pipe in enumerate(self._pipes[:size]):
            assert pipe.poll(self._patience_s), f"rank {rank} of {size} does not answer"
            works, result = pipe.recv()
            assert works, f"rank {rank} of {size}: {result}"
            results.append(result)
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(PATIENCE_S)


def _serve(
    rank: int, count: int, backend: str, directory: Path, pipe: Connection, patience_s: float
) -> None:
    import torch
    from torch import distributed

    from epd.engine.sharding import WHOLE, ProcessGroupCollectives, Shard

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        backend,
        init_method=f"file://{directory / 'ranks'}",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=patience_s),
    )
    shards = {1: WHOLE}
    for size in (size for size in SIZES[1:] if size <= count):
        group = distributed.new_group(range(size))
        if rank < size:
            shards[size] = Shard(rank, size, ProcessGroupCollectives(group))
    pipe.send((True, None))
    while True:
        size, function, arguments = pipe.recv()
        try:
            pipe.send((True, function(shards[size], *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
