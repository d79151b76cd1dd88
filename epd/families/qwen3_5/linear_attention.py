"""Linear attention layers over the states of the sequences of a step.

Theory of operation
-------------------
Such a layer keeps two tensors of a sequence (`state_kinds`): the last inputs of a short convolution
and the matrices of the delta rule.  All projections of a layer's input are one product; then come
the convolution, the delta rule, which norms and gates what it answers, and the output's product.  A
sequence with one token in a step changes its state in one pass over it.  The tokens of a chunk are
computed a span at a time, from the state behind the chunk before it.  Both change states where they
lie; with drafts that is done behind the count of those that hold (`drafts/replay.py`).  The first
token of a sequence reads no state, so a block needs no clearing."""

from __future__ import annotations

import torch

from epd.engine.kernels.eight_bits import Scaled
from epd.engine.kernels.torch_delta import Heads
from epd.engine.language.flat_batch import FlatBatch
from epd.engine.language.kv_pool import KvPool
from epd.engine.language.mixers import NormOf, Step
from epd.engine.language.products import Foreign, side_by_side
from epd.engine.weights.fp8 import Fp8Linear
from epd.engine.weights.packed_linear import PackedLinear


class GatedDeltaNet:
    """The mixer of a gated delta-net layer; `layer_idx` counts those of its kind."""

    takes_fp8 = False
    reads_chunks = False

    def __init__(self, layer: Foreign, kernels: Foreign, norm_of: NormOf) -> None:
        net = layer.linear_attn
        self._kernels = kernels
        self._index = int(net.layer_idx)
        inputs, strengths = [net.in_proj_qkv, net.in_proj_z], [net.in_proj_b, net.in_proj_a]
        if isinstance(net.in_proj_qkv, Fp8Linear | PackedLinear):  # what writes and forgets is not
            self._strengths = side_by_side(*strengths)
        else:
            inputs += strengths
            self._strengths = None
        self._inputs = side_by_side(*inputs)
        self._parts = [net.conv_dim, net.conv_dim + net.value_dim]
        self._taps = net.conv1d.weight[:, 0].t().contiguous()
        self._output = net.out_proj
        self._kept: list[torch.Tensor] = []  # of tokens that are replayed: inputs, strengths
        self._heads = Heads(
            net.num_k_heads,
            net.num_v_heads,
            net.head_k_dim,
            net.head_v_dim,
            -net.A_log.float().exp(),
            net.dt_bias.float(),
            net.norm.weight,
            float(net.norm.variance_epsilon),
        )

    @staticmethod
    def fits(layer: Foreign) -> bool:
        net: Foreign = getattr(layer, "linear_attn", None)
        return hasattr(net, "in_proj_z") and net.conv1d.bias is None and net.activation == "silu"

    def __call__(self, x: torch.Tensor | Scaled, step: Step) -> torch.Tensor:
        ops, batch = self._kernels, step.batch
        inputs, matrices = step.pool.sequence_tensors()
        rows, gates, strengths = self._inputs(x).tensor_split(self._parts, -1)
        if self._strengths is not None:
            strengths = self._strengths(x)
        if count := len(batch.replayed):
            for part, kept in zip((rows, strengths), self._kept, strict=True):
                torch.index_select(part, 0, batch.replayed, out=kept[:count])
        mixed = ops.convolve(rows, self._taps, inputs, self._index, batch)
        told = gates, strengths, self._heads
        answers = ops.recall(mixed, *told, matrices, self._index, batch)
        out: torch.Tensor = self._output(answers)
        return out

    def expect_drafts(self, num_tokens: int) -> None:
        like, sizes = self._taps, (self._taps.shape[1], 2 * self._heads.num_values)
        self._kept = [like.new_empty(num_tokens, size) for size in sizes]

    def replay(self, held: FlatBatch, pool: KvPool) -> None:
        ops, (rows, strengths) = self._kernels, self._kept
        inputs, matrices = pool.sequence_tensors()
        mixed = ops.convolve(rows, self._taps, inputs, self._index, held)
        gates = torch.zeros_like(mixed[:, : self._heads.values])  # of answers that nobody reads
        ops.recall(mixed, gates, strengths, self._heads, matrices, self._index, held)
