"""Resize, normalise and patchify on the device: the Hugging Face processor's arithmetic on tensors.

Theory of operation
-------------------
Of preparing an image only the decoder (JPEG, PNG) needs a CPU.  The rest is memory-bound arithmetic
for a GPU.  Decoded pixels are uploaded as they are, one byte per channel: a sixteenth of the bytes
of their patches in fp32.

The processor of the Qwen families resizes with Pillow (bicubic, antialiased, rounded to bytes;
`image_resize`), then scales, normalises and cuts patches in the order of merge blocks.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from epd.engine.vision.image_resize import resized

if TYPE_CHECKING:
    from epd.engine.language.products import Foreign

_STRIP_PIXELS = 1 << 18


def rgb_bytes(image: Any) -> np.ndarray[Any, Any]:
    """uint8 `[height, width, 3]` of a PIL image, transparency handled as transformers does.

    In strips, as each step on the way would make a copy of the whole (F67).
    """
    width, height = image.size
    found = np.empty((height, width, 3), dtype=np.uint8)
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        strip = image.crop((0, top, width, min(height, top + rows)))
        found[top : top + rows] = _whole_rgb(strip)
    return found


def _whole_rgb(image: Any) -> np.ndarray[Any, Any]:
    from transformers.image_transforms import convert_to_rgb

    if image.mode == "RGB":
        return np.asarray(image)
    if "return_numpy" in inspect.signature(convert_to_rgb).parameters:
        return np.asarray(convert_to_rgb(image, return_numpy=True))
    return np.asarray(convert_to_rgb(image))


class Scaling:
    """What a processor makes of bytes of one size: rescaled and normalised."""

    def __init__(self, processor: Foreign) -> None:
        factor = processor.rescale_factor if processor.do_rescale else 1.0
        mean, std = torch.tensor(processor.image_mean), torch.tensor(processor.image_std)
        if not processor.do_normalize:
            mean, std = torch.zeros(3), torch.ones(3)
        self._gain = (factor / std).view(3, 1, 1)
        self._offset = (-mean / std).view(3, 1, 1)
        self._on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def scaled(self, images: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """uint8 `[images, height, width, 3]` to `[images, 3, height, width]`."""
        device = images.device
        if device not in self._on:
            self._on[device] = (self._gain.to(device), self._offset.to(device))
        gain, offset = self._on[device]
        return torch.addcmul(offset, images.permute(0, 3, 1, 2).float(), gain).to(dtype)


class QwenImageOps(Scaling):
    """What the image and video processors of the Qwen families do behind decoding."""

    def __init__(self, processor: Foreign) -> None:
        super().__init__(processor)
        self._patch, self._merge = int(processor.patch_size), int(processor.merge_size)
        self._frames = int(processor.temporal_patch_size)

    @staticmethod
    def fits(processor: Any) -> bool:
        """Whether the processor resizes as this module does: bicubic."""
        return bool(processor.do_resize) and int(processor.resample) == 3

    def patches(
        self, pixels: torch.Tensor, grid_thw: tuple[int, int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        """uint8 `[height, width, 3]` to patches `[num_patches, patch_dim]`, on its device.

        Of a video uint8 `[frames, height, width, 3]`: an odd number of them ends with the last one
        twice, as an image is a video of one frame.
        """
        frames, rows, columns = grid_thw
        images = pixels if pixels.ndim == 4 else pixels[None]
        images = self.scaled(resized(images, *self.size_of(grid_thw)), dtype)
        if missing := frames * self._frames - len(images):
            last = images[-1:].expand(missing + 1, -1, -1, -1)  # a view: an image is not copied
            images = torch.cat([images[:-1], last]) if len(images) > 1 else last
        m, p = self._merge, self._patch
        split = images.unflatten(0, (frames, -1)).unflatten(-1, (columns // m, m, p))
        blocks = split.unflatten(3, (rows // m, m, p)).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return blocks.reshape(frames * rows * columns, 3 * self._frames * p * p)

    def size_of(self, grid_thw: tuple[int, int, int]) -> tuple[int, int]:
        """Height and width in pixels of what a grid's patches cover."""
        return grid_thw[1] * self._patch, grid_thw[2] * self._patch

    def num_rows(self, grid_thw: tuple[int, int, int]) -> int:
        return grid_thw[0] * grid_thw[1] * grid_thw[2] // self._merge**2
