"""Where the memory of a GPU goes: decided once, at start, and logged as a table.

Theory of operation
-------------------
Weights are loaded and memory for an encoder's rows is reserved.  The largest step and the largest
vision batch run once, so that torch's allocator holds what activations can ever need.  What it has
beside that it gives back where weights are laid side by side, or the pool would go without.  The KV
pool gets what is free then of this process's share, less a reserve for graphs and libraries.  KV of
other GPUs arrives in the pool itself.  An instance without room for a token fails before it joins.
Only an image of more patches than a batch may have can meet too little memory later: it fails
alone."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import nn

from epd.config import ConfigError, EngineConfig
from epd.messages import KvLayout
from epd.model_files.config_sizes import FEW_BITS, PRODUCTS

logger = logging.getLogger(__name__)
# Captured graphs, workspaces of libraries, fragments, and sums of decodes' parts: some MiB, however
# many sequences there are.
RESERVE_NBYTES = 2 << 30
LIFTED_NBYTES = 256 << 20  # for rows ahead of the steps that read them
SMALL_POOL = 8  # steps of prompts; a smaller one is told of


class KvPlan(NamedTuple):
    num_blocks: int
    num_landing_blocks: int


def kv_plan(
    config: EngineConfig, layout: KvLayout, later_nbytes: int = 0, wide_nbytes: int = 0
) -> KvPlan:
    """Blocks of the KV pool, and of the host's memory in which KV arrives.  Raises ConfigError when
    no token has room.

    With `kv_nbytes` 0, to be asked when everything else is in place but `later_nbytes`: mirrors,
    which the data plane will take of the device, and decoders of films.  `wide_nbytes`: of linear
    layers that could have fewer bits.
    """
    nbytes = config.kv_nbytes
    if not nbytes:
        free, total = torch.cuda.mem_get_info(config.device)
        nbytes = int(free - (1 - config.gpu_memory_utilization) * total) - RESERVE_NBYTES
        nbytes -= later_nbytes
    least = layout.num_state_blocks + layout.rows.count(1)
    least_nbytes = least * layout.block_nbytes
    if nbytes < least_nbytes:
        remedy = (
            "raise it"
            if config.kv_nbytes
            else "raise --gpu-memory-utilization, lower engine.max_step_tokens, "
            "encode.max_batch_patches or --encoder-cache-device-nbytes, share the model out with "
            f"--tensor-parallel-size{_fitting(least_nbytes - nbytes, wide_nbytes)}"
        )
        raise ConfigError(
            f"engine.kv_nbytes is {max(nbytes, 0)}, less than the {least_nbytes} bytes of "
            f"{least} KV blocks that a sequence has at least; {remedy}"
        )
    num_blocks = nbytes // layout.block_nbytes
    return KvPlan(num_blocks, min(num_blocks, config.kv_landing_nbytes // layout.block_nbytes))


def _fitting(lacking_nbytes: int, wide_nbytes: int) -> str:
    """A clause with the first format of linear layers that would leave so much; empty: none."""
    for name, number_nbytes in FEW_BITS.items():
        if (left := wide_nbytes * (1 - number_nbytes / 2)) >= lacking_nbytes:  # of 16 bits
            return (
                f", or take its linear layers in {name}, which leaves {left / 2**30:.1f} GiB more"
            )
    return ""


def linear_nbytes(layers: torch.nn.Module) -> int:
    """Of the products of a decoder's layers that are in 16 or 32 bits."""
    named = layers.named_modules()
    plain = [m for n, m in named if isinstance(m, nn.Linear) and n.rpartition(".")[2] in PRODUCTS]
    return sum(module.weight.nbytes for module in plain)


def held_nbytes(model: torch.nn.Module, kind: str = "") -> int:
    """What its parameters take, or those on this kind of device; those that share memory, such as a
    tied head, count once."""
    each = (p.untyped_storage() for p in model.parameters() if kind in ("", p.device.type))
    return sum({memory.data_ptr(): memory.nbytes() for memory in each}.values())


def log_table(
    device: str,
    weights_nbytes: int,
    kv_nbytes: int,
    kv_tokens: int,
    max_step_tokens: int,
    rows_nbytes: int,
    *,
    kv_is_torchs: bool,
) -> None:
    """One line per use of the device's memory, at the end of loading."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device) + (0 if kv_is_torchs else kv_nbytes)
    rest = reserved - weights_nbytes - kv_nbytes - rows_nbytes
    lines = [
        ("weights of the language model", weights_nbytes, ""),
        ("KV pool", kv_nbytes, f"{kv_tokens} tokens"),
        ("rows of images", rows_nbytes, "the encoder's first tier, and a quarter more"),
        ("vision tower, activations, graphs", rest, "as the largest step and batch need"),
        ("contexts, other processes", total - free - reserved, ""),
        ("free", free, f"of {total / 2**30:.1f} GiB on {torch.cuda.get_device_name(device)}"),
    ]
    for name, nbytes, note in lines:
        logger.info("memory of %s: %-40s %7.2f GiB  %s", device, name, nbytes / 2**30, note)
    if kv_tokens < SMALL_POOL * max_step_tokens:
        logger.warning(
            "the KV pool of %s has room for %d tokens, so few requests run at a time; for more, "
            "raise --gpu-memory-utilization, lower --encoder-cache-device-nbytes, or share the "
            "model out with --tensor-parallel-size",
            device,
            kv_tokens,
        )
