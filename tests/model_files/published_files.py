"""The files of a published checkpoint, as long as they are and without their bytes."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

from tests.model_files.published_tensors import Shape


def write_headers(directory: Path, tensors: Mapping[str, Shape], num_files: int) -> None:
    """An index and files that have headers but no bytes: holes of a file system, as long as the
    weights would be."""
    directory.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    share = -(-len(names) // num_files)
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        header, end = {}, 0
        for name in names[number * share : (number + 1) * share]:
            begin, end = end, end + 2 * math.prod(tensors[name])
            header[name] = {
                "dtype": "BF16", "shape": list(tensors[name]), "data_offsets": [begin, end],
            }  # fmt: skip
            weight_map[name] = file
        text = json.dumps(header).encode()
        with (directory / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + end)
    total = sum(2 * math.prod(shape) for shape in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
