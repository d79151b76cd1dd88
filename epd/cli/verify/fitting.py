"""Does a model fit twice, and what is compared of one that does not: its first layers.

Both sides are in memory at once while logits are compared.  Of fewer layers both sides get the same
files, with a config.json that has fewer, so that no code of either side is bypassed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

from epd.cli.boundary import CommandFailed
from epd.cli.start.preflight import DTYPE_NBYTES, GIB, memory_nbytes
from epd.families.registry import family_of
from epd.model_files.checkpoint import Checkpoint, read_config
from epd.model_files.config_sizes import Sizes, parameters

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
    counts = {name: math.prod(shape) for name, shape in parameters(family, sizes).items()}
    layered = sum(
        count for name, count in counts.items()
        if ".layers." in name and not family.is_vision(name)
    )  # fmt: skip
    both, num_layers = 2 * DTYPE_NBYTES[dtype], sizes("layers")
    fixed_nbytes = both * (sum(counts.values()) - layered) + 2 * KV_NBYTES + 4 * PROCESS_NBYTES
    return Need(fixed_nbytes, both * layered // num_layers, num_layers)


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


def cut(source: Path, num_layers: int, target: Path) -> Path:
    """A directory with the files of `source` and a config.json of so many layers.  Raises
    CommandFailed for fewer layers than there are kinds of them."""
    target.mkdir()
    for file in source.iterdir():
        if file.name != "config.json":
            (target / file.name).symlink_to(file.resolve())
    config = read_config(source)
    text = config.get("text_config") or config
    kinds = text.get("layer_types") or []
    if missing := set(kinds) - set(kinds[:num_layers]):
        least = 1 + max(kinds.index(kind) for kind in missing)
        raise CommandFailed(
            f"--layers {num_layers}: the first layer of {', '.join(sorted(missing))} is behind "
            f"them; give at least {least}"
        )
    text["num_hidden_layers"] = num_layers
    if kinds:
        text["layer_types"] = kinds[:num_layers]
    if "first_k_dense_replace" in text:
        text["first_k_dense_replace"] = min(num_layers, text["first_k_dense_replace"])
    vision = config.get("vision_config") or {}
    if levels := vision.get("deepstack_visual_indexes"):
        vision["deepstack_visual_indexes"] = levels[:num_layers]
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return target
