"""Kernels of decoder and tower in plain torch: what those for CUDA must compute, on any device.

Shapes: T tokens, H hidden, D head dimension.  Rounding is that of transformers' modules.

Where the next product is one of eight bits (`epd.engine.weights.fp8`), what comes before it gives
its rows as `Scaled` (`fp8`).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from epd.engine.kernels.eight_bits import Scaled, scaled

if TYPE_CHECKING:
    from epd.engine.language.flat_batch import FlatBatch
    from epd.engine.language.kv_pool import KvLayer


def scaled_product(
    x: Scaled, weight: Scaled, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """`[T, N]` in `dtype`: x `[T, H]` by each row of weight `[N, H]`, summed in fp32."""
    out = (x.values.float() @ weight.values.float().t()) * x.scales * weight.scales.t()
    return (out if bias is None else out + bias.float()).to(dtype)


def product_of_few(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`[T, N]`: x `[T, H]` by each row of weight `[N, H]`, summed in fp32."""
    return functional.linear(x, weight, bias)


def gather_rows(table: torch.Tensor, ids: torch.Tensor, factor: float) -> torch.Tensor:
    """`[..., W]`, on the device of ids `[...]`: rows of table `[N, W]` times `factor`.

    The table may lie in pinned memory of the host, and ids on the device alone."""
    return functional.embedding(ids, table) * factor


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    fp8: bool = False,
) -> torch.Tensor | Scaled:
    """`[..., H]`: the norm of x, or of the sum `residual += x`, which is made in place and rounded.

    Without a bias an RMS norm: rows have the weight's precision before they are multiplied by it.
    With one a layer norm, rounded once.
    """
    if residual is not None:
        residual += x
        x = residual
    if bias is None:
        normed = _rms_norm(x, weight, eps)
    else:
        normed = functional.layer_norm(x, weight.shape, weight, bias, eps)
    return scaled(normed) if fp8 else normed


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * (wide * scale).to(weight.dtype)).to(x.dtype)


def silu_mul(
    gate_up: torch.Tensor, *, fp8: bool = False, gelu: bool = False
) -> torch.Tensor | Scaled:
    """`[T, 2 I]`, gate and up side by side, to `silu(gate) * up`, `[T, I]`; `gelu`: by that, in its
    form with a tangent, instead."""
    gate, up = gate_up.chunk(2, dim=-1)
    product = (functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)) * up
    return scaled(product) if fp8 else product


def rope_and_store(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    layer: KvLayer,
    *,
    gated: bool = False,
    parts: int = 3,
    norms_values: bool = False,
) -> torch.Tensor:
    """Norm of queries and keys, rope, and the write of keys and values into the pool.

    qkv `[T, (num_heads + 2 num_kv_heads) D]`, contiguous; `gated`: behind each query head there is
    one of its gate.  `parts`: 2: keys, as they are, are the values, too; 1: queries alone, and
    nothing is written.  `norms`: weights `[D]` of query and key norm; `norms_values`: values have
    one without.  cos and sin `[T, at most D]` turn the first numbers of a head.  Slots `[T]`, below
    0: written nowhere.  Gives the queries, `[T, num_heads, D]`.
    """
    block_size, num_kv_heads, head_dim = layer.keys.numbers.shape[1:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    others = [num_kv_heads] * (parts - 1)
    query, *rows = heads.split([heads.shape[1] - sum(others), *others], dim=1)
    if gated:
        query = query[:, ::2]
    if norms is not None:
        query = _rms_norm(query, norms[0], eps)
    query = _rotate(query, cos, sin)
    if not rows:
        return query
    key, value = rows[0], rows[-1]
    if norms is not None:
        key = _rms_norm(key, norms[1], eps)
    if norms_values:
        value = _rms_norm(value, value.new_ones(head_dim), eps)
    key = _rotate(key, cos, sin)
    at = slots.long()
    written = at >= 0
    place = (at[written] // block_size, at[written] % block_size)
    layer.keys.write(*place, key[written])
    layer.values.write(*place, value[written])
    return query


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned, rest = x.tensor_split([cos.shape[-1]], dim=-1)
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]
    return torch.cat([turned, rest], dim=-1)


def gate_heads(attended: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
    """`[T, num_heads D]`: attended `[T, num_heads, D]` times the sigmoid of its gates, which stand
    behind the queries of `qkv`."""
    gates = qkv.unflatten(-1, (-1, attended.shape[-1]))[:, 1 : 2 * attended.shape[1] : 2]
    return (attended * gates.sigmoid()).flatten(1)


def rotate_pair(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rope of a vision tower, in fp32, over queries and keys of `[T, 3, num_heads, D]`, in place.

    cos and sin `[T, D]`.
    """
    pair = qkv[:, :2].float()
    low, high = pair.chunk(2, dim=-1)
    turned = torch.cat([-high, low], dim=-1)
    qkv[:, :2] = (pair * cos[:, None, None] + turned * sin[:, None, None]).to(qkv.dtype)


def attend(
    query: torch.Tensor,
    layer: KvLayer,
    batch: FlatBatch,
    scaling: float,
) -> torch.Tensor:
    """Causal attention of each sequence's queries over its keys in the pool; `[T, num_heads, D]`.

    In a window (`batch.window`) a query sees keys up to its limit.  A sequence of length 0 gives
    zeros.
    """
    out = torch.zeros_like(query)
    size = layer.keys.numbers.shape[1]
    cu_q, indptr = batch.cu_q.tolist(), batch.indptr.tolist()
    for i, length in enumerate(batch.seq_lens.tolist()):
        if not length:
            continue
        queries = query[cu_q[i] : cu_q[i + 1]].transpose(0, 1)
        at = torch.arange(length - queries.shape[1], length, device=query.device)[:, None]
        passed = max(0, int(at[0]) + 1 - batch.window) // size if batch.window else 0
        first = passed * size  # blocks before may have other owners
        blocks = batch.indices[indptr[i] + passed : indptr[i + 1]].long()
        key, value = (
            part.read(blocks, query.dtype).flatten(0, 1)[: length - first].transpose(0, 1)
            for part in layer
        )
        place = torch.arange(first, length, device=query.device)[None]
        mask = place <= at
        if batch.window and batch.limits is not None:
            limits = batch.limits[cu_q[i] : cu_q[i + 1], None]
            mask = (place <= limits) & (place > at - batch.window)
        attended = functional.scaled_dot_product_attention(
            queries[None], key[None], value[None], attn_mask=mask, scale=scaling, enable_gqa=True
        )
        out[cu_q[i] : cu_q[i + 1]] = attended[0].transpose(0, 1)
    return out


def list_segments(
    bounds: list[int], head_dim: int, room: tuple[int, int] | None = None
) -> torch.Tensor | None:
    """What `attend_segments` reads; int32, for the device.

    `bounds`: cumulative lengths of the segments, from 0.  `room`: patches and segments of a
    captured run, whose shape depends on nothing else; None: there are more.
    """
    patches, count = room or (bounds[-1], len(bounds) - 1)
    if len(bounds) > count + 1 or bounds[-1] > patches:
        return None
    return torch.tensor(bounds + bounds[-1:] * (count + 1 - len(bounds)), dtype=torch.int32)


def attend_segments(qkv: torch.Tensor, segments: torch.Tensor, scaling: float) -> torch.Tensor:
    """`[T, num_heads * D]`: each patch of a tower over its own segment, in both directions.

    qkv `[T, 3, num_heads, D]`, contiguous, may be overwritten.  Rows of no segment are anything.
    """
    out = qkv.new_zeros(len(qkv), qkv[0, 0].numel())
    at = 0
    lengths = (end - start for start, end in itertools.pairwise(segments.tolist()))
    for length, group in itertools.groupby(lengths):  # those of one length are one call
        end = at + length * len(list(group))
        if length:
            heads = qkv[at:end].unflatten(0, (-1, length)).permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(*heads, scale=scaling)
            out[at:end] = attended.transpose(1, 2).reshape(end - at, -1)
        at = end
    return out
