"""Idefics3 and SmolVLM: names and shapes; the longest side of an image is set.

Both sides become multiples of a square tile's side, and the whole image, as one tile, comes behind
the tiles.  The rows of each tile stand behind its name.
"""

from __future__ import annotations

import math

from epd.model_files import tensors
from epd.model_files.checkpoint import Settings
from epd.model_files.family import Family, Geometry, Images

_MOST_SIDE = 4096
_AROUND = "<fake_token_around_image>"


def _of_longest(width: int, height: int, longest: int) -> tuple[int, int]:
    """Width and height when the longer side has so many pixels."""
    ratio = width / height
    sides = (longest, int(longest / ratio)) if width >= height else (int(longest * ratio), longest)
    return max(1, sides[0]), max(1, sides[1])


def _tiles(settings: Settings, tile: int, width: int, height: int) -> tuple[int, int]:
    """Lines and columns; none for an image that is one tile."""
    if settings.get("do_image_splitting") is False:
        return 0, 0
    longest = (settings.get("size") or {}).get("longest_edge") or 4 * 364
    is_wide = width >= height
    width, height = _of_longest(width, height, int(longest))
    width, height = width + (width % 2) * (not is_wide), height + (height % 2) * is_wide
    if max(width, height) > _MOST_SIDE:
        width, height = _of_longest(width, height, _MOST_SIDE)
    width, height = _of_longest(width, height, math.ceil(max(width, height) / tile) * tile)
    lines, columns = math.ceil(height / tile), math.ceil(width / tile)
    return (lines, columns) if lines * columns > 1 else (0, 0)


def _geometry(model_config: Settings, settings: Settings, width: int, height: int) -> Geometry:
    vision = model_config["vision_config"]
    tile = int(vision["image_size"])
    side = tile // int(vision["patch_size"])
    tiles = _tiles(settings, tile, width, height)
    num_patches = (tiles[0] * tiles[1] + 1) * side * side
    num_rows = num_patches // int(model_config.get("scale_factor") or 2) ** 2
    grid_thw = (1, max(1, tiles[0]) * side, max(1, tiles[1]) * side)
    return Geometry(grid_thw, num_rows, num_patches, tiles)


def _tile_text(tiles: tuple[int, int], placeholder: str) -> str:
    """What stands in a prompt for an image of Idefics3: the name of each tile, and a placeholder
    for its rows."""
    lines, columns = (range(1, count + 1) for count in tiles)
    split = "".join(
        "".join(f"{_AROUND}<row_{i}_col_{j}>{placeholder}" for j in columns) + "\n" for i in lines
    )
    return f"{split and split + chr(10)}{_AROUND}<global-img>{placeholder}{_AROUND}"


def _processor(settings: Settings) -> dict[str, int] | str:
    if (edges := settings.get("size")) and not edges.get("longest_edge"):
        return "size: images are resized to a longest_edge, which it lacks"
    return {"image": (settings.get("max_image_size") or {}).get("longest_edge") or 364}


_IDEFICS3 = Family(
    tensors.stack("model.text_model.", **tensors.LLAMA_LAYERS)
    | tensors.siglip("model.vision_model.")
    | {"model.connector.modality_projection.proj.weight": "hidden scale*scale*tower"},
    ("model.vision_model", "model.connector"),
    Images(_geometry, _processor, tile_text=_tile_text),
    sizes={"scale": 2, "layers": 32, "heads": 32, "tower_ffn": 3072, "blocks": 12},
    text_types=("llama",),
)  # fmt: skip
FAMILIES = {"idefics3": _IDEFICS3, "smolvlm": _IDEFICS3}
