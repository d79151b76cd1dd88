"""Where the memory of a GPU goes, decided once, at start, and said in a table.

Theory of operation
-------------------
Weights are loaded, memory for an encoder's rows is reserved, and the largest step and the largest
vision batch run once, so that torch's allocator holds what activations can ever need.  What is free
then, within the share that this process may use, less a reserve for graphs and libraries, becomes
the KV pool.  An instance that cannot serve says so before it joins; none runs out of memory later.
"""

from __future__ import annotations

import logging

import torch

from epd.config import ConfigError, EngineConfig
from epd.messages import KvLayout

logger = logging.getLogger(__name__)
# Captured graphs, workspaces of libraries, fragments, and sums of decodes' parts: some MiB, however
# many sequences there are.
RESERVE_NBYTES = 2 << 30


def kv_blocks(config: EngineConfig, layout: KvLayout, mirrored_nbytes: int = 0) -> int:
    """Blocks of the KV pool.  Raises ConfigError when not even one token has room.

    With `kv_nbytes` 0, to be asked when everything else is in place but what the data plane takes
    on the device (`mirrored_nbytes`).
    """
    nbytes = config.kv_nbytes
    if not nbytes:
        free, total = torch.cuda.mem_get_info(config.device)
        nbytes = int(free - (1 - config.gpu_memory_utilization) * total) - RESERVE_NBYTES
        nbytes -= mirrored_nbytes
    least_nbytes = (layout.num_state_blocks + 1) * layout.block_nbytes
    if nbytes < least_nbytes:
        remedy = (
            "raise it"
            if config.kv_nbytes
            else "raise engine.gpu_memory_utilization, or lower engine.max_step_tokens and "
            "encode.max_batch_patches"
        )
        raise ConfigError(
            f"engine.kv_nbytes is {max(nbytes, 0)}, less than the {least_nbytes} bytes of "
            f"{layout.num_state_blocks + 1} KV blocks that a sequence has at least; {remedy}"
        )
    return nbytes // layout.block_nbytes


def log_table(
    device: str, weights_nbytes: int, kv_nbytes: int, kv_tokens: int, rows_nbytes: int
) -> None:
    """One line per use of the device's memory, at the end of loading."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    rest = reserved - weights_nbytes - kv_nbytes - rows_nbytes
    lines = [
        ("weights of the language model", weights_nbytes, ""),
        ("KV pool", kv_nbytes, f"{kv_tokens} tokens"),
        ("rows of images", rows_nbytes, "the encoder's first tier, and a quarter more"),
        ("vision tower, activations, graphs", rest, "as the largest step and batch need"),
        ("not torch's: contexts, other processes", total - free - reserved, ""),
        ("free", free, f"of {total / 2**30:.1f} GiB on {torch.cuda.get_device_name(device)}"),
    ]
    for name, nbytes, note in lines:
        logger.info("memory of %s: %-40s %7.2f GiB  %s", device, name, nbytes / 2**30, note)
