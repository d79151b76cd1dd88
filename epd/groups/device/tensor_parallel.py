"""What each rank of a group holds of a language model, and where the ranks' results are joined.

Theory of operation
-------------------
transformers lists the weights of each family that are cut (`_tp_plan` of a model): by output
("colwise": query, key, value, gate, up, head) or by input ("rowwise": those behind them).  A rank
computes its heads and its part of an MLP; what a rowwise product gives is a part of a sum over all
ranks.  So a layer needs two sums, and a step one gather, of logits.  They are forward hooks of the
modules, so transformers' layers and the fused decoder run as they are, over fewer heads.

Query heads stay with the key and value heads that they read.  Heads that cannot be shared out
evenly are shared out unevenly.  With fewer key and value heads than ranks, a head is held by
several, each with a part of its queries.  Embeddings are held whole by every rank, and a tied head
is a view of them.  Rows of images are put over them; a sum over the ranks ahead of the first layer
would cost more than the memory is worth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import pad

from epd.config import ConfigError
from epd.engine.base import part
from epd.engine.delta_heads import DeltaHeads
from epd.engine.sharding import Heads, Shard

if TYPE_CHECKING:
    from epd.engine.adapter import ModelAdapter

MULTIPLE = 16  # of the sizes of parts, where it can be: what products of matrices take
_WHOLE = ("", "replicated_with_grad_allreduce", "embedding_rowwise")
_SUMMED = ("rowwise", "moe_tp_experts")
_GATHERED = "colwise_gather_output"
_OF_QUERIES, _OF_KEYS = {"q_proj", "q_b_proj", "kv_b_proj", "o_proj"}, {"k_proj", "v_proj"}


@dataclass(frozen=True, slots=True)
class Cut:
    """What is kept of one dimension of a tensor."""

    dim: int
    kept: tuple[range, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view, where one piece is kept."""
        pieces = [tensor.narrow(self.dim, r.start, len(r)) for r in self.kept]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def read(self, stored: Any) -> torch.Tensor:
        """Of a tensor in a file (safetensors' `get_slice`): only these bytes are read."""
        before = (slice(None),) * self.dim
        pieces = [stored[(*before, slice(r.start, r.stop))] for r in self.kept]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def transposed(self) -> Cut:
        """Of a tensor of experts that is stored with its last two axes swapped."""
        return Cut(3 - self.dim, self.kept)


class TensorParallel:
    """How one model is cut for one rank of several."""

    def __init__(self, adapter: ModelAdapter, model: nn.Module, shard: Shard) -> None:
        text = adapter.text_config
        self._shard = shard
        self._model = model
        self._num_heads = int(text.num_attention_heads)
        self._num_kv_heads = adapter.num_kv_heads
        self._vocabulary = int(text.vocab_size)
        self._delta = adapter.delta_heads
        plan: dict[str, str] = {**(getattr(model, "_tp_plan", None) or {}), **adapter.tp_plan}
        of_drafts = {re.sub(r"^.*\.layers\.", "mtp.layers.", n): how for n, how in plan.items()}
        self._plan = of_drafts | plan

    def drop_added_twice(self) -> None:
        """What is added to a sum over the ranks is added by the first of them."""
        for name, module in self._model.named_modules():
            if self._shard.rank and isinstance(module, nn.Linear) and self._how(name) == "rowwise":
                module.bias = None

    def cuts(self) -> dict[str, Cut]:
        """By parameter; none, of those that are held whole."""
        each = ((name, self.cut(name, like)) for name, like in self._model.named_parameters())
        return {name: cut for name, cut in each if cut is not None}

    def cut_whole(self, prefix: str) -> None:
        """Cut what has been loaded whole."""
        self.drop_added_twice()
        shrink(self._model, {n: cut for n, cut in self.cuts().items() if n.startswith(prefix)})

    def join(self) -> None:
        """Let the ranks meet behind the modules whose results are parts."""
        for name, module in self._model.named_modules():
            how = self._how(name)
            if how in _SUMMED:
                module.register_forward_hook(self._summed)
            elif how == _GATHERED:
                module.register_forward_hook(self._gathered)

    def _summed(self, module: nn.Module, given: object, x: torch.Tensor) -> torch.Tensor:
        return self._shard.collectives.all_reduce(x)

    def _gathered(self, module: nn.Module, given: object, x: torch.Tensor) -> torch.Tensor:
        """Logits of the whole vocabulary; those of its smaller parts are padded on the way."""
        count = self._shard.size
        sizes = [len(_aligned(self._vocabulary, rank, count)) for rank in range(count)]
        widest = max(sizes)
        whole = self._shard.collectives.all_gather(pad(x, (0, widest - x.shape[-1])), -1)
        if widest * count == self._vocabulary:
            return whole
        pieces = zip(whole.split(widest, -1), sizes, strict=True)
        return torch.cat([piece[..., :size] for piece, size in pieces], -1)

    def cut(self, name: str, like: torch.Tensor) -> Cut | None:
        """Of a parameter, whose whole `like` has the shape of."""
        how = self._how(name) or self._how(name.rpartition(".")[0])
        last = like.ndim - 1
        if how in _WHOLE or (how == "rowwise" and not last):
            return None
        if how == "rowwise":
            return Cut(last, (self._kept(name, like.shape[last]),))
        if how == "delta_channels":
            return Cut(0, self._delta_heads.channels(self._shard))
        dim = max(last - 1, 0)
        size = like.shape[dim]
        if how == "packed_colwise":  # gate and up, one behind the other
            own = self._part(size // 2)
            return Cut(dim, (own, range(size // 2 + own.start, size // 2 + own.stop)))
        if how == "delta_values":
            return Cut(0, (self._kept(name, like.shape[0]),))
        if how in ("colwise", _GATHERED):
            return Cut(dim, (self._kept(name, size),))
        raise ConfigError(
            f"transformers cuts {name} in a way that this engine lacks ({how}); use one rank"
        )

    @property
    def _delta_heads(self) -> DeltaHeads:
        assert self._delta is not None  # whose plan names it
        return self._delta

    def _kept(self, name: str, size: int) -> range:
        parts = set(name.split("."))
        if "linear_attn" in parts:
            values = self._delta_heads.of(self._shard).queries
            each = size // self._delta_heads.num_values
            return range(values.start * each, values.stop * each)
        for projections, of_queries in ((_OF_QUERIES, True), (_OF_KEYS, False)):
            if parts & projections:
                num_kv = self._num_kv_heads(next(int(part) for part in parts if part.isdigit()))
                own = Heads.of(self._shard, self._num_heads, num_kv)
                heads = own.queries if of_queries else own.kv
                each = size // (self._num_heads if of_queries else num_kv)
                return range(heads.start * each, heads.stop * each)
        return self._part(size)

    def _part(self, size: int) -> range:
        return _aligned(size, self._shard.rank, self._shard.size)

    def _how(self, name: str) -> str:
        return self._plan.get(re.sub(r"\.\d+(?=\.)", ".*", name), "")


def _aligned(size: int, rank: int, count: int) -> range:
    """One of `count` parts of so many rows or columns."""
    unit = MULTIPLE
    while size % unit or size < unit * count:
        unit //= 2
    own = part(size // unit, rank, count)
    return range(own.start * unit, own.stop * unit)


def shrink(model: nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Let these parameters be what is kept of them."""
    for name, cut in cuts.items():
        path, _, kind = name.rpartition(".")
        module = model.get_submodule(path)
        kept = nn.Parameter(cut.of(getattr(module, kind)).contiguous(), requires_grad=False)
        setattr(module, kind, kept)
        if isinstance(module, nn.Linear) and kind == "weight":
            module.out_features, module.in_features = kept.shape
