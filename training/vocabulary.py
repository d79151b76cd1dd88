"""The byte-level vocabulary: token i is byte i, then eight special tokens.

272 rows in all, a multiple of 16; the last eight are never used.
"""

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
(
    END_OF_TEXT, IM_START, IM_END, VISION_START, VISION_END, VISION_PAD, IMAGE_PAD, VIDEO_PAD,
) = range(256, 264)  # fmt: skip

PATCH = 8  # px, the side of a vision patch
MERGE = 2  # patches, the side of a merged cell
CELL = PATCH * MERGE  # px; one row of the encoder's output
