"""Gemma 4's decoder stack as few kernels, over transformers' weights.

Theory of operation
-------------------
Each of a layer's two sums has a norm before and behind it.  A layer of an E model adds an embedding
of its own, and every layer multiplies its sum by a number.  Layers with a window and those that see
everything have ropes of their own, and rows in blocks of their own (`FlatBatch.others`).  Wide
layers may have keys that are their values, too; the last layers of an E model have neither, and
read those of a layer before.  A mixture of experts stands beside the MLP, with norms of its own.

All but products is done by kernels of the engine, or is one operation for each number.  Nothing
waits for the host, so steps are captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import gelu

from epd.engine.kernels.routing import Routed, Routing
from epd.engine.language.drafts.replay import Replays
from epd.engine.language.flat_batch import FlatBatch
from epd.engine.language.kv_pool import KvLayer, KvPool
from epd.engine.language.mixers import Norm
from epd.engine.language.products import Foreign, side_by_side, swiglu
from epd.engine.language.row_splice import AddedRows

Rope = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [T, D] each


class Rows(NamedTuple):
    """What a layer attends to in a step."""

    layer: KvLayer
    batch: FlatBatch
    rope: Rope


class Gemma4Decoder:
    can_be_captured = captures_prompts = True
    replays: Sequence[Replays] = ()

    def __init__(
        self, stack: Foreign, kernels: Foreign, rows_of: Sequence[int], absent: Sequence[int]
    ) -> None:
        """`rows_of`: of each layer, the one whose rows it reads.  `absent`: placeholders, which are
        read as padding, as by transformers, also where the model gave one."""
        self._stack, self._ops = stack, kernels
        self._rows_of, self._absent = rows_of, absent
        self._types: Sequence[str] = stack.config.layer_types
        self._layers = []
        for layer in stack.layers:
            self._layers.append(_Layer(layer, kernels))
            torch.cuda.empty_cache()  # see `FusedDecoder`
        self._norm = norm_of(stack.norm)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        embeds: torch.Tensor = self._stack.embed_tokens(self._present(ids))
        return embeds

    def _present(self, ids: torch.Tensor) -> torch.Tensor:
        for place in self._absent:
            ids = ids.masked_fill(ids == place, self._stack.config.pad_token_id)
        return ids

    def forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        batch: FlatBatch,
        pool: KvPool,
        added: Sequence[AddedRows] = (),
    ) -> torch.Tensor:
        stack, kinds = self._stack, pool.layout.kinds
        ropes = {
            kind: tuple(part[0].contiguous() for part in stack.rotary_emb(embeds, positions, kind))
            for kind in dict.fromkeys(self._types)
        }
        batches = zip(kinds, (batch, *batch.others), strict=True)
        batch_of = {layer: its for kind, its in batches for layer in kind.layers}
        own: Sequence[torch.Tensor | None] = [None] * len(self._layers)
        if stack.hidden_size_per_layer_input:
            of_tokens = stack.get_per_layer_inputs(self._present(batch.ids)[None])
            own = stack.project_per_layer_inputs(embeds[None], of_tokens)[0].unbind(1)
        for layer, source, kind, row in zip(
            self._layers, self._rows_of, self._types, own, strict=True
        ):
            rows = Rows(pool.layer(source), batch_of[source], ropes[kind])  # type: ignore[arg-type]
            layer(embeds, rows, row)
        hidden: torch.Tensor = self._ops.norm(embeds, *self._norm)
        return hidden


def norm_of(module: Foreign) -> Norm:
    """Rows are rounded once, behind the gain."""
    return Norm(module.weight.float(), float(module.eps))


class _Layer:
    def __init__(self, layer: Foreign, ops: Foreign) -> None:
        self._ops = ops
        self._attention = _Attention(layer.self_attn, ops)
        self._mlp, _ = swiglu(layer.mlp, ops, gelu=True)
        self._experts = _Experts(layer, ops) if layer.enable_moe_block else None
        self._before, self._behind, self._before_mlp, self._behind_mlp = (
            norm_of(module)
            for module in (
                *(layer.input_layernorm, layer.post_attention_layernorm),
                *(layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm),
            )
        )
        self._factor = layer.layer_scalar
        self._embedded = None
        if layer.hidden_size_per_layer_input:
            norm = norm_of(layer.post_per_layer_input_norm)
            self._embedded = layer.per_layer_input_gate, layer.per_layer_projection, norm

    def __call__(self, hidden: torch.Tensor, rows: Rows, own: torch.Tensor | None) -> None:
        """Hidden states `[T, H]`, in place; own: the layer's embeddings `[T, P]`, if it has any."""
        ops = self._ops
        x = self._attention(ops.norm(hidden, *self._before), rows)
        x = ops.norm(ops.norm(x, *self._behind), *self._before_mlp, residual=hidden)
        x = self._mlp(x)
        if self._experts is not None:
            x = self._experts(x, hidden, rows.batch.slots)
        hidden += ops.norm(x, *self._behind_mlp)
        if self._embedded is not None and own is not None:
            gate, projection, norm = self._embedded
            x = projection(gelu(gate(hidden), approximate="tanh") * own)
            hidden += ops.norm(x, *norm)
        hidden *= self._factor


class _Attention:
    def __init__(self, attention: Foreign, ops: Foreign) -> None:
        self._ops = ops
        self._scaling = float(attention.scaling)
        query, output = attention.q_proj, attention.o_proj
        self._parts, self._product, self._output = 1, query, output
        norm = norm_of(attention.q_norm)
        self._gains, self._eps = (norm.gain, norm.gain), norm.eps
        if not attention.is_kv_shared_layer:
            self._gains = norm.gain, norm_of(attention.k_norm).gain
            own = [part for part in (attention.k_proj, attention.v_proj) if part is not None]
            self._parts, self._product = 1 + len(own), side_by_side(query, *own)

    def __call__(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        layer, batch, rope = rows
        query = self._ops.rope_and_store(
            self._product(x), self._gains, self._eps, *rope, batch.slots, layer,
            parts=self._parts, norms_values=True,
        )  # fmt: skip
        attended = self._ops.attend(query, layer, batch, self._scaling)
        out: torch.Tensor = self._output(attended.flatten(1))
        return out


class _Experts:
    """A mixture beside the MLP: of the rows before the MLP's own norm."""

    def __init__(self, layer: Foreign, ops: Foreign) -> None:
        self._ops, self._router, self._experts = ops, layer.router, layer.experts
        layer.experts.forward = self._multiply  # behind which the ranks of a group meet
        self._before = norm_of(layer.pre_feedforward_layernorm_2)
        self._behind = norm_of(layer.post_feedforward_layernorm_2)
        self._behind_mlp = norm_of(layer.post_feedforward_layernorm_1)
        router = layer.router
        self._plain = Norm(torch.ones_like(router.scale, dtype=torch.float32), float(router.eps))
        self._routing = Routing(
            int(router.config.top_k_experts), factors=router.per_expert_scale.float()
        )

    def __call__(
        self, of_mlp: torch.Tensor, hidden: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        ops, router = self._ops, self._router
        scaled = ops.norm(hidden, *self._plain) * router.scale * router.scalar_root_size
        routed = ops.route(router.proj(scaled), self._routing, slots)
        x = self._experts(ops.norm(hidden, *self._before), routed)
        total: torch.Tensor = ops.norm(of_mlp, *self._behind_mlp) + ops.norm(x, *self._behind)
        return total

    def _multiply(self, x: torch.Tensor, routed: Routed) -> torch.Tensor:
        weights = self._experts.gate_up_proj, self._experts.down_proj
        out: torch.Tensor = self._ops.multiply_experts(x, *weights, routed, gelu=True)
        return out
