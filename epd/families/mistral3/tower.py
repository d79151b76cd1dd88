"""The vision tower of Mistral 3 (Pixtral) over packed images, without waiting for the device.

As in `epd.engine.vision.tower` for the Qwen families: positions are computed on the host, and
attention has its segments as numbers, where transformers makes a mask of all pairs of patches.
Patches lie in order of lines; merge blocks are put together behind the layers."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.nn.functional import linear

from epd.engine.device.copies import upload
from epd.engine.language.products import Foreign, side_by_side
from epd.engine.vision.segments import SegmentAttention
from epd.engine.vision.tower import Grid, PackedAttention


class _PairedAttention(PackedAttention):
    """Gives attention weights, too, as transformers' layers expect: none."""

    def forward(self, hidden_states: torch.Tensor, *args: Foreign, **kwargs: Foreign) -> Foreign:
        kwargs["cu_seqlens"] = kwargs.pop("attention_mask")
        return super().forward(hidden_states, *args, **kwargs), None


def adopt(tower: Foreign) -> None:
    """Give a loaded tower these modules instead of its own."""
    attend = SegmentAttention()
    for layer in tower.transformer.layers:
        own = layer.attention
        own.qkv, own.proj = side_by_side(own.q_proj, own.k_proj, own.v_proj), own.o_proj
        layer.attention = _PairedAttention(own, attend)


def seen_layers(model: Foreign) -> Sequence[Foreign]:
    """Up to that whose rows the projector takes."""
    layers: Foreign = model.vision_tower.transformer.layers
    last = int(model.config.vision_feature_layer) % (len(layers) + 1)
    return list(layers)[:last]


def run(model: Foreign, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
    """Rows of all images, `[sum of num_rows, hidden]`; pixels `[num_patches, 3 * patch ** 2]`."""
    tower, projector = model.vision_tower, model.multi_modal_projector
    counts = [rows * columns for _, rows, columns in grids]
    bounds = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    positions = upload(torch.cat([_positions(grid) for grid in grids]), pixels.device)
    hidden = tower.ln_pre(linear(pixels, tower.patch_conv.weight.flatten(1)))
    turns = tower.patch_positional_embedding(hidden, positions)
    for layer in seen_layers(model):
        hidden = layer(hidden, bounds, position_embeddings=turns)
    normed = projector.norm(hidden)
    merge, parts = int(model.config.spatial_merge_size), []
    for (_, rows, columns), one in zip(grids, normed.split(counts), strict=True):
        blocks = one.view(rows // merge, merge, columns // merge, merge, -1)
        parts.append(blocks.permute(0, 2, 4, 1, 3).reshape(rows * columns // merge**2, -1))
    merged = projector.patch_merger.merging_layer(torch.cat(parts))
    out: torch.Tensor = projector.linear_2(projector.act(projector.linear_1(merged)))
    return out


@functools.lru_cache(maxsize=256)
def _positions(grid: Grid) -> torch.Tensor:
    """`[num_patches, 2]`: line and column of each."""
    _, rows, columns = grid
    return torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
