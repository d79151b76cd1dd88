"""A LoRA adapter's directory, as PEFT writes it, read without torch.

Theory of operation
-------------------
`adapter_config.json` has the scales of the products, and the safetensors file has two matrices for
each module that is changed: A `[rank, in]` and B `[out, rank]`.  A linear layer then gives
`W x + scale * B (A x)`.  What would compute in another way is refused by the name of its field; so
is a field that has no meaning here and is not empty.

An adapter is its content: its digest covers the scales and the bytes of its file.  Names belong to
the gateway alone.  So a name with other files has other keys, and two hosts with different files
have different adapters.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from epd.families.registry import family_named
from epd.model_files.checkpoint import (
    ModelError,
    Settings,
    TensorEntry,
    is_there,
    read_header,
    read_json,
)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_PREFIX = "base_model.model."
_NAME = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_PLAIN = re.compile(r"[\w.]+")  # anything else is a pattern, and may take any time to match
_DTYPES = frozenset({"F32", "F16", "BF16"})
_CHUNK_NBYTES = 1 << 20
# Without effect on what is computed, or read from the tensors themselves.
_HARMLESS = frozenset(
    "auto_mapping base_model_name_or_path exclude_modules inference_mode layers_pattern "
    "layers_to_transform lora_dropout megatron_core peft_version qalora_group_size revision "
    "target_modules task_type".split()
)
_READ = frozenset(
    "alpha_pattern init_lora_weights lora_alpha peft_type r rank_pattern use_rslora".split()
)
_INITS = (True, False, None, "gaussian", "orthogonal", "eva")  # others change the base, too
_NOTHING: tuple[object, ...] = (None, False, "", "none", 0, [], {})


@dataclass(frozen=True, slots=True)
class LowRank:
    """Of one module."""

    a: TensorEntry
    b: TensorEntry
    a_name: str
    b_name: str
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    directory: Path
    digest: str  # 32 hex digits
    changes: Mapping[str, LowRank]  # by the module's name, as PEFT saved it

    def changes_tower(self, model_type: str) -> bool:
        """Whether some module is one of that model's vision part."""
        if (family := family_named(model_type)) is None:
            return False
        names = (one for name in self.changes for one in family.candidates(f"{name}.weight"))
        return any(map(family.is_vision, names))

    @property
    def max_rank(self) -> int:
        return max(change.rank for change in self.changes.values())


def modules_of(modules: Iterable[str]) -> dict[str, str]:
    """Name to directory, of what `--lora-modules` is given.  Raises ModelError."""
    found: dict[str, str] = {}
    for text in modules:
        name, _, directory = text.partition("=")
        if not name or not directory:
            raise ModelError(f"--lora-modules {text}: write NAME=DIR")
        if name in found:
            raise ModelError(f"--lora-modules names {name} twice; give each adapter its own name")
        found[name] = directory
    return found


def read_adapter(directory: Path | str, max_rank: int) -> AdapterFiles:
    """All but the numbers; reads the file once.  Raises ModelError."""
    directory = Path(directory)
    if not directory.is_dir():
        raise ModelError(f"adapter directory {directory} does not exist; give its path")
    if not is_there(directory / CONFIG):
        raise ModelError(f"{directory} has no {CONFIG}; give what PEFT's save_pretrained writes")
    file = directory / WEIGHTS
    if not is_there(file):
        pickled = is_there(directory / _PICKLED)
        remedy = f"{_PICKLED} is a pickle: save it as safetensors" if pickled else "copy it again"
        raise ModelError(f"{directory} has no {WEIGHTS}; {remedy}")
    config = read_json(directory / CONFIG)
    if wrong := _fault(config):
        raise ModelError(f"{directory / CONFIG}: {wrong}")
    changes = _changes(file, read_header(file), config)
    files = AdapterFiles(directory, _digest(file, config), changes)
    if files.max_rank > max_rank:
        raise ModelError(
            f"{directory} has rank {files.max_rank}, above {max_rank}: raise --max-lora-rank"
        )
    return files


def read_all(modules: Iterable[str], max_rank: int) -> dict[str, AdapterFiles]:
    """By name, of what `--lora-modules` is given.  Raises ModelError."""
    return {name: read_adapter(at, max_rank) for name, at in modules_of(modules).items()}


def read_below(root: str, path: str, max_rank: int) -> AdapterFiles:
    """As `read_adapter`, of a directory that a client names: below `root`, with links followed.
    Raises ModelError, without the path of `root`."""
    top = Path(root).resolve()
    try:
        directory = (top / path).resolve()
        if directory == top or top not in directory.parents:
            raise ModelError(f"{path} is not below the directory of adapters (--lora-runtime-dir)")
        return read_adapter(directory, max_rank)
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, links in a circle
        raise ModelError(f"{path} is no directory that can be read") from error
    except ModelError as error:
        raise ModelError(str(error).replace(f"{top}/", "")) from error


def _fault(config: Settings) -> str:
    if config.get("peft_type") != "LORA":
        return f"peft_type {config.get('peft_type')!r} is not served; only LORA is"
    for name, value in config.items():
        if name == "init_lora_weights":
            if value not in _INITS:
                return f"{name} {value!r} changes the model's own weights, which stay as they are"
        elif name not in _HARMLESS | _READ and value not in _NOTHING:
            return f"{name} {value!r} is not served; train it without, or merge it into the model"
    numbers = [config.get("r"), config.get("lora_alpha")]
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict) or not all(map(_PLAIN.fullmatch, pattern)):
            return f"{name} has other keys than names of modules, or their ends"
        numbers += pattern.values()
    if not all(map(_is_number, numbers)):
        return "r, lora_alpha and the numbers of patterns must be positive numbers"
    return ""


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < 1 << 24  # type: ignore[operator]


def _changes(
    file: Path, entries: Mapping[str, TensorEntry], config: Settings
) -> dict[str, LowRank]:
    found: dict[str, dict[str, str]] = {}
    for name, entry in entries.items():
        parts = _NAME.fullmatch(name.removeprefix(_PREFIX))
        if parts is None:
            raise ModelError(f"{file}: tensor {name} is none of a linear layer's LoRA; not served")
        if entry.dtype not in _DTYPES or len(entry.shape) != 2 or not all(entry.shape):
            raise ModelError(
                f"{file}: tensor {name} is {entry.dtype} {list(entry.shape)}, not a float matrix"
            )
        found.setdefault(parts[1], {})[parts[2]] = name
    if not found:
        raise ModelError(f"{file} changes no layer; copy it again")
    changes = {}
    for module, pair in found.items():
        if len(pair) < 2:
            raise ModelError(f"{file}: of {module} one of A and B is missing; copy it again")
        a, b = entries[pair["A"]], entries[pair["B"]]
        if a.shape[0] != b.shape[1]:
            raise ModelError(f"{file}: of {module} A has rank {a.shape[0]}, and B {b.shape[1]}")
        changes[module] = LowRank(a, b, pair["A"], pair["B"], _scale(module, a.shape[0], config))
    return changes


def _scale(module: str, rank: int, config: Settings) -> float:
    """As in PEFT, where a key of the pattern is a module's name or the end of it."""
    pattern = config.get("alpha_pattern") or {}
    found = (v for key, v in pattern.items() if f".{module}".endswith(f".{key}"))
    alpha = float(next(found, config["lora_alpha"]))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _digest(file: Path, config: Settings) -> str:
    scales = {name: config.get(name) or None for name in ("lora_alpha", "alpha_pattern")}
    scales["use_rslora"] = bool(config.get("use_rslora"))
    digest = hashlib.sha256(json.dumps(scales, sort_keys=True).encode())
    try:
        with file.open("rb") as opened:
            while piece := opened.read(_CHUNK_NBYTES):
                digest.update(piece)
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error}); restore the file") from error
    return digest.hexdigest()[:32]
