"""The vision tower of Kimi-K2.5 (MoonViT) over packed images, without waiting for the device.

As in `tower` for the Qwen families: what the forward would derive from the grids is computed on the
host, and attention has its segments as numbers.  An image is one segment.  Patches lie in order of
lines, not of merge blocks; a gather behind the layers groups them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from epd.engine.device.copies import upload
from epd.engine.language.products import side_by_side
from epd.engine.vision.segments import SegmentAttention
from epd.engine.vision.tower import Grid, LinearPatchEmbed, PackedAttention, fuse, joined

_POSITIONS = ("position_ids", "interp_indices", "interp_weights", "frame_index")


def adopt(tower: Any) -> None:
    """Give a loaded tower these modules instead of its own."""
    tower.patch_embed.proj = LinearPatchEmbed(tower.patch_embed)
    attend = SegmentAttention()
    for layer in tower.layers:
        layer.attn.qkv = side_by_side(layer.attn.q_proj, layer.attn.k_proj, layer.attn.v_proj)
        layer.attn = PackedAttention(layer.attn, attend)
    fuse(tower.layers)


def run(model: Any, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
    """Rows of all images, `[sum of num_rows, hidden]`."""
    tower = model.vision_tower
    inputs = _inputs(tower, grids, pixels.device)
    output = tower(pixels, grid_thw=torch.tensor(grids), return_dict=True, **inputs)
    rows: torch.Tensor = model.mm_projector(output.pooler_output)
    return rows.squeeze(1)


def _inputs(tower: Any, grids: Sequence[Grid], device: torch.device) -> dict[str, torch.Tensor]:
    """What the forward would derive from the grids; segment bounds stay on the host."""
    side = int(tower.patch_embed.pos_emb.num_grid_per_side)
    each = [_of_grid(grid, tuple(tower.merge_kernel_size), side) for grid in grids]
    inputs = {
        name: upload(torch.cat([parts[name] for parts in each]), device) for name in _POSITIONS
    }
    index, at = [], 0
    for parts, (frames, height, width) in zip(each, grids, strict=True):
        index.append(parts["temporal_merge_index"] + at)
        at += frames * height * width
    inputs["temporal_merge_index"] = upload(torch.cat(index), device)
    return inputs | {"cu_seqlens": joined([parts["cu_seqlens"] for parts in each])}


@functools.lru_cache(maxsize=256)
def _of_grid(grid: Grid, merge: tuple[int, int], side: int) -> dict[str, torch.Tensor]:
    from transformers import vision_utils
    from transformers.models.kimi_k25 import modeling_kimi_k25 as theirs

    thw = torch.tensor([grid])
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        thw, side, mode="bicubic", align_corners=False
    )
    return {
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(thw, merge_temporal=True),
        "position_ids": vision_utils.get_vision_position_ids(thw, 1),
        "interp_indices": indices,
        "interp_weights": weights,
        "frame_index": theirs.get_vision_frame_index(thw),
        "temporal_merge_index": theirs.get_vision_temporal_merge_index(thw, *merge),
    }
