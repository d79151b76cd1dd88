"""Images for benchmarks: noise, which no codec can shrink, so that bytes are what they seem."""

from __future__ import annotations

import functools
import io


@functools.cache
def noise_png(width: int = 256, height: int = 256, seed: int = 7) -> bytes:
    """A PNG of random pixels: 256 x 256 are about 200 KB."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return out.getvalue()
