"""The vision towers of the Qwen families over packed images, without waiting for the device.

Theory of operation
-------------------
transformers derives positions, interpolation weights and segment bounds from the grids inside the
forward, and reads the bounds back from the device in every layer.  Here they are computed on the
host, which has the grids, and handed in; attention has its segments as numbers.

A layer's residual sums are one kernel with the norm behind each.  The second sum has the next
layer's first norm with it, so a layer leaves that beside its rows, which it changes in place.

The patch embedding is a convolution whose kernel covers a patch exactly: a matrix product.  Where
the activation is the matrix library's GELU, it is applied as the product is written, not in a pass
of its own over the widest activations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import gelu, linear

from epd.engine.device.copies import upload
from epd.engine.kernels import kernels_for
from epd.engine.vision.segments import SegmentAttention

Grid = tuple[int, int, int]


class PackedAttention(nn.Module):
    """A tower's attention module with its weights; `cu_seqlens` must be on the CPU."""

    def __init__(self, attention: Any, attend: SegmentAttention) -> None:
        super().__init__()
        self.attend = attend
        self.qkv = attention.qkv
        self.proj = attention.proj
        self.num_heads = attention.num_heads
        self.scaling = attention.scaling

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        num_tokens = hidden_states.shape[0]
        qkv = self.qkv(hidden_states).view(num_tokens, 3, self.num_heads, -1)
        kernels_for(qkv.device.type).rotate_pair(qkv, *position_embeddings)
        return self.proj(self.attend(qkv, cu_seqlens, self.scaling))


class LinearPatchEmbed(nn.Module):
    def __init__(self, embed: Any) -> None:
        super().__init__()
        self.proj = embed.proj

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        weight = self.proj.weight
        return linear(patches.to(weight.dtype), weight.flatten(1), self.proj.bias)


class PatchProduct(nn.Module):
    """A convolution over images whose kernel covers a patch exactly; a library of convolutions
    would plan each new number of them."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """`[N, C, height, width]` to `[N, D, rows, columns]`."""
        side = self.weight.shape[-1]
        split = images.unflatten(3, (-1, side)).unflatten(2, (-1, side))
        patches = split.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return linear(patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


class GeluMlp(nn.Module):
    """Two products with a tanh GELU between them, which the first one applies on CUDA.  Not where
    adapters may change that one: they add to what goes into the GELU."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.linear_fc1 = mlp.linear_fc1
        self.linear_fc2 = mlp.linear_fc2

    @staticmethod
    def fits(mlp: Any) -> bool:
        if {name for name, _ in mlp.named_children()} - {"act_fn"} != {"linear_fc1", "linear_fc2"}:
            return False
        probe, first = torch.linspace(-4, 4, 33), mlp.linear_fc1
        return (
            isinstance(first, nn.Linear)
            and first.bias is not None
            and torch.allclose(
                mlp.act_fn(probe), gelu(probe, approximate="tanh"), atol=1e-6, rtol=0
            )
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        first = self.linear_fc1
        if hidden_states.is_cuda:
            weight = first.weight.t()
            wide = torch._addmm_activation(  # noqa: SLF001 - it has no public name
                first.bias, hidden_states, weight, use_gelu=True
            )
        else:
            wide = gelu(first(hidden_states), approximate="tanh")
        return self.linear_fc2(wide)


class FusedLayer(nn.Module):
    """A layer with its modules; changes the rows that it is given."""

    def __init__(self, layer: nn.Module, following: FusedLayer | None) -> None:
        super().__init__()
        self.norm1, self.attn = layer.norm1, layer.attn
        self.norm2, self.mlp = layer.norm2, layer.mlp
        # A method, since a module would be a part of this one.
        self._give = None if following is None else following.take
        self._normed: torch.Tensor | None = None  # its rows, if the layer before gave them

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        normed, self._normed = self._normed, None
        if normed is None:
            normed = _norm(self.norm1, hidden_states)
        x = self.mlp(_norm(self.norm2, self.attn(normed, **given), hidden_states))
        if self._give is None:
            return hidden_states.add_(x)
        self._give(x, hidden_states)
        return hidden_states

    def take(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """Rows that come next are `residual += x`."""
        self._normed = _norm(self.norm1, x, residual)


def _norm(norm: nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Of x `[T, H]`, or of `residual += x`."""
    eps, bias = getattr(norm, "eps", None), getattr(norm, "bias", None)
    if eps is None:  # an RMS norm of transformers
        eps = norm.variance_epsilon
    ops = kernels_for(x.device.type)
    normed: torch.Tensor = ops.norm(x, norm.weight, eps, bias, residual=residual)
    return normed


def fuse(layers: nn.ModuleList) -> None:
    """Layers of two norms, attention and MLP, in order, become such ones."""
    following = None
    for index in reversed(range(len(layers))):
        layers[index] = following = FusedLayer(layers[index], following)


def adopt(visual: Any) -> None:
    """Give a loaded tower these modules instead of its own."""
    visual.patch_embed = LinearPatchEmbed(visual.patch_embed)
    attend = SegmentAttention()
    for block in visual.blocks:
        block.attn = PackedAttention(block.attn, attend)
        if GeluMlp.fits(block.mlp):
            block.mlp = GeluMlp(block.mlp)
    fuse(visual.blocks)


def run(
    visual: Any, pixels: torch.Tensor, grids: Sequence[Grid], inputs: dict[str, Any]
) -> torch.Tensor:
    """Rows of all images, deepstack levels behind each; inputs: those of `tower_inputs`."""
    output = visual(pixels, grid_thw=torch.tensor(grids), return_dict=True, **inputs)
    levels = list(getattr(output, "deepstack_features", None) or ())
    return torch.cat([output.pooler_output, *levels], dim=-1)


def tower_inputs(visual: Any, grids: Sequence[Grid], device: torch.device) -> dict[str, Any]:
    """What the forward would derive from the grids; segment bounds stay on the host."""
    windows = (
        (int(visual.window_size), int(visual.patch_size)) if hasattr(visual, "window_size") else ()
    )
    side = int(getattr(visual, "num_grid_per_side", 0))
    corners = bool(getattr(visual, "interpolation_align_corners", True))
    merge = int(visual.spatial_merge_size)
    each = [_of_grid(grid, merge, side, windows, corners) for grid in grids]
    inputs: dict[str, Any] = {"cu_seqlens": joined([parts["cu_seqlens"] for parts in each])}
    for name in ("position_ids", "interp_indices", "interp_weights"):
        if name in each[0]:
            inputs[name] = upload(torch.cat([parts[name] for parts in each]), device)
    if windows:
        inputs["cu_window_seqlens"] = joined([parts["cu_window_seqlens"] for parts in each])
        index, rows = [], 0
        for parts in each:
            index.append(parts["window_index"] + rows)
            rows += len(parts["window_index"])
        inputs["window_index"] = upload(torch.cat(index), device)
    return inputs


def joined(bounds: list[torch.Tensor]) -> torch.Tensor:
    """Cumulative lengths of all images from those of each."""
    lengths = torch.cat([bound.diff() for bound in bounds])
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


@functools.lru_cache(maxsize=256)
def _of_grid(
    grid: Grid, merge: int, side: int, windows: tuple[int, ...], corners: bool
) -> dict[str, torch.Tensor]:
    from transformers import vision_utils

    thw = torch.tensor([grid])
    parts = {
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(thw),
        "position_ids": vision_utils.get_vision_position_ids(thw, merge),
    }
    if side:
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            thw, num_grid_per_side=side, align_corners=corners, spatial_merge_size=merge
        )
        parts |= {"interp_indices": indices, "interp_weights": weights}
    if windows:
        index, bounds = vision_utils.get_vision_window_index(thw, merge, *windows)
        parts |= {"window_index": index, "cu_window_seqlens": bounds}
    return parts
