"""Attention of a vision tower by the library: a segment is a sequence of it.

Theory of operation
-------------------
The library reads keys and values in whole tiles, so its last tile of a segment reaches into the
next one, or into what pads a captured run.  Scores of these rows are masked, and their values
multiplied by zero, which is not zero for a value that is not finite (fault F13).  So before each
layer's attention, of such a value behind the end of a segment a zero is made and of its key NaN.
The segments before it no longer see it, and its own is NaN as before.

Many short segments, as windows are, go through Triton: a tile of queries is larger than they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from epd.engine.kernels import torch_ops, triton_segments
from epd.engine.kernels.fast import ANY_LENGTH

HEAD_DIMS = range(64, 129, 8)  # those that are tested
REACH = 192  # rows of the largest tile
BLOCK_R = 32
FEW = 16  # segments
LEAST = 192  # rows of a segment on the average, if there are more


@triton.jit(do_not_specialize=["num_tokens"])
def _contain(
    qkv, bounds, num_tokens, SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    end = tl.load(bounds + tl.program_id(0) + 1)
    row = end + tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    known = row < num_tokens
    mask = known[:, None] & (d < HEAD_DIM)[None, :]
    key = row.to(tl.int64) * 3 * SIZE + SIZE + tl.program_id(2) * HEAD_DIM
    value = qkv + (key + SIZE)[:, None] + d[None, :]
    numbers = tl.load(value, mask=mask, other=0.0).to(tl.float32)
    finite = tl.min((tl.abs(numbers) < float("inf")).to(tl.int32), axis=1)
    bad = mask & (finite == 0)[:, None]
    tl.store(qkv + key[:, None] + d[None, :], float("nan"), mask=bad)
    tl.store(value, 0.0, mask=bad)


def list_segments(
    bounds: list[int], head_dim: int, room: tuple[int, int] | None = None
) -> torch.Tensor | None:
    """int32 `[segments + 1]`: cumulative lengths; or the tiles of `triton_segments`."""
    count = len(bounds) - 1 if room is None else room[1]
    if head_dim not in HEAD_DIMS or (count > FEW and bounds[-1] < LEAST * count):
        return triton_segments.list_segments(bounds, head_dim, room)
    return torch_ops.list_segments(bounds, head_dim, room)


def attend_segments(qkv: torch.Tensor, segments: torch.Tensor, scaling: float) -> torch.Tensor:
    """Overwrites keys and values that are not finite."""
    if segments.dim() > 1:
        return triton_segments.attend_segments(qkv, segments, scaling)
    from flash_attn.cute import flash_attn_varlen_func

    num_tokens, _, num_heads, head_dim = qkv.shape
    _contain[(len(segments) - 1, REACH // BLOCK_R, num_heads)](
        qkv, segments, num_tokens, SIZE=num_heads * head_dim, HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_R=BLOCK_R,
    )  # fmt: skip
    out, *_ = flash_attn_varlen_func(
        *qkv.unbind(1),
        cu_seqlens_q=segments,
        cu_seqlens_k=segments,
        max_seqlen_q=ANY_LENGTH,
        max_seqlen_k=ANY_LENGTH,
        softmax_scale=scaling,
    )
    return out.flatten(1)  # type: ignore[no-any-return]
