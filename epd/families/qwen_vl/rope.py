"""Multimodal rope positions of a prompt, as a pure function of where its images stand.

Text advances all three axes (time, height, width) by one per token.  An image that starts at
position p puts row (t, y, x) at (p + t, p + y, p + x).  The text goes on at p + max(h, w): an image
of 10 x 10 rows costs 100 tokens of KV but only 10 positions.  What that saves is the `delta`: the
decode token at index i has position i + delta in all axes (fault F26).

A video is an image with more than one t.  Qwen2.5-VL measures t in time instead of frames: frame t
stands at p + floor(t * seconds between frames * positions per second), in fp32 as in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from epd.engine.base import MediaLayout, RopePositions


def mrope_positions(
    num_tokens: int,
    items: Sequence[MediaLayout],
    merge_size: int,
    tokens_per_second: float | None = None,
) -> RopePositions:
    """Positions int64 `[3, num_tokens]` and the delta, for images in the order of their offsets.

    `tokens_per_second`: positions per second of a video; None: one per frame.  Raises ValueError
    when an item does not fit its row count or the prompt.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    index = position = 0
    for item in items:
        frames, rows, columns = item.grid_thw
        rows, columns = rows // merge_size, columns // merge_size
        end = item.offset + item.num_rows
        if frames * rows * columns != item.num_rows or item.offset < index or end > num_tokens:
            raise ValueError(f"image at token {item.offset} does not fit: {item}")
        text = item.offset - index
        positions[:, index : item.offset] = np.arange(position, position + text)
        position += text
        grid = np.indices((frames, rows, columns)).reshape(3, -1)
        if tokens_per_second is not None and frames > 1:
            interval = np.float32(item.second_per_grid) * np.float32(tokens_per_second)
            grid[0] = (grid[0].astype(np.float32) * interval).astype(np.int64)
        positions[:, item.offset : end] = grid + position
        position += max(rows, columns)
        index = end
    text = num_tokens - index
    positions[:, index:] = np.arange(position, position + text)
    return RopePositions(positions=positions, delta=int(positions.max(initial=-1)) + 1 - num_tokens)
