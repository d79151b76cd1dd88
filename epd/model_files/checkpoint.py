"""A checkpoint directory, read without torch: configs and tensor headers.

Theory of operation
-------------------
A safetensors file begins with eight bytes of length and a JSON header that names every tensor with
its dtype, shape and place.  Reading the headers costs a millisecond, so each fault of a directory
(no config, another architecture, a missing shard, a wrong-shaped tensor) is one sentence before any
weight is read.  The gateway, which has no torch, computes the same fingerprint as the workers.

A directory may have come from anybody.  What is read is a regular file of a bounded size, or a link
to one as in the cache of a hub.  A file that another one names lies in the directory itself.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from epd.errors import Told
from epd.model_files.model_config import Ends, fault

Settings = Mapping[str, Any]  # as read from JSON
MAX_HEADER_NBYTES = 100 << 20  # safetensors' own limit
MAX_FILE_NBYTES = 64 << 20  # of JSON and templates; the largest tokenizers have half as much
MAX_SENTENCE = 1000  # characters: names in files have any length
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_OTHER_WEIGHTS = {".bin", ".ckpt", ".gguf", ".npz", ".onnx", ".pt", ".pth", ".safetensors"}


class ModelError(Told):
    """A model directory cannot be served; the text names the file or tensor and the remedy.

    One line, also when it quotes an error of a library that likes to print several.
    """

    def __init__(self, text: str) -> None:
        line = " ".join(text.split())
        if len(line) > MAX_SENTENCE:
            line = f"{line[: MAX_SENTENCE - 300]} ... {line[-300:]}"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: file, safetensors dtype name ("BF16", "F32", ...), shape, bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int] = (0, 0)


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


_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[tuple[_Natural, ...], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Natural, _Natural]


_NBITS = {"BOOL": 8, "C64": 64, "F4": 4} | {
    kind: nbits
    for nbits, kinds in {
        6: "F6_E2M3 F6_E3M2",
        8: "U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
        16: "I16 U16 F16 BF16",
        32: "I32 U32 F32",
        64: "I64 U64 F64",
    }.items()
    for kind in kinds.split()
}


def reason(error: BaseException) -> str:
    """Its words, which for a recursion differ with the depth that it began at."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def is_there(path: Path) -> bool:
    """Also what cannot be read: a directory, a pipe, a link to nowhere."""
    return os.path.lexists(path)


def _opened(path: Path) -> tuple[BinaryIO, int]:
    """A regular file, and its size; nothing else is waited for.  Raises OSError and ValueError."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    info = os.fstat(file.fileno())
    if not stat.S_ISREG(info.st_mode):
        file.close()
        raise ValueError("it is no regular file")
    return file, info.st_size


def read_bytes(path: Path, max_nbytes: int = MAX_FILE_NBYTES) -> bytes:
    """Of a regular file, whose size is looked at before it is read.  Raises ModelError."""
    try:
        file, nbytes = _opened(path)
        with file:
            if nbytes > max_nbytes:
                raise ValueError(f"it has {nbytes} bytes, and at most {max_nbytes} are read")
            return file.read(max_nbytes)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); restore the file") from error


def read_text(path: Path) -> str:
    """Raises ModelError."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} cannot be read ({error}); restore the file") from error


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object from a file.  Raises ModelError."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read ({reason(error)}); restore the file") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object; restore the file")
    return value


def read_optional(path: Path) -> dict[str, Any]:
    """{} where there is no such file.  Raises ModelError."""
    return read_json(path) if is_there(path) else {}


def read_config(directory: Path | str) -> dict[str, Any]:
    """config.json of a model directory.  Raises ModelError."""
    directory = Path(directory)
    if not directory.is_dir():
        raise ModelError(
            f"model directory {directory} does not exist; give the path of a directory"
        )
    path = directory / "config.json"
    if not is_there(path):
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
    nested = read_optional(Path(directory) / "processor_config.json").get(section)
    return nested if isinstance(nested, dict) else read_optional(Path(directory) / older)


def read_eos_token_ids(directory: Path | str) -> tuple[int, ...]:
    """All that generation_config.json and config.json name, each once.  Raises ModelError.

    Files of a fine-tune may disagree, and a model whose end was left out never stops (F75).  Each
    is one of the vocabulary's tokens: no request could stop at another.
    """
    directory = Path(directory)
    config = read_config(directory)
    text = config.get("text_config") or {}
    path = directory / "generation_config.json"
    size = text.get("vocab_size", config.get("vocab_size"))
    ends: dict[int, None] = {}
    for file, section, source in (
        (path, "", read_optional(path)),
        (directory / "config.json", "", config),
        (directory / "config.json", "text_config.", text),
    ):
        found = source.get("eos_token_id")
        if found is None or found == []:
            continue
        wrong = fault(found, Ends, f"{section}eos_token_id")
        ids = tuple(found) if isinstance(found, list) else (found,)
        if not wrong and isinstance(size, int) and max(ids) >= size:
            wrong = f"{section}eos_token_id: {max(ids)} is no token of a vocabulary of {size}"
        if wrong:
            raise ModelError(f"{file}: {wrong}; restore the file")
        ends |= dict.fromkeys(ids)
    return tuple(ends)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Header of a safetensors file: its tensors by name.  Raises ModelError.

    As safetensors itself has it: tensors lie side by side and fill the file.
    """
    try:
        file, size = _opened(path)
        with file:
            (nbytes,) = struct.unpack("<Q", file.read(8))
            if nbytes > min(MAX_HEADER_NBYTES, size):
                raise ValueError(f"header of {nbytes} bytes")
            text = file.read(nbytes)
        if text.count(b'"__metadata__"') > 1:
            raise ValueError("__metadata__ is there twice")
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        read = msgspec.json.Decoder(_Entry).decode
        found = {
            name: TensorEntry(path, entry.dtype, entry.shape, entry.data_offsets)
            for name, value in raw.items()
            for entry in (_named(name, read, value),)
        }
        _check_places(found, size - 8 - nbytes)
    except (OSError, ValueError, struct.error, RecursionError, msgspec.MsgspecError) as error:
        raise ModelError(
            f"{path} is not a whole safetensors file ({reason(error)}); copy it again"
        ) from error
    return found


def _named(name: str, read: Any, text: msgspec.Raw) -> Any:
    try:
        return read(text)
    except msgspec.MsgspecError as error:
        raise ValueError(f"tensor {name}: {error}") from error


def _check_places(entries: Mapping[str, TensorEntry], data_nbytes: int) -> None:
    """Raises ValueError."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, stop = entry.data_offsets
        if entry.dtype not in _NBITS:
            raise ValueError(f"tensor {name} has the unknown dtype {entry.dtype}")
        needed = -(-math.prod(entry.shape) * _NBITS[entry.dtype] // 8)
        if begin != end or stop - begin != needed:
            raise ValueError(
                f"tensor {name} of {needed} bytes lies at {begin} to {stop}, behind {end}"
            )
        end = stop
    if end != data_nbytes:
        raise ValueError(f"{data_nbytes} bytes of tensors where {end} are announced")


def weight_files(directory: Path | str) -> list[Path]:
    """Safetensors files of a directory, single or sharded, in name order.  Raises ModelError."""
    directory = Path(directory)
    index = directory / _INDEX
    if is_there(index):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map; restore the file")
        names: set[str] = set()
        for tensor, name in weight_map.items():
            if isinstance(name, str) and name in names:
                continue
            if not isinstance(name, str) or Path(name).name != name or "\0" in name:
                raise ModelError(
                    f"{index}: weight_map.{tensor}: {name!r} is not the name of a file beside it; "
                    "restore the file"
                )
            names.add(name)
        files = [directory / name for name in sorted(names)]
    elif is_there(directory / _SINGLE):
        files = [directory / _SINGLE]
    else:
        lacks = f"{directory} has no {_SINGLE} and no {_INDEX}"
        raise ModelError(f"{lacks}; only safetensors are read{_others(directory)}")
    for file in files:
        if not is_there(file):
            raise ModelError(f"{file} is missing though {_INDEX} lists it; copy it again")
    return files


def _others(directory: Path) -> str:
    """Weights of other kinds that a directory has, in words."""
    found = sorted(p.name for p in directory.iterdir() if p.suffix in _OTHER_WEIGHTS)
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f", and it holds {', '.join(found[:3])}{more}" if found else ""


def has_weights(directory: Path | str) -> bool:
    """False for a directory that only describes a model (see `--load-format dummy`)."""
    return any(is_there(Path(directory) / name) for name in (_INDEX, _SINGLE))


def read_checkpoint(directory: Path | str, *, weights: bool = True) -> Checkpoint:
    """Everything but the weights; without their headers too on request.  Raises ModelError."""
    directory = Path(directory)
    config = read_config(directory)
    tensors: dict[str, TensorEntry] = {}
    for file in weight_files(directory) if weights else ():
        tensors |= read_header(file)
    return Checkpoint(
        directory,
        config,
        read_preprocessor(directory),
        read_video_preprocessor(directory),
        tensors,
    )
