"""InternVL 3 and 3.5: names and shapes; an image is stretched over a grid of square tiles.

It has a bounded number of them, and the ratio that is nearest to the image's.  Behind more than one
tile comes the whole image as one more.  All rows stand behind each other, between two tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from epd.media_files.film_rules import InMiddles
from epd.media_files.video import VideoSettings, read_settings
from epd.model_files import tensors
from epd.model_files.checkpoint import Settings
from epd.model_files.family import Family, Geometry, Images

_SIDE = 384  # of the tiles of a processor that names no size
_ALWAYS = {  # what else a tower would have is not computed
    "use_mask_token": False, "use_absolute_position_embeddings": True, "use_mean_pooling": True,
}  # fmt: skip


@functools.cache
def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """Columns and lines, fewer tiles first."""
    sides = range(1, most + 1)
    return sorted(((c, r) for c in sides for r in sides if least <= c * r <= most), key=math.prod)


def tile_grid(settings: Settings, tile: int, width: int, height: int) -> tuple[int, int]:
    """Columns and lines of tiles; of grids as near the last one that enlarges by less than two."""
    best, nearest = (1, 1), float("inf")
    most = int(settings.get("max_patches") or 12)
    for grid in _grids(int(settings.get("min_patches") or 1), most) if most > 1 else ():
        far = abs(width / height - grid[0] / grid[1])
        fills = width * height > 0.5 * tile * tile * grid[0] * grid[1]
        if far < nearest or (far == nearest and fills):
            best, nearest = grid, far
    return best


def _scale(config: Settings) -> int:
    """Patches along a side that become one row; 0: config.json names none."""
    ratio = config.get("downsample_ratio", 0.5)
    is_part = isinstance(ratio, int | float) and 0 < ratio <= 1 and not 1 / ratio % 1
    return int(1 / ratio) if is_part else 0


def _plain(config: Settings) -> Settings:
    """Sides of squares as one number, and rows by a whole one."""
    vision, found = config.get("vision_config"), {**config, "scale_factor": _scale(config) or None}
    if isinstance(vision, dict):
        sides = {name: vision.get(name) for name in ("image_size", "patch_size")}
        squares = {n: s[0] for n, s in sides.items() if isinstance(s, list) and s == s[:1] * 2}
        found["vision_config"] = vision | squares
    return found


def _fault(config: Settings) -> str:
    vision = config.get("vision_config") or {}
    if not _scale(config):
        return f"downsample_ratio: {config['downsample_ratio']!r} is not one by a whole number"
    if (config.get("vision_feature_select_strategy") or "default") != "default":
        return "vision_feature_select_strategy: a row of the whole tile is not taken"
    other = [name for name, value in _ALWAYS.items() if vision.get(name, value) != value]
    return f"vision_config.{other[0]}: a tower like that is not supported" if other else ""


def _geometry(model_config: Settings, settings: Settings, width: int, height: int) -> Geometry:
    vision = _plain(model_config)["vision_config"]
    tile = int(vision.get("image_size") or 448)
    side = tile // int(vision.get("patch_size") or 14)
    columns, lines = tile_grid(settings, tile, width, height)
    num_tiles = columns * lines + (columns * lines > 1)
    num_rows = num_tiles * (side // _scale(model_config)) ** 2
    return Geometry((1, lines * side, columns * side), num_rows, num_tiles * side * side)


def _processor(settings: Settings) -> dict[str, int] | str:
    size = settings.get("size") or {}
    height, width = (size.get(name) or _SIDE for name in ("height", "width"))
    return {"image": height} if height == width else "size: a tile is no square"


def _video(config: Settings, given: Settings) -> VideoSettings:
    size, vision = given.get("size") or {}, _plain(config)["vision_config"]
    side, patch = size.get("height") or _SIDE, vision.get("patch_size") or 14
    own: Settings = {"size": {}, "tile": side, "patch_size": patch, "merge_size": _scale(config)}
    return read_settings(InMiddles, {}, {**given, **own})


def _text(*kinds: str) -> Callable[[Settings], bool]:
    """Whether the language model is one of these."""
    return lambda config: (config.get("text_config") or {}).get("model_type", "qwen2") in kinds


def _seen(name: str, value: object, default: object) -> Callable[[Settings], bool]:
    """Whether a field of the tower has this value."""
    return lambda config: (config.get("vision_config") or {}).get(name, default) == value


_LAYER = {
    "blocks": {f"attention.{n}_proj.weight": "tower tower" for n in "qkv"}
    | tensors.with_biases("", {"attention.projection_layer": "tower tower"})
    | tensors.with_biases("", {"mlp.fc1": "tower_ffn tower", "mlp.fc2": "tower tower_ffn"})
    | {f"layernorm_{n}.weight": "tower" for n in ("before", "after")}
    | {"lambda_1": "tower", "lambda_2": "tower"},
    "qkv_biased": {f"attention.{n}_proj.bias": "tower" for n in "qkv"},
    "normed": {f"attention.{n}_norm.weight": "tower" for n in "qk"},
    "centred": {f"layernorm_{n}.bias": "tower" for n in ("before", "after")},
}
_EMBEDDINGS = "model.vision_tower.embeddings."
_SEEING = {
    **{f"model.vision_tower.encoder.layer.{{{blocks}}}.{name}": shape
       for blocks, part in _LAYER.items() for name, shape in part.items()},
    **tensors.with_biases(_EMBEDDINGS, {"patch_embeddings.projection": "tower 3 patch patch"}),
    f"{_EMBEDDINGS}cls_token": "1 1 tower",
    f"{_EMBEDDINGS}position_embeddings": "1 positions tower",
    **tensors.with_biases(
        "model.multi_modal_projector.",
        {"layer_norm": "scale*scale*tower", "linear_1": "hidden scale*scale*tower",
         "linear_2": "hidden hidden"},
    ),
}  # fmt: skip
_STACK = tensors.stack(
    layers=tensors.LAYER, qwen2=tensors.QKV_BIASES, head_normed=tensors.HEAD_NORMS,
    biased=tensors.BIASED, plain=tensors.MLP, among=tensors.MLP, experts=tensors.EXPERTS,
)  # fmt: skip
FAMILIES = {
    "internvl": Family(
        _STACK | _SEEING,
        ("model.vision_tower", "model.multi_modal_projector"),
        Images(
            _geometry,
            _processor,
            tile_text=lambda tiles, place: f"<img>{place}</img>",
            video=_video,
            video_place="<video>",
        ),
        tensors.LLAVA_NAMES,
        sizes={"scale": 2, "image": 448, "patch": 14},
        text_types=("qwen2", "qwen3", "qwen3_moe"),
        is_tied=True,
        plain=_plain,
        fault=_fault,
        ranges={
            "qwen2": ("layers", _text("qwen2")),
            "head_normed": ("layers", _text("qwen3", "qwen3_moe")),
            "plain": ("layers", _text("qwen2", "qwen3")),
            "among": ("dense", _text("qwen3_moe")),
            "experts": ("sparse", _text("qwen3_moe")),
            "qkv_biased": ("blocks", _seen("attention_bias", True, False)),
            "normed": ("blocks", _seen("use_qk_norm", True, False)),
            "centred": ("blocks", _seen("norm_type", "layer_norm", "layer_norm")),
        },
    ),
}
