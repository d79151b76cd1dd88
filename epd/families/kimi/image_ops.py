"""Resize and patchify on the device, as Kimi's processor of images does."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from epd.engine.vision.image_resize import resized
from epd.families.kimi.sizes import NavitSettings, navit_resize


class NavitImageOps:
    """What Kimi's image processor does behind decoding: resize, pad with black, cut in lines."""

    def __init__(self, settings: NavitSettings) -> None:
        self._settings = settings
        each = torch.tensor([settings.image_mean, settings.image_std])
        self._scale = 255 * each.view(2, 3, 1, 1)

    def patches(
        self, pixels: torch.Tensor, grid_thw: tuple[int, int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        """uint8 `[height, width, 3]` to `[num_patches, 3 * patch_size ** 2]`, on its device."""
        p, (_, rows, columns) = self._settings.patch_size, grid_thw
        height, width = navit_resize(self._settings, pixels.shape[1], pixels.shape[0])
        image = resized(pixels[None], height, width)[0].permute(2, 0, 1)
        image = pad(image, (0, columns * p - width, 0, rows * p - height)).float()
        if self._scale.device != pixels.device:
            self._scale = self._scale.to(pixels.device)
        mean, std = self._scale
        image = ((image - mean) / std).to(dtype)
        return (
            image.unflatten(2, (-1, p))
            .unflatten(1, (-1, p))
            .permute(1, 3, 0, 2, 4)
            .reshape(rows * columns, -1)
        )
