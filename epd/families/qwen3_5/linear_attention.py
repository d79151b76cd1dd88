"""Linear attention layers over the states of the sequences of a step.

Theory of operation
-------------------
Such a layer keeps two tensors of a sequence (`state_kinds`): the last inputs of a short convolution
and the matrices of the delta rule.  All projections of a layer's input are one product; then come
the convolution, the delta rule, which norms and gates what it answers, and the output's product.  A
sequence with one token in a step changes its state in one pass over it.  The tokens of a chunk are
computed a span at a time, from the state behind the chunk before it.  Both change states where they
lie; with drafts that is done behind the count of those that hold (`drafts/replay.py`), for all
layers at once.  The first token of a sequence reads no state, so a block needs no clearing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epd.engine.kernels.eight_bits import Scaled
from epd.engine.kernels.torch_delta import Heads, Later
from epd.engine.language.drafts.replay import Replay
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
        self.kernels = kernels
        self.index = int(net.layer_idx)
        inputs, strengths = [net.in_proj_qkv, net.in_proj_z], [net.in_proj_b, net.in_proj_a]
        if isinstance(net.in_proj_qkv, Fp8Linear | PackedLinear):  # what writes and forgets is not
            self._strengths = side_by_side(*strengths)
        else:
            inputs += strengths
            self._strengths = None
        self._inputs = side_by_side(*inputs)
        self._parts = [net.conv_dim, net.conv_dim + net.value_dim]
        self.taps = net.conv1d.weight[:, 0].t().contiguous()
        self._output = net.out_proj
        self.later: Later | None = None  # where drafts are expected
        self.heads = Heads(
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
        ops, batch = self.kernels, step.batch
        inputs, matrices = step.pool.sequence_tensors()
        rows, gates, strengths = self._inputs(x).tensor_split(self._parts, -1)
        if self._strengths is not None:
            strengths = self._strengths(x)
        mixed = ops.convolve(rows, self.taps, inputs, self.index, batch, self.later)
        told = gates, strengths, self.heads
        answers = ops.recall(mixed, *told, matrices, self.index, batch, self.later)
        out: torch.Tensor = self._output(answers)
        return out

    @staticmethod
    def expect_drafts(layers: Sequence[GatedDeltaNet], num_decodes: int) -> Replay:
        ops, heads = layers[0].kernels, layers[0].heads
        taps = torch.stack([layer.taps for layer in layers])
        rates, biases = ([layer.heads[at] for layer in layers] for at in (4, 5))
        heads = heads._replace(rate=torch.stack(rates), bias=torch.stack(biases))
        sizes = taps.shape[-1], 2 * heads.num_values
        later = Later(*(taps.new_empty(len(layers), num_decodes, size) for size in sizes))
        for layer in layers:
            layer.later = Later(*(part[layer.index] for part in later))
        return lambda batch, pool: ops.replay(later, taps, heads, *pool.sequence_tensors(), batch)
