"""LoRA adapters of a dense language model, mixed in one batch: `--enable-lora`.

Theory of operation
-------------------
Each linear layer of the decoder is put into a `LoraLinear`.  It runs the layer over all rows of the
step, as without adapters.  Then it adds the product of low rank, `B (A x)`, to the rows of each
adapter.  Rows of other sequences are not read and not written, so they keep their bits.  A step
without an adapter is the layer's own product and nothing else.

An adapter has a place in the memory of each layer, which is made with the model.  So a captured
step serves any mix: each token's place is a number on the device (`kernels.low_rank`).

Products that are joined (`products.side_by_side`) stay so: each part adds to its own columns.  In
a step with adapters rows come in more bits to weights of eight bits, for the products of low rank.

In a group a rank holds what belongs to its part of a weight: rows of B where outputs are cut,
columns of A where inputs are.  What adapters add is part of the sum over the ranks.

Adapters of the start are read and held with the model, before its first step.  Others come and go
between steps (`adapter_list`), on the thread that launches these, so each step has the adapters of
its launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from epd.config import ConfigError, LoraConfig
from epd.engine.adapter_list import FollowedList
from epd.engine.base import StepSequence
from epd.engine.device.copies import to_device
from epd.engine.kernels import kernels_for
from epd.engine.kernels.low_rank import AdapterStack
from epd.engine.language.experts import Mixture
from epd.engine.language.products import Foreign, side_by_side, takes_fp8
from epd.engine.weights.fp8 import Fp8Linear
from epd.engine.weights.packed_linear import PackedLinear
from epd.messages import KvLayout
from epd.model_files.checkpoint import ModelError
from epd.model_files.family import Family
from epd.model_files.lora import AdapterFiles, modules_of, read_adapter, read_below

if TYPE_CHECKING:
    from epd.engine.adapter import ModelAdapter
    from epd.groups.device.tensor_parallel import Cut

Pair = tuple[torch.Tensor, torch.Tensor]  # A [rank, in], and B [out, rank] with the scale in it
Weights = Mapping[str, Pair]  # by the path of a linear layer
# Of a weight's name and the whole of it, on meta: this rank's part; None: all of it.
CutOf = Callable[[str, torch.Tensor], "Cut | None"]


class LoraLinear(nn.Module):
    """A linear layer, or several side by side, and what adapters add to it."""

    def __init__(self, base: nn.Module, bank: Bank, low: AdapterStack) -> None:
        super().__init__()
        self.base = base
        self.out_features, self.in_features = base.out_features, base.in_features
        self.low = low
        self.bank = bank

    @staticmethod
    def side_by_side(layers: Sequence[LoraLinear]) -> LoraLinear:
        base = side_by_side(*(layer.base for layer in layers))
        low, views = AdapterStack.side_by_side([layer.low for layer in layers])
        for layer, view in zip(layers, views, strict=True):
            layer.low = view
        return LoraLinear(base, layers[0].bank, low)

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias  # type: ignore[return-value]

    @property
    def takes_fp8(self) -> bool:
        return self.bank.places is None and takes_fp8(self.base)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        if (places := self.bank.places_of(x)) is not None:
            rows, sums = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
            kernels_for(x.device.type).add_low_rank(sums, rows, self.low, places)
        return out


class Bank:
    """The adapters that a model holds, and whose rows are whose in the step under way."""

    WHERE = "the decoder's linear layers"

    def __init__(
        self,
        family: Family,
        roots: Mapping[str, nn.Module],
        like: torch.Tensor,
        config: LoraConfig,
        cut: CutOf = lambda name, like: None,
    ) -> None:
        """`roots`: by their paths, modules whose linear layers adapters may change; `like`: of
        their device and dtype."""
        self.places: torch.Tensor | None = None  # of the step's tokens: int32 `[T]`; -1: none
        self._config = config
        self._cut = cut
        self._family = family
        self._linears: dict[str, LoraLinear] = {}
        self._places: dict[str, int] = {}  # of those that are held; replaced, as threads read it
        self._ready: tuple[str, Weights] = ("", {})  # what was read, and is not held yet
        self.followed = FollowedList(lambda: self.held)
        self._device, self._dtype = like.device, like.dtype
        size = config.max_loras, config.max_lora_rank
        for prefix, root in roots.items():
            for path, base in [*root.named_modules()]:
                if isinstance(base, nn.Linear | Fp8Linear | PackedLinear):
                    shape = base.out_features, base.in_features
                    low = AdapterStack.empty(*size, shape, like)
                    self._linears[f"{prefix}.{path}"] = LoraLinear(base, self, low)
                    root.set_submodule(path, self._linears[f"{prefix}.{path}"])

    def hold_from_start(self) -> Self:
        """With the adapters of the configuration.  Raises ModelError."""
        for directory in modules_of(self._config.modules).values():
            self.hold(*self.read(directory))
        return self

    def places_of(self, x: torch.Tensor) -> torch.Tensor | None:
        """Of the rows that a layer gets; None: nothing is added."""
        return self.places

    def place(self, sequence: StepSequence) -> int:
        """-1: it has no adapter."""
        return self._places.get(sequence.adapter, -1)

    def begin(self, batch: Sequence[StepSequence]) -> None:
        """A step over these sequences' tokens, in this order."""
        self.places = None
        if any(sequence.adapter for sequence in batch):
            places = [place for s in batch for place in [self.place(s)] * len(s.token_ids)]
            self.places = to_device(places, torch.int32, self._device)

    @property
    def held(self) -> tuple[str, ...]:
        return tuple(self._places)

    def make_ready(self, digest: str, path: str) -> None:
        """Read this rank's part, which a change puts in.  Raises ModelError."""
        self._ready = digest, self._read_below(digest, path)

    def change(self, dropped: Sequence[str], held: str) -> None:
        """From the next step on.  `held`: what is ready, and nothing is behind this.  Raises
        ModelError."""
        (digest, weights), self._ready = self._ready, ("", {})
        for one in dropped:
            self.drop(one)
        if held != digest and held:
            raise ModelError(f"the adapter {held} is not ready at this rank")
        if held:
            self.hold(held, weights)

    def _read_below(self, digest: str, path: str) -> Weights:
        """Raises ModelError."""
        if not path:
            raise ModelError("this instance does not have the adapter from its start")
        root = self._config.runtime_dir
        files = read_below(root, path, self._config.max_lora_rank)
        if files.digest != digest:
            raise ModelError(f"{path} has other files at this instance than at the gateway")
        try:
            return self._weights(files)
        except ModelError as error:
            raise ModelError(str(error).replace(f"{root}/", "")) from error

    def read(self, directory: Path | str) -> tuple[str, Weights]:
        """An adapter's digest and numbers, where the model's are.  Raises ModelError."""
        files = read_adapter(directory, self._config.max_lora_rank)
        return files.digest, self._weights(files)

    def _weights(self, files: AdapterFiles) -> Weights:
        paths = dict(self._paths(files))
        try:
            return {path: self._pair(files, path, name) for path, name in paths.items()}
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # safetensors raises its own error type from Rust, and OSError
            place = files.directory
            raise ModelError(f"{place} cannot be read ({error}); copy it again") from error

    def hold(self, digest: str, weights: Weights) -> None:
        """From the next step on.  Raises ModelError where there are enough already."""
        places, most = self._places, self._config.max_loras
        if digest not in places and len(places) >= most:
            raise ModelError(
                f"{len(places)} adapters are held, which is all that --max-loras admits"
            )
        free = (place for place in range(most) if place not in places.values())
        place = places[digest] if digest in places else next(free)
        for path, pair in weights.items():
            self._linears[path].low.put(place, *pair)
        self._places = {**places, digest: place}

    def drop(self, digest: str) -> None:
        if digest not in self._places:
            return
        place = self._places[digest]
        self._places = {one: at for one, at in self._places.items() if one != digest}
        for layer in self._linears.values():
            layer.low.ranks[place] = 0

    def _paths(self, files: AdapterFiles) -> Iterator[tuple[str, str]]:
        """Of each module that it changes, here and in its file.  Raises ModelError."""
        for name, change in files.changes.items():
            full = self._family.candidates(f"{name}.weight")
            names = [n.removesuffix(".weight") for n in full]
            if not self.is_own(is_seen=any(map(self._family.is_vision, names))):
                continue
            path = next((n for n in names if n in self._linears), None)
            if path is None:
                raise ModelError(f"{files.directory} changes {name}, none of {self.WHERE}")
            layer = self._linears[path]
            found = change.b.shape[0], change.a.shape[1]
            if self._kept(path, *found) != (layer.out_features, layer.in_features):
                raise ModelError(
                    f"{files.directory} changes {name} as if it were {list(found)}, and it is "
                    f"{[layer.out_features, layer.in_features]}: it is another model's adapter"
                )
            yield path, name

    @staticmethod
    def is_own(*, is_seen: bool) -> bool:
        """Whether it changes a module of this name; `is_seen`: of a vision part."""
        return not is_seen

    def _kept(self, path: str, *sizes: int) -> tuple[int, ...]:
        """Of a weight's sizes, those of this rank's part."""
        layer = self._linears[path]
        if sizes[0] < layer.out_features or sizes[1] < layer.in_features:
            return sizes  # no part of it
        cut = self._cut(f"{path}.weight", torch.empty(sizes, device="meta"))
        return sizes if cut is None else tuple(cut.of(torch.empty(sizes, device="meta")).shape)

    def _pair(self, files: AdapterFiles, path: str, name: str) -> Pair:
        from safetensors import safe_open

        change = files.changes[name]
        with safe_open(change.a.file, framework="pt") as reader:
            a, b = reader.get_tensor(change.a_name), reader.get_tensor(change.b_name)
        whole = torch.empty(len(b), a.shape[1], device="meta")
        if cut := self._cut(f"{path}.weight", whole):
            a, b = (cut.of(a), b) if cut.dim else (a, cut.of(b))
        scaled = b.float() * change.scale
        if not (a.isfinite().all() and scaled.isfinite().all()):
            raise ValueError(f"{name} has numbers that are not finite")
        to = {"dtype": self._dtype, "device": self._device}
        return a.to(**to, copy=True), scaled.to(**to)  # the file may change


def check(layout: KvLayout) -> None:
    """Refuse what would compute wrongly with adapters, before anything is read.  Raises
    ConfigError."""
    if layout.tensors or layout.num_parts == 1:
        raise ConfigError("--enable-lora is for models whose layers are all of common attention")


def bank_of(adapter: ModelAdapter, model: nn.Module, config: LoraConfig, cut: CutOf) -> Bank:
    """Of a loaded model, with the adapters of the configuration.  `cut` gives a rank's part of a
    weight.  Raises ModelError and ConfigError."""
    stack: Foreign = adapter.language_model(model)
    if any(isinstance(module, Mixture) for module in stack.layers.modules()):
        raise ConfigError("--enable-lora is for dense language models, and this has experts")
    (prefix,) = (path for path, module in model.named_modules() if module is stack.layers)
    like = stack.embed_tokens.weight
    return Bank(adapter.family, {prefix: stack.layers}, like, config, cut).hold_from_start()
