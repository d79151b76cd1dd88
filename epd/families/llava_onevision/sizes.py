"""LLaVA-OneVision: names and shapes; an image is cut into square tiles (anyres).

Of the best fitting resolution, plus one tile of the whole.  The padding's features are taken out
again, every feature line ends with a newline row, and above `anyres_max_N` tiles the features are
scaled down.
"""

from __future__ import annotations

import math

from epd.model_files import tensors
from epd.model_files.checkpoint import Settings
from epd.model_files.family import Family, Geometry, Images


def _best_resolution(height: int, width: int, pinpoints: list[list[int]]) -> tuple[int, int]:
    """The (height, width) of `pinpoints` that keeps most of the image and wastes least."""
    best = (0, 0)
    best_effective, best_wasted = 0, math.inf
    for candidate_h, candidate_w in pinpoints:
        scale = min(candidate_w / width, candidate_h / height)
        effective = min(int(width * scale) * int(height * scale), width * height)
        wasted = candidate_w * candidate_h - effective
        if effective > best_effective or (effective == best_effective and wasted < best_wasted):
            best, best_effective, best_wasted = (candidate_h, candidate_w), effective, wasted
    return best


def _unpadded(height: int, width: int, current_h: int, current_w: int) -> tuple[int, int]:
    """Feature lines and columns that are left when the padding is taken out."""
    if width / height > current_w / current_h:
        new_h = int(round(height * (current_w / width), 7))
        current_h -= (current_h - new_h) // 2 * 2
    else:
        new_w = int(round(width * (current_h / height), 7))
        current_w -= (current_w - new_w) // 2 * 2
    return current_h, current_w


def _geometry(model_config: Settings, settings: Settings, width: int, height: int) -> Geometry:
    vision = model_config["vision_config"]
    tile = int(vision["image_size"])
    side = tile // int(vision["patch_size"])  # features along one side of a tile
    pinpoints = settings.get("image_grid_pinpoints") or model_config.get("image_grid_pinpoints")
    if not pinpoints:
        pinpoints = [[384 * i, 384 * j] for i in range(1, 7) for j in range(1, 7)]
    best_h, best_w = _best_resolution(height, width, pinpoints)
    tiles_h, tiles_w = best_h // tile, best_w // tile
    lines, columns = _unpadded(height, width, side * tiles_h, side * tiles_w)
    aspect = str(model_config.get("vision_aspect_ratio") or "anyres_max_9")
    max_tiles = int(aspect.removeprefix("anyres_max_"))
    ratio = math.sqrt(lines * columns / (max_tiles * side**2))
    if ratio > 1.1:
        lines, columns = int(lines // ratio), int(columns // ratio)
    num_rows = side * side + lines * columns + lines  # whole image, tiles, newlines
    num_patches = (tiles_h * tiles_w + 1) * side * side
    return Geometry((1, height, width), num_rows, num_patches)


def _processor(settings: Settings) -> dict[str, int] | str:
    height = (settings.get("size") or {}).get("height")
    return {"image": height} if height else {}


_SIGLIP = {
    **tensors.siglip("model.vision_tower."),
    **tensors.with_biases(
        "model.multi_modal_projector.", {"linear_1": "hidden tower", "linear_2": "hidden hidden"}
    ),
    "model.image_newline": "hidden",
}
FAMILIES = {
    "llava_onevision": Family(
        tensors.stack(layers=tensors.LAYER | tensors.QKV_BIASES | tensors.MLP) | _SIGLIP,
        ("model.vision_tower", "model.multi_modal_projector", "model.image_newline"),
        Images(_geometry, _processor),
        (
            (r"^language_model\.lm_head", "lm_head"),
            (r"^language_model\.(model\.)?", "model.language_model."),
            (r"^(vision_tower|multi_modal_projector|image_newline)", r"model.\1"),
            (r"^model\.vision_tower\.vision_model\.", "model.vision_tower."),
        ),
        text_types=("qwen2",),
    ),
}
