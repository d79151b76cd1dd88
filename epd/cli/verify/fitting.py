"""Does a model fit twice, and what is compared of one that does not: its first layers.

Both sides are in memory at once while logits are compared.  Of fewer layers both sides get the same
files, with a config.json that has fewer, so that no code of either side is bypassed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from epd.cli.boundary import CommandFailed
from epd.cli.start.preflight import DTYPE_NBYTES, memory_nbytes
from epd.model_files.checkpoint import Checkpoint, read_config
from epd.model_files.config_sizes import Sizes, parameters
from epd.model_files.families import family_of

KV_NBYTES = 256 << 20
PROCESS_NBYTES = 600 << 20  # of torch, transformers and activations


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of memory: of all but layers, for each layer, and how many layers there are."""

    fixed_nbytes: int
    layer_nbytes: int
    num_layers: int

    def of(self, num_layers: int) -> int:
        return self.fixed_nbytes + num_layers * self.layer_nbytes


def need_of(checkpoint: Checkpoint, dtype: str) -> Need:
    """While both sides are loaded, or, if that is more, while a process per stage serves."""
    family = family_of(checkpoint.directory, checkpoint.config)
    sizes = Sizes(checkpoint.directory / "config.json", checkpoint.config, family)
    counts = {name: math.prod(shape) for name, shape in parameters(family, sizes).items()}
    num_layers = sizes("layers")
    layered = sum(
        count for name, count in counts.items()
        if not family.is_vision(name) and ".layers." in name
    )  # fmt: skip
    nbytes = DTYPE_NBYTES[dtype]
    # Each of both has all weights; later two processes have the language model.
    layer_nbytes = 2 * layered * nbytes // num_layers
    fixed_nbytes = 2 * (sum(counts.values()) - layered) * nbytes
    return Need(fixed_nbytes + 2 * KV_NBYTES + 4 * PROCESS_NBYTES, layer_nbytes, num_layers)


def check_fits(need: Need, num_layers: int, free_nbytes: int, where: str) -> None:
    """Raises CommandFailed, with the layers that would fit."""
    if need.of(num_layers) <= free_nbytes:
        return
    fitting = (free_nbytes - need.fixed_nbytes) // max(1, need.layer_nbytes)
    remedy = (
        f"compare its first layers, both sides cut alike: --layers {fitting}"
        if fitting >= 1
        else "use a machine with more memory, or fewer bits for each number: --dtype bfloat16"
    )
    raise CommandFailed(
        f"both sides of {num_layers} layers need {_gib(need.of(num_layers))}, and {where} has "
        f"{_gib(free_nbytes)} free; {remedy}"
    )


def free_nbytes(device: str) -> int:
    if device == "cpu":
        return memory_nbytes()
    import torch

    return int(torch.cuda.mem_get_info(device)[0])


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"


def cut(source: Path, num_layers: int, target: Path) -> Path:
    """A directory with the files of `source` and a config.json of so many layers.  Raises
    CommandFailed for fewer layers than there are kinds of them."""
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
