"""A model of its first layers alone: the same files, with a config.json that has fewer.

So no code is bypassed.  Layers of the language model are cut; the tower stays whole, but for the
levels whose rows are added behind layers that are gone.
"""

from __future__ import annotations

import json
from pathlib import Path

from epd.model_files.checkpoint import ModelError, read_config


def cut(source: Path, num_layers: int, target: Path) -> Path:
    """`target`, empty or made here, with the files of `source`.  Raises ModelError for more layers
    than the model has, and for fewer than there are kinds of them."""
    config = read_config(source)
    text = config.get("text_config") or config
    kinds, whole = text.get("layer_types") or [], text.get("num_hidden_layers")
    if not 1 <= num_layers <= (whole or num_layers):
        raise ModelError(f"--layers {num_layers}: {source} has {whole} layers; give 1 to {whole}")
    if missing := set(kinds) - set(kinds[:num_layers]):
        least = 1 + max(kinds.index(kind) for kind in missing)
        raise ModelError(
            f"--layers {num_layers}: the first layer of {', '.join(sorted(missing))} is behind "
            f"them; give at least {least}"
        )
    text["num_hidden_layers"] = num_layers
    if kinds:
        text["layer_types"] = kinds[:num_layers]
    if dense := text.get("first_k_dense_replace"):
        text["first_k_dense_replace"] = min(num_layers, dense)
    vision = config.get("vision_config") or {}
    if levels := vision.get("deepstack_visual_indexes"):
        vision["deepstack_visual_indexes"] = levels[:num_layers]
    target.mkdir(exist_ok=True)
    for file in source.iterdir():
        if file.name != "config.json":
            (target / file.name).symlink_to(file.resolve())
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return target
