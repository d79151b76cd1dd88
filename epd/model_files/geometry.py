"""How many embedding rows an image gives, from its width and height alone.

The gateway expands each placeholder to its exact row count before anybody has decoded a pixel, so
this module repeats the size arithmetic of the image processors, to the rounding.  It must stay free
of torch, transformers and PIL: the gateway imports it.  The encode worker checks the result against
the real processor for each image, and a difference fails that image, never the answer.

Width and height are those after EXIF rotation: a photograph with orientation 5 to 8 has its
header's width and height swapped.

Qwen families (smart resize): both sides are rounded to multiples of `patch_size * merge_size` and
the area is brought between two bounds; one row per `merge_size` squared patches.
LLaVA-OneVision (anyres): the image is cut into square tiles of the best fitting resolution, plus
one tile of the whole; the padding's features are taken out again, every feature line ends with a
newline row, and above `anyres_max_N` tiles the features are scaled down.
Idefics3 and SmolVLM: the longest side is set, both become multiples of a square tile's side, and
the whole image, as one tile, comes behind the tiles.  The rows of each tile stand behind its name.
Kimi-K2.5 (NaViT): the image is made smaller, never larger, to fit a number of patches and a length
of a side, and black is put below it and to its right up to multiples of `patch_size * merge_size`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from epd.errors import MediaError
from epd.messages import PixelBounds
from epd.model_files.checkpoint import Settings

MAX_SIDE_RATIO = 200  # of the Qwen processors; applied to every family
_MOST_SIDE = 4096  # of an image of Idefics3
_AROUND = "<fake_token_around_image>"


@dataclass(frozen=True, slots=True)
class Geometry:
    """What an image of a given size becomes.

    `grid_thw`: patches (frames, height, width); (1, height, width) in pixels for LLaVA.
    `num_rows`: embedding rows, which is also the number of placeholders in the prompt.
    `num_patches`: patches that the vision tower sees, the cost measure of a batch.
    `tiles`: lines and columns of tiles whose rows stand apart in the prompt, ahead of the whole's.
    """

    grid_thw: tuple[int, int, int]
    num_rows: int
    num_patches: int
    tiles: tuple[int, int] = (0, 0)

    @property
    def num_runs(self) -> int:
        """Placeholders that share the rows, as many for each."""
        return self.tiles[0] * self.tiles[1] + 1


def image_geometry(
    model_config: Settings,
    preprocessor_config: Settings,
    width: int,
    height: int,
) -> Geometry:
    """Geometry of an image `width` by `height` pixels (after EXIF rotation).

    The configs are the model directory's config.json and image processor settings as read from
    JSON. Raises MediaError, for the client, when the model takes no images or the sides are too
    unequal.
    """
    family = _FAMILIES.get(str(model_config.get("model_type")))
    if family is None:
        raise MediaError("this model takes no images; send text only")
    if width < 1 or height < 1:
        raise MediaError(f"the image is {width} x {height} pixels; it needs at least one pixel")
    if max(width, height) / min(width, height) > MAX_SIDE_RATIO:
        raise MediaError(
            f"the image is {width} x {height} pixels; one side may be at most "
            f"{MAX_SIDE_RATIO} times the other: crop it"
        )
    return family(model_config, preprocessor_config, width, height)


def names_tiles(model_config: Settings) -> bool:
    """Whether a prompt has the name of each tile of an image: see `tile_text`."""
    return _FAMILIES.get(str(model_config.get("model_type"))) is _idefics3


def takes_bounds(model_config: Settings) -> bool:
    """Whether images are resized between two areas, which a request may change."""
    return _FAMILIES.get(str(model_config.get("model_type"))) is _qwen


def bounded(preprocessor_config: Settings, bounds: PixelBounds | None) -> Settings:
    """The settings with the bounds of a request."""
    settings = dict(preprocessor_config)
    if bounds is not None and bounds.min_pixels:
        settings["min_pixels"] = bounds.min_pixels
    if bounds is not None and bounds.max_pixels:
        settings["max_pixels"] = bounds.max_pixels
    return settings


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Height and width in pixels: multiples of `factor`, area within bounds, ratio about kept."""
    h_bar = round(height / factor) * factor
    w_bar = round(width / factor) * factor
    if h_bar * w_bar > max_pixels:
        beta = math.sqrt((height * width) / max_pixels)
        h_bar = max(factor, math.floor(height / beta / factor) * factor)
        w_bar = max(factor, math.floor(width / beta / factor) * factor)
    elif h_bar * w_bar < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        h_bar = math.ceil(height * beta / factor) * factor
        w_bar = math.ceil(width * beta / factor) * factor
    return h_bar, w_bar


def _qwen(model_config: Settings, settings: Settings, width: int, height: int) -> Geometry:
    patch = int(settings.get("patch_size") or 14)
    merge = int(settings.get("merge_size") or 2)
    size = settings.get("size") or {}
    min_pixels = int(settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56)
    max_pixels = int(settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280)
    resized_h, resized_w = smart_resize(height, width, patch * merge, min_pixels, max_pixels)
    grid_h, grid_w = resized_h // patch, resized_w // patch
    num_patches = grid_h * grid_w
    return Geometry((1, grid_h, grid_w), num_patches // merge**2, num_patches)


def best_resolution(height: int, width: int, pinpoints: list[list[int]]) -> tuple[int, int]:
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


def _llava_onevision(
    model_config: Settings, settings: Settings, width: int, height: int
) -> Geometry:
    vision = model_config["vision_config"]
    tile = int(vision["image_size"])
    side = tile // int(vision["patch_size"])  # features along one side of a tile
    pinpoints = settings.get("image_grid_pinpoints") or model_config.get("image_grid_pinpoints")
    if not pinpoints:
        pinpoints = [[384 * i, 384 * j] for i in range(1, 7) for j in range(1, 7)]
    best_h, best_w = best_resolution(height, width, pinpoints)
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


def _idefics3(model_config: Settings, settings: Settings, width: int, height: int) -> Geometry:
    vision = model_config["vision_config"]
    tile = int(vision["image_size"])
    side = tile // int(vision["patch_size"])
    tiles = _tiles(settings, tile, width, height)
    num_patches = (tiles[0] * tiles[1] + 1) * side * side
    num_rows = num_patches // int(model_config.get("scale_factor") or 2) ** 2
    grid_thw = (1, max(1, tiles[0]) * side, max(1, tiles[1]) * side)
    return Geometry(grid_thw, num_rows, num_patches, tiles)


def tile_text(tiles: tuple[int, int], placeholder: str) -> str:
    """What stands in a prompt for an image of Idefics3: the name of each tile, and a placeholder
    for its rows."""
    lines, columns = (range(1, count + 1) for count in tiles)
    split = "".join(
        "".join(f"{_AROUND}<row_{i}_col_{j}>{placeholder}" for j in columns) + "\n" for i in lines
    )
    return f"{split and split + chr(10)}{_AROUND}<global-img>{placeholder}{_AROUND}"


@dataclass(frozen=True, slots=True)
class NavitSettings:
    """How Kimi's processor prepares images, under the names of both releases."""

    patch_size: int
    merge_size: int
    max_patches: int
    max_side: int  # in patches
    fixed_output_tokens: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]


def navit_settings(settings: Settings) -> NavitSettings:
    """Of preprocessor_config.json."""
    told = {**settings, **(settings.get("media_proc_cfg") or {})}
    size = told.get("size") or {}
    return NavitSettings(
        int(told.get("patch_size") or 14),
        int(told.get("merge_size") or told.get("merge_kernel_size") or 2),
        int(told.get("max_patches") or told.get("in_patch_limit") or 16384),
        int(size.get("max_height") or told.get("patch_limit_on_one_side") or 512),
        int(told.get("fixed_output_tokens") or 0),
        tuple(told.get("image_mean") or (0.5,) * 3),
        tuple(told.get("image_std") or (0.5,) * 3),
    )


def navit_resize(settings: NavitSettings, width: int, height: int) -> tuple[int, int]:
    """Height and width in pixels of the image alone, before it is padded."""
    patch, most = settings.patch_size, settings.max_side * settings.patch_size
    num_patches = max(1, height // patch) * max(1, width // patch)
    scale = min(1.0, math.sqrt(settings.max_patches / num_patches), most / height, most / width)
    resized_h, resized_w = (min(max(1, int(side * scale)), most) for side in (height, width))
    return resized_h, resized_w


def _kimi(model_config: Settings, settings: Settings, width: int, height: int) -> Geometry:
    navit = navit_settings(settings)
    sides = navit_resize(navit, width, height)
    block = navit.patch_size * navit.merge_size
    grid_h, grid_w = (-(-side // block) * navit.merge_size for side in sides)
    num_patches = grid_h * grid_w
    return Geometry((1, grid_h, grid_w), num_patches // navit.merge_size**2, num_patches)


_Family = Callable[[Settings, Settings, int, int], Geometry]
_FAMILIES: dict[str, _Family] = {
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "llava_onevision": _llava_onevision,
    "kimi_k25": _kimi,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
}
