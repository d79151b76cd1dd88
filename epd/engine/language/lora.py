"""LoRA adapters of a dense language model, mixed in one batch: `--enable-lora`.

Theory of operation
-------------------
Each linear layer of the decoder is put into a `LoraLinear`.  It runs the layer over all rows of the
step, as without adapters.  Then it adds the product of low rank, `B (A x)`, to the rows of each
adapter.  Rows of other sequences are not read and not written, so they keep their bits.  A step
without an adapter is the layer's own product and nothing else; captured steps are of that kind.

Products that are joined (`products.side_by_side`) stay so: each part adds to its own columns.  In
front of weights of eight bits rows come in more bits, for the products of low rank.

Adapters are read and held with the model, before its first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import linear

from epd.config import ConfigError, EngineConfig, LoraConfig
from epd.engine.base import StepSequence
from epd.engine.device.copies import to_device
from epd.engine.language.experts import Mixture
from epd.engine.language.products import Foreign, side_by_side
from epd.engine.sharding import Shard
from epd.engine.weights.fp8 import Fp8Linear
from epd.engine.weights.pieces import candidates
from epd.messages import KvLayout
from epd.model_files.checkpoint import ModelError
from epd.model_files.lora import AdapterFiles, modules_of, read_adapter

if TYPE_CHECKING:
    from epd.engine.adapter import ModelAdapter

Pair = tuple[torch.Tensor, torch.Tensor]  # A [rank, in], and B [out, rank] with the scale in it
Weights = Mapping[str, Pair]  # by the path of a linear layer


class LoraLinear(nn.Module):
    """A linear layer, or several side by side, and what adapters add to it."""

    def __init__(
        self, base: nn.Module, bank: Bank, parts: Sequence[tuple[LoraLinear, slice]] = ()
    ) -> None:
        super().__init__()
        self.base = base
        self.out_features, self.in_features = base.weight.shape
        self.pairs: dict[str, Pair] = {}  # by adapter
        self.bank = bank
        self.parts = parts or ((self, slice(None)),)

    @staticmethod
    def side_by_side(layers: Sequence[LoraLinear]) -> LoraLinear:
        ends = torch.tensor([layer.out_features for layer in layers]).cumsum(0).tolist()
        columns = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        base = side_by_side(*(layer.base for layer in layers))
        return LoraLinear(base, layers[0].bank, list(zip(layers, columns, strict=True)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        for adapter, index in self.bank.rows:
            pairs = [(part.pairs.get(adapter), columns) for part, columns in self.parts]
            if any(pair for pair, _ in pairs):
                own, sums = x.reshape(-1, x.shape[-1])[index], out.view(-1, out.shape[-1])
                for pair, columns in pairs:
                    if pair is not None:
                        sums[index, columns] += linear(linear(own, pair[0]), pair[1])
        return out


class Bank:
    """The adapters that a language model holds, and whose rows are whose in the step under way."""

    def __init__(self, adapter: ModelAdapter, model: nn.Module, config: LoraConfig) -> None:
        self.rows: list[tuple[str, torch.Tensor]] = []  # of the step: int64 `[n]` by adapter
        self._config = config
        self._family = adapter.family
        self._linears: dict[str, LoraLinear] = {}
        self._held: dict[str, None] = {}
        stack: Foreign = adapter.language_model(model)
        (prefix,) = (path for path, module in model.named_modules() if module is stack.layers)
        for path, base in [*stack.layers.named_modules()]:
            if isinstance(base, nn.Linear | Fp8Linear):
                self._linears[f"{prefix}.{path}"] = LoraLinear(base, self)
                stack.layers.set_submodule(path, self._linears[f"{prefix}.{path}"])
        self._device = stack.embed_tokens.weight.device
        self._dtype = stack.embed_tokens.weight.dtype

    @property
    def held(self) -> tuple[str, ...]:
        return tuple(self._held)

    def begin(self, batch: Sequence[StepSequence]) -> None:
        """A step over these sequences' tokens, in this order."""
        found: dict[str, list[int]] = {}
        at = 0
        for sequence in batch:
            end = at + len(sequence.token_ids)
            if sequence.adapter:
                found.setdefault(sequence.adapter, []).extend(range(at, end))
            at = end
        self.rows = [
            (adapter, to_device(rows, torch.int64, self._device)) for adapter, rows in found.items()
        ]

    def read(self, directory: Path | str) -> tuple[str, Weights]:
        """An adapter's digest and numbers, where the model's are.  Raises ModelError."""
        files = read_adapter(directory, self._config.max_lora_rank)
        paths = dict(self._paths(files))
        try:
            return files.digest, {path: self._pair(files, name) for path, name in paths.items()}
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # safetensors raises its own error type from Rust, and OSError
            raise ModelError(f"{directory} cannot be read ({error}); copy it again") from error

    def hold(self, digest: str, weights: Weights) -> None:
        """From the next step on.  Raises ModelError where there are enough already."""
        if digest not in self._held and len(self._held) >= self._config.max_loras:
            raise ModelError(
                f"{len(self._held)} adapters are held, which is all that --max-loras admits"
            )
        self._held[digest] = None
        for path, pair in weights.items():
            self._linears[path].pairs[digest] = pair

    def drop(self, digest: str) -> None:
        self._held.pop(digest, None)
        for layer in self._linears.values():
            layer.pairs.pop(digest, None)

    def _paths(self, files: AdapterFiles) -> Iterator[tuple[str, str]]:
        """Of each module that it changes, here and in its file.  Raises ModelError."""
        for name, change in files.changes.items():
            names = [n.removesuffix(".weight") for n in self._names(name)]
            path = next((n for n in names if n in self._linears), None)
            if path is None:
                is_seen = any(map(self._family.is_vision, names))
                where = "of the vision tower" if is_seen else "none of the decoder's linear layers"
                raise ModelError(
                    f"{files.directory} changes {name}, {where}: only adapters of the decoder's "
                    "linear layers are served"
                )
            layer = self._linears[path]
            found = change.b.shape[0], change.a.shape[1]
            if found != (layer.out_features, layer.in_features):
                raise ModelError(
                    f"{files.directory} changes {name} as if it were {list(found)}, and it is "
                    f"{[layer.out_features, layer.in_features]}: it is another model's adapter"
                )
            yield path, name

    def _names(self, name: str) -> Iterator[str]:
        return candidates(f"{name}.weight", self._family.renames)

    def _pair(self, files: AdapterFiles, name: str) -> Pair:
        from safetensors import safe_open

        change = files.changes[name]
        with safe_open(change.a.file, framework="pt") as reader:
            a, b = reader.get_tensor(change.a_name), reader.get_tensor(change.b_name)
        scaled = b.float() * change.scale
        if not (a.isfinite().all() and scaled.isfinite().all()):
            raise ValueError(f"{name} has numbers that are not finite")
        to = {"dtype": self._dtype, "device": self._device}
        return a.to(**to), scaled.to(**to)


def check(config: EngineConfig, layout: KvLayout, shard: Shard) -> None:
    """Refuse what would compute wrongly with adapters, before anything is read.  Raises
    ConfigError."""
    if shard.size > 1:
        raise ConfigError("--enable-lora is not for several ranks; leave --tensor-parallel-size 1")
    if config.device != "cpu":
        raise ConfigError("--enable-lora is for --device cpu so far")
    if layout.tensors or layout.num_parts == 1:
        raise ConfigError("--enable-lora is for models whose layers are all of common attention")


def bank_of(adapter: ModelAdapter, model: nn.Module, config: LoraConfig) -> Bank:
    """Of a loaded model, with the adapters of the configuration.  Raises ModelError and
    ConfigError."""
    layers: Foreign = adapter.language_model(model).layers  # type: ignore[attr-defined]
    if any(isinstance(module, Mixture) for module in layers.modules()):
        raise ConfigError("--enable-lora is for dense language models, and this has experts")
    bank = Bank(adapter, model, config)
    for directory in modules_of(config.modules).values():
        bank.hold(*bank.read(directory))
    return bank
