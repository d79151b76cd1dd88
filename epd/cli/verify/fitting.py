"""Does a model fit twice?  Both sides are in memory at once while logits are compared."""

from __future__ import annotations

from typing import NamedTuple

from epd.cli.boundary import CommandFailed
from epd.cli.start.preflight import DTYPE_NBYTES, GIB, memory_nbytes
from epd.families.registry import family_of
from epd.model_files.checkpoint import Checkpoint
from epd.model_files.config_sizes import Sizes, counted

KV_NBYTES = 256 << 20
PROCESS_NBYTES = 600 << 20  # of torch, transformers and activations


class Need(NamedTuple):
    """Bytes of memory: of all but layers, for each layer, and how many layers there are."""

    fixed_nbytes: int
    layer_nbytes: int
    num_layers: int

    def of(self, num_layers: int) -> int:
        return self.fixed_nbytes + num_layers * self.layer_nbytes


def need_of(checkpoint: Checkpoint, dtype: str) -> Need:
    """Of both sides, which is as much as one side in twice the bits; later two processes have the
    language model."""
    family = family_of(checkpoint.directory, checkpoint.config)
    sizes = Sizes(checkpoint.directory / "config.json", checkpoint.config, family)
    counts = counted(family, sizes).nbytes(DTYPE_NBYTES[dtype])
    num_layers = sizes("layers")
    layer_nbytes = 2 * counts.layers // num_layers
    fixed_nbytes = 2 * (counts.tower + counts.outside)
    return Need(fixed_nbytes + 2 * KV_NBYTES + 4 * PROCESS_NBYTES, layer_nbytes, num_layers)


def check_fits(need: Need, num_layers: int, free_nbytes: int, where: str) -> None:
    """Raises CommandFailed, with the layers that would fit."""
    if need.of(num_layers) <= free_nbytes:
        return
    fitting = (free_nbytes - need.fixed_nbytes) // max(1, need.layer_nbytes)
    remedy = "use a machine with more memory, or fewer bits for each number: --dtype bfloat16"
    if fitting >= 1:
        remedy = f"compare its first layers, both sides cut alike: --layers {fitting}"
    raise CommandFailed(
        f"both sides of {num_layers} layers need {need.of(num_layers) / GIB:.1f} GiB, and {where} "
        f"has {free_nbytes / GIB:.1f} GiB free; {remedy}"
    )


def free_nbytes(device: str) -> int:
    if device == "cpu":
        return memory_nbytes()
    import torch

    return int(torch.cuda.mem_get_info(device)[0])
