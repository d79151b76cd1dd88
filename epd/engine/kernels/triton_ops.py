"""Triton kernels around the matrix products of a decoder layer.

They fuse memory-bound work: the residual sum with its norm, the norm of queries and keys with rope
and the write into the KV pool, the gate with its product.  Arithmetic is fp32 inside and rounds
where transformers' modules round, so bf16 results differ by single steps.  Functions and arguments
are those of `torch_ops`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from epd.engine.kernels.eight_bits import Scaled
from epd.engine.kernels.triton_fp8 import PART, SMALLEST, empty, store_scaled
from epd.engine.kernels.triton_paged import pointers, strides

if TYPE_CHECKING:
    from epd.engine.language.kv_pool import KvLayer

GATHERED_NBYTES = 2048  # of a row, by one program


@triton.jit
def _gather_rows(table, ids, out, factor, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    row = tl.load(ids + token).to(tl.int64) * width
    value = tl.load(table + row + at, mask=inside, other=0.0)
    scaled = (value.to(tl.float32) * factor).to(value.dtype)
    tl.store(out + token * width + at, scaled, mask=inside)


def gather_rows(table: torch.Tensor, ids: torch.Tensor, factor: float) -> torch.Tensor:
    """A pinned table has one address for both sides.  Each thread reads 16 bytes, and all of a
    row's programs wait for the bus at once."""
    width, block = table.shape[1], GATHERED_NBYTES // table.itemsize
    out = torch.empty(*ids.shape, width, dtype=table.dtype, device=ids.device)
    _gather_rows[(ids.numel(), triton.cdiv(width, block))](
        table, ids.contiguous(), out, factor, width, BLOCK=block, num_warps=4
    )
    return out


@triton.jit
def _norm(
    x, residual, weight, bias, out, scales, size, eps,
    ADD: tl.constexpr, CENTRED: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + row + at, mask=inside, other=0.0)
    if ADD:
        before = tl.load(residual + row + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(value.dtype)
        tl.store(residual + row + at, value, mask=inside)
    wide = value.to(tl.float32)
    if CENTRED:
        wide = tl.where(inside, wide - tl.sum(wide, axis=0) / size, 0.0)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        normed = normed * gain + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    else:
        normed = normed.to(weight.dtype.element_ty).to(tl.float32) * gain
    normed = normed.to(value.dtype)
    if FP8:
        store_scaled(normed, out + row + at, scales + tl.program_id(0), inside)
    else:
        tl.store(out + row + at, normed, mask=inside)


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    fp8: bool = False,
) -> torch.Tensor | Scaled:
    out = empty(x.shape, x) if fp8 else Scaled(torch.empty_like(x), x)
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    warps = min(16, max(1, block // 512))
    _norm[(x.numel() // size,)](
        x, x if residual is None else residual, weight, weight if bias is None else bias, *out,
        size, eps, ADD=residual is not None, CENTRED=bias is not None, FP8=fp8, BLOCK=block,
        num_warps=warps,
    )  # fmt: skip
    return out if fp8 else out.values


@triton.jit
def activate(gate, GELU: tl.constexpr):  # noqa: ANN201 - parts of kernels have no types
    """silu, or gelu with a tangent: that of x is a sigmoid of 2 x, stretched to [-1, 1]."""
    turn = gate
    if GELU:
        turn = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(turn)


@triton.jit
def _silu_mul(gate_up, out, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    active = activate(wide, GELU).to(gate.dtype)
    product = active.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * size + at, product.to(gate.dtype), mask=inside)


@triton.jit
def _silu_mul_scaled(gate_up, out, scales, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    active = activate(wide, GELU).to(gate.dtype)
    product = (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    store_scaled(product, out + row * size + at, scales + row, inside)


def silu_mul(
    gate_up: torch.Tensor, *, fp8: bool = False, gelu: bool = False
) -> torch.Tensor | Scaled:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    if fp8:
        rows = empty((num_tokens, size), gate_up)
        block = triton.next_power_of_2(size)
        warps = min(16, max(4, block // 1024))
        _silu_mul_scaled[(num_tokens,)](
            gate_up, *rows, size, GELU=gelu, BLOCK=block, num_warps=warps
        )
        return rows
    out = gate_up.new_empty(num_tokens, size)
    block = min(2048, triton.next_power_of_2(size))
    _silu_mul[(num_tokens, triton.cdiv(size, block))](
        gate_up, out, size, GELU=gelu, BLOCK=block, num_warps=4
    )
    return out


@triton.jit
def _store_kv(place, other, factors, low, high, slot, stored, FP8: tl.constexpr):
    """Both halves of the rows of some heads, to `place` and `other`; `factors`: where each row's
    goes, a column."""
    if FP8:
        a, b = low.to(tl.float32), high.to(tl.float32)
        peak = tl.maximum(tl.max(tl.abs(a), axis=1), tl.max(tl.abs(b), axis=1))
        factor = tl.maximum(peak, SMALLEST)[:, None] * PART
        tl.store(factors, factor, mask=slot >= 0)
        inverse = tl.div_rn(1.0, factor)
        tl.store(place, (a * inverse).to(tl.float8e4nv), mask=stored)
        tl.store(other, (b * inverse).to(tl.float8e4nv), mask=stored)
    else:
        tl.store(place, low, mask=stored)
        tl.store(other, high, mask=stored)


@triton.jit
def _unit(low, high, eps, HEAD_DIM: tl.constexpr):
    """Both halves of heads, float32, after a norm without weights."""
    scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD_DIM + eps)
    return low * scale[:, None], high * scale[:, None]


@triton.jit
def _gained(x, gains, inside, kind: tl.constexpr):
    """Rounded as the weights, then as `kind`; float32."""
    gain = tl.load(gains, mask=inside, other=0.0).to(tl.float32)
    return (x.to(gains.dtype.element_ty).to(tl.float32) * gain).to(kind).to(tl.float32)


@triton.jit
def _rope_and_store(
    qkv, q_weight, k_weight, cos, sin, slots, query, keys, values, key_scales, value_scales, eps,
    stride, scale_stride, NORM: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, FP8: tl.constexpr, GATED: tl.constexpr,
    PARTS: tl.constexpr, NORM_VALUES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUP  # of the heads of q, k and v side by side
    head = first + tl.arange(0, GROUP)[:, None]
    at = tl.arange(0, BLOCK_HALF)[None, :]
    inside, turns = (at < HALF) & (head >= 0), at < TURNED
    low_at, high_at = at, at + HALF  # numbers that turn together stand at the same place of both
    if TURNED < HALF:
        low_at, high_at = tl.where(turns, at, at + TURNED), tl.where(turns, at + TURNED, at + HALF)
    column, width = head, NUM_HEADS + (PARTS - 1) * NUM_KV_HEADS
    if PARTS == 2:  # keys, as they are, are the values, too
        column = head - tl.where(first >= NUM_HEADS + NUM_KV_HEADS, NUM_KV_HEADS, 0)
    if GATED:
        column, width = head + tl.minimum(head, NUM_HEADS), width + NUM_HEADS
    source = qkv + token * width * HEAD_DIM + column * HEAD_DIM
    low = tl.load(source + low_at, mask=inside, other=0.0)
    high = tl.load(source + high_at, mask=inside, other=0.0)
    slot = tl.load(slots + token).to(tl.int64)
    stored = inside & (slot >= 0)  # a padded row has no slot
    row = (slot // BLOCK_SIZE) * stride + (slot % BLOCK_SIZE) * NUM_KV_HEADS * HEAD_DIM
    scale_at = (slot // BLOCK_SIZE) * scale_stride + slot % BLOCK_SIZE
    if first >= NUM_HEADS + NUM_KV_HEADS:
        kv_head = head - NUM_HEADS - NUM_KV_HEADS
        if NORM_VALUES:
            a, b = _unit(low.to(tl.float32), high.to(tl.float32), eps, HEAD_DIM)
            low, high = a.to(low.dtype), b.to(low.dtype)
        factors = value_scales + scale_at + kv_head * BLOCK_SIZE
        place = values + row + kv_head * HEAD_DIM
        _store_kv(place + low_at, place + high_at, factors, low, high, slot, stored, FP8)
    else:
        a, b = low.to(tl.float32), high.to(tl.float32)
        if NORM:
            a, b = _unit(a, b, eps, HEAD_DIM)
            weight = q_weight
            if first >= NUM_HEADS:
                weight = k_weight
            a = _gained(a, weight + low_at, at < HALF, low.dtype)
            b = _gained(b, weight + high_at, at < HALF, low.dtype)
        angle = token * 2 * TURNED + at
        c = tl.load(cos + angle, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)
        low = (a * c - b * s).to(low.dtype)
        c = tl.load(cos + angle + TURNED, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + angle + TURNED, mask=turns, other=0.0).to(tl.float32)
        high = (b * c + a * s).to(low.dtype)
        if first >= NUM_HEADS:
            kv_head = head - NUM_HEADS
            factors = key_scales + scale_at + kv_head * BLOCK_SIZE
            place = keys + row + kv_head * HEAD_DIM
            _store_kv(place + low_at, place + high_at, factors, low, high, slot, stored, FP8)
        else:  # a name has one type, so this is no `place`
            target = query + (token * NUM_HEADS + head) * HEAD_DIM
            tl.store(target + low_at, low, mask=inside)
            tl.store(target + high_at, high, mask=inside)


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
    block_size, num_kv_heads, head_dim = layer.keys.numbers.shape[1:]
    num_heads = (qkv.shape[1] // head_dim - (parts - 1) * num_kv_heads) // (2 if gated else 1)
    block_half = triton.next_power_of_2(head_dim // 2)
    group = math.gcd(num_heads, num_kv_heads)
    group = min(16, max(1, 2048 // block_half), group & -group)  # a power of two that divides both
    query = qkv.new_empty(qkv.shape[0], num_heads, head_dim)
    q_weight, k_weight = norms or (qkv, qkv)
    num_written = 2 * num_kv_heads if parts > 1 else 0
    _rope_and_store[(qkv.shape[0], (num_heads + num_written) // group)](
        qkv, q_weight, k_weight, cos, sin, slots, query, *pointers(layer), eps, *strides(layer),
        NORM=norms is not None, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, GROUP=group,
        HEAD_DIM=head_dim, HALF=head_dim // 2, TURNED=cos.shape[1] // 2,
        BLOCK_HALF=block_half, BLOCK_SIZE=block_size, FP8=layer.keys.scales is not None,
        GATED=gated, PARTS=parts, NORM_VALUES=norms_values, num_warps=2,
    )  # fmt: skip
    return query


@triton.jit
def _gate_heads(
    attended, qkv, out, stride, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < NUM_HEADS * HEAD_DIM
    here = token * NUM_HEADS * HEAD_DIM + at
    value = tl.load(attended + here, mask=inside, other=0.0)
    behind = (2 * (at // HEAD_DIM) + 1) * HEAD_DIM + at % HEAD_DIM
    gate = tl.load(qkv + token * stride + behind, mask=inside, other=0.0).to(tl.float32)
    gate = tl.sigmoid(gate).to(value.dtype).to(tl.float32)
    tl.store(out + here, (value.to(tl.float32) * gate).to(value.dtype), mask=inside)


def gate_heads(attended: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
    num_tokens, num_heads, head_dim = attended.shape
    out = attended.new_empty(num_tokens, num_heads * head_dim)
    block = min(1024, triton.next_power_of_2(out.shape[1]))
    _gate_heads[(num_tokens, triton.cdiv(out.shape[1], block))](
        attended, qkv, out, qkv.stride(0), NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _rotate_pair(
    qkv, cos, sin, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    at = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (at < HALF) & (head < 2 * NUM_HEADS)  # of queries and keys side by side
    place = qkv + token * 3 * NUM_HEADS * HEAD_DIM + head * HEAD_DIM + at
    low = tl.load(place, mask=inside, other=0.0)
    high = tl.load(place + HALF, mask=inside, other=0.0)
    angle = token * HEAD_DIM + at
    c = tl.load(cos + angle, mask=at < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=at < HALF, other=0.0).to(tl.float32)
    a, b = low.to(tl.float32), high.to(tl.float32)
    tl.store(place, (a * c - b * s).to(low.dtype), mask=inside)
    c = tl.load(cos + angle + HALF, mask=at < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + angle + HALF, mask=at < HALF, other=0.0).to(tl.float32)
    tl.store(place + HALF, (b * c + a * s).to(low.dtype), mask=inside)


def rotate_pair(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    num_tokens, _, num_heads, head_dim = qkv.shape
    heads = min(16, triton.next_power_of_2(2 * num_heads))
    _rotate_pair[(num_tokens, triton.cdiv(2 * num_heads, heads))](
        qkv, cos, sin, NUM_HEADS=num_heads, HEAD_DIM=head_dim, HALF=head_dim // 2,
        BLOCK_HEADS=heads, BLOCK_HALF=triton.next_power_of_2(head_dim // 2), num_warps=4,
    )  # fmt: skip
