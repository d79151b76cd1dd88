"""What mixes tokens in a fused layer: between its two norms, before its MLP.

Theory of operation
-------------------
A layer of `FusedDecoder` is norm, mixer, norm, MLP.  A mixer takes the normed rows of all tokens of
a step and gives the layer's sum for them.  It reads and writes the layer's memory of each sequence
in blocks of the pool.  A family lists the mixers that its layers may have (`MixerFamily`); `fits`
is true of those that it can run.

A mixer's input is a `Step` alone.  In a captured step its tensors have the shapes of a room, larger
than the step (`flat_batch`).  Tokens that pad have slot -1, sequences that pad length 0 and states
in block -1: for these nothing is read or written that counts.  Rows of tokens that pad may come out
as anything finite.  What the host alone has (`FlatBatch.chunks`) is absent then, so a mixer that
needs it sets `reads_chunks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from epd.engine.kernels.eight_bits import Scaled
from epd.engine.language.flat_batch import FlatBatch
from epd.engine.language.kv_pool import KvPool
from epd.engine.language.products import Foreign, side_by_side, takes_fp8


@dataclass(frozen=True, slots=True)
class Step:
    """A mixer's view of a step; the same for every layer."""

    batch: FlatBatch
    pool: KvPool
    cos: torch.Tensor  # [T, rotated numbers of a head]
    sin: torch.Tensor


class Norm(NamedTuple):
    """An RMS norm; rows are rounded to the gain's precision before they are multiplied by it."""

    gain: torch.Tensor
    eps: float


NormOf = Callable[[Foreign], Norm]  # of a module


def plain_norm(module: Foreign) -> Norm:
    return Norm(module.weight, float(module.variance_epsilon))


def zero_centred_norm(module: Foreign) -> Norm:
    """Whose weight is what the gain has more than one."""
    return Norm(1.0 + module.weight.float(), float(module.eps))


class Mixer(Protocol):
    reads_chunks: bool  # so steps with prompts are not captured

    @property
    def takes_fp8(self) -> bool:
        """Its first product, rows of eight bits in this step."""

    def __init__(self, layer: Foreign, kernels: Foreign, norm_of: NormOf) -> None: ...

    @staticmethod
    def fits(layer: Foreign) -> bool:
        """Whether it can run this layer's module that is neither norm nor MLP."""

    def __call__(self, x: torch.Tensor | Scaled, step: Step) -> torch.Tensor:
        """`[T, H]`, both ways."""


class MixerFamily(Protocol):
    @property
    def mixers(self) -> Sequence[type[Mixer]]:
        """Those that its layers may have."""

    def fused_norm(self, module: Foreign) -> Norm: ...


class PagedAttention:
    """Keys and values of heads in the pool: query, key and value are one product; head norms, rope
    and the write into the pool one kernel."""

    reads_chunks = False
    is_gated = False  # a gate beside each query
    _NEEDED = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
    _KNOWN = _NEEDED | {"q_norm", "k_norm", "rotary_emb", "rotary_fn"}

    def __init__(self, layer: Foreign, kernels: Foreign, norm_of: NormOf) -> None:
        attention = layer.self_attn
        self._kernels = kernels
        self._index = int(attention.layer_idx)
        self._scaling = float(attention.scaling)
        self._qkv = side_by_side(attention.q_proj, attention.k_proj, attention.v_proj)
        self._output = attention.o_proj
        self._eps, self._head_norms = 0.0, None
        if getattr(attention, "q_norm", None) is not None:
            query, key = norm_of(attention.q_norm), norm_of(attention.k_norm)
            self._eps, self._head_norms = query.eps, (query.gain, key.gain)

    @property
    def takes_fp8(self) -> bool:
        return takes_fp8(self._qkv)

    @staticmethod
    def fits(layer: Foreign) -> bool:
        attention = getattr(layer, "self_attn", None)
        names = {name for name, _ in attention.named_children()} if attention is not None else set()
        return PagedAttention._NEEDED <= names <= PagedAttention._KNOWN

    def __call__(self, x: torch.Tensor | Scaled, step: Step) -> torch.Tensor:
        ops, layer = self._kernels, step.pool.layer(self._index)
        qkv, place = self._qkv(x), (step.cos, step.sin, step.batch.slots, layer)
        query = ops.rope_and_store(qkv, self._head_norms, self._eps, *place, gated=self.is_gated)
        attended = ops.attend(self.scaled(query, step), layer, step.batch, self._scaling)
        rows = ops.gate_heads(attended, qkv) if self.is_gated else attended.flatten(1)
        out: torch.Tensor = self._output(rows)
        return out

    def scaled(self, query: torch.Tensor, step: Step) -> torch.Tensor:
        """Queries `[T, num_heads, D]` with what a family gives them besides."""
        return query


class GatedAttention(PagedAttention):
    """The query's projection gives queries and gates by turns, a head each."""

    is_gated = True
