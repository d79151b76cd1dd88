"""A checkpoint directory, read without torch: configs and tensor headers.

Theory of operation
-------------------
A safetensors file begins with eight bytes of length and a
JSON header that names every tensor with its dtype, shape and place.  Reading the headers costs a
millisecond, so everything that can be wrong with a directory (no config, another architecture, a
missing shard, a wrong-shaped tensor) is said in one sentence before any weight is read, and the
gateway, which has no torch, can compute the same fingerprint as the workers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd.errors import Told

Settings = Mapping[str, Any]  # as read from JSON
MAX_HEADER_NBYTES = 100 << 20  # safetensors' own limit
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class ModelError(Told):
    """A model directory cannot be served; the text names the file or tensor and the remedy.

    One line, also when it quotes an error of a library that likes to print several.
    """

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(text.split()))


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: file, safetensors dtype name ("BF16", "F32", ...), shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a directory holds, without the weights."""

    directory: Path
    config: dict[str, Any]
    preprocessor: dict[str, Any]  # empty for text-only models
    video_preprocessor: dict[str, Any]  # likewise
    tensors: dict[str, TensorEntry]

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object from a file.  Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); restore the file") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object; restore the file")
    return value


def read_config(directory: Path | str) -> dict[str, Any]:
    """config.json of a model directory.  Raises ModelError."""
    directory = Path(directory)
    if not directory.is_dir():
        raise ModelError(
            f"model directory {directory} does not exist; give the path of a directory"
        )
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{directory} has no config.json; give a Hugging Face checkpoint directory"
        )
    config = read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} names no model_type; give a Hugging Face checkpoint directory")
    return config


def read_preprocessor(directory: Path | str) -> dict[str, Any]:
    """The image processor's settings, found as transformers finds them; {} if there are none."""
    return _processor(directory, "image_processor", "preprocessor_config.json")


def read_video_preprocessor(directory: Path | str) -> dict[str, Any]:
    """The video processor's settings, found as transformers finds them; {} if there are none."""
    found = _processor(directory, "video_processor", "video_preprocessor_config.json")
    return found or read_preprocessor(directory)


def _processor(directory: Path | str, section: str, older: str) -> dict[str, Any]:
    """From processor_config.json, where newer releases keep all processors, else from `older`."""
    path = Path(directory) / "processor_config.json"
    nested = read_json(path).get(section) if path.is_file() else None
    if isinstance(nested, dict):
        return nested
    path = Path(directory) / older
    return read_json(path) if path.is_file() else {}


def read_eos_token_ids(directory: Path | str) -> tuple[int, ...]:
    """From generation_config.json, as generate does, else from config.json.  Raises ModelError."""
    directory = Path(directory)
    config = read_config(directory)
    path = directory / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    for source in (generation, config, config.get("text_config", {})):
        found = source.get("eos_token_id")
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list) and found:
            return tuple(found)
    return ()


def read_header(path: Path) -> dict[str, Any]:
    """Header of a safetensors file: tensor name to dtype, shape, offsets.  Raises ModelError."""
    try:
        with path.open("rb") as file:
            (nbytes,) = struct.unpack("<Q", file.read(8))
            if nbytes > MAX_HEADER_NBYTES:
                raise ValueError(f"header of {nbytes} bytes")
            header = json.loads(file.read(nbytes))
            data_nbytes = path.stat().st_size - 8 - nbytes
        header.pop("__metadata__", None)
        needed = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if needed > data_nbytes:
            raise ValueError(f"{data_nbytes} bytes of tensors where {needed} are announced")
    except (OSError, ValueError, struct.error, KeyError, AttributeError, TypeError) as error:
        raise ModelError(
            f"{path} is not a whole safetensors file ({error}); copy it again"
        ) from error
    return dict(header)


def weight_files(directory: Path | str) -> list[Path]:
    """Safetensors files of a directory, single or sharded, in name order.  Raises ModelError."""
    directory = Path(directory)
    index = directory / _INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map; restore the file")
        files = [directory / name for name in sorted(set(weight_map.values()))]
    elif (directory / _SINGLE).is_file():
        files = [directory / _SINGLE]
    else:
        raise ModelError(f"{directory} has no {_SINGLE} and no {_INDEX}; only safetensors are read")
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is missing though {_INDEX} lists it; copy it again")
    return files


def has_weights(directory: Path | str) -> bool:
    """False for a directory that only describes a model (see `--load-format dummy`)."""
    return any((Path(directory) / name).is_file() for name in (_INDEX, _SINGLE))


def read_checkpoint(directory: Path | str, *, weights: bool = True) -> Checkpoint:
    """Everything but the weights; without their headers too on request.  Raises ModelError."""
    directory = Path(directory)
    config = read_config(directory)
    tensors: dict[str, TensorEntry] = {}
    for file in weight_files(directory) if weights else ():
        for name, entry in read_header(file).items():
            tensors[name] = TensorEntry(file, entry["dtype"], tuple(entry["shape"]))
    return Checkpoint(
        directory,
        config,
        read_preprocessor(directory),
        read_video_preprocessor(directory),
        tensors,
    )
