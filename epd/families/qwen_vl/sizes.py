"""The Qwen vision families: names and shapes; both sides of an image are rounded (smart resize).

They become multiples of `patch_size * merge_size`, and the area is brought between two bounds; one
row per `merge_size` squared patches.
"""

from __future__ import annotations

from functools import partial

from epd.media_files.video import InVolume, VideoSettings, read_settings
from epd.model_files import tensors
from epd.model_files.checkpoint import Settings
from epd.model_files.family import Family, Geometry, Images
from epd.model_files.geometry import edges_fault, smart_resize

_VISUAL = "model.visual."
_QWEN_BLOCK = {"attn.qkv": "3*tower tower", "attn.proj": "tower tower"}
_PATCHES = "tower 3 frames patch patch"
_QWEN2_TOWER = {
    **tensors.with_biases(
        f"{_VISUAL}blocks.{{blocks}}.",
        _QWEN_BLOCK
        | {"mlp.fc1": "ratio*tower tower", "mlp.fc2": "tower ratio*tower"}
        | {"norm1": "tower", "norm2": "tower"},
    ),
    **tensors.with_biases(
        f"{_VISUAL}merger.",
        {"ln_q": "tower", "mlp.0": "merged merged", "mlp.2": "tower_hidden merged"},
    ),
    f"{_VISUAL}patch_embed.proj.weight": _PATCHES,
}
_QWEN2_5_TOWER = {
    **tensors.with_biases(
        f"{_VISUAL}blocks.{{blocks}}.",
        _QWEN_BLOCK | {n.removesuffix(".weight"): w.replace("ffn", "tower_ffn")
                       .replace("hidden", "tower") for n, w in tensors.MLP.items()},
    ),
    **{f"{_VISUAL}blocks.{{blocks}}.norm{n}.weight": "tower" for n in (1, 2)},
    **tensors.with_biases(f"{_VISUAL}merger.", {"mlp.0": "merged merged", "mlp.2": "out merged"}),
    f"{_VISUAL}merger.ln_q.weight": "tower",
    f"{_VISUAL}patch_embed.proj.weight": _PATCHES,
}  # fmt: skip
_QWEN3_MERGER = {"linear_fc1": "merged merged", "linear_fc2": "out merged"}
QWEN3_TOWER = {
    **tensors.with_biases(
        f"{_VISUAL}blocks.{{blocks}}.",
        _QWEN_BLOCK
        | {"mlp.linear_fc1": "tower_ffn tower", "mlp.linear_fc2": "tower tower_ffn"}
        | {"norm1": "tower", "norm2": "tower"},
    ),
    **tensors.with_biases(f"{_VISUAL}merger.", {"norm": "tower"} | _QWEN3_MERGER),
    **tensors.with_biases(f"{_VISUAL}patch_embed.", {"proj": _PATCHES}),
    f"{_VISUAL}pos_embed.weight": "places tower",
}
_QWEN3_TOWER = QWEN3_TOWER | tensors.with_biases(
    f"{_VISUAL}deepstack_merger_list.{{levels}}.", {"norm": "merged"} | _QWEN3_MERGER
)
_FLAT = (
    (r"^visual\.", "model.visual."),
    (r"^model\.(?!language_model\.|visual\.)", "model.language_model."),
)
_QWEN = {"frames": 2, "merge": 2}
_QWEN2_STACK = tensors.stack(layers=tensors.LAYER | tensors.QKV_BIASES | tensors.MLP)
_QWEN3 = {"layers": tensors.QWEN3_LAYER, "biased": tensors.BIASED}
_QWEN2_VIDEO: Settings = {
    "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
    "patch_size": 14,
    "fps": None,
    "max_video_tokens": 128000,
}
_QWEN3_VIDEO: Settings = {
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
    "patch_size": 16,
    "fps": 2.0,
    "max_video_tokens": 768,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
}


def _geometry(model_config: Settings, settings: Settings, width: int, height: int) -> Geometry:
    patch = int(settings.get("patch_size") or 14)
    merge = int(settings.get("merge_size") or 2)
    size = settings.get("size") or {}
    min_pixels = int(settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56)
    max_pixels = int(settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280)
    resized_h, resized_w = smart_resize(height, width, patch * merge, min_pixels, max_pixels)
    grid_h, grid_w = resized_h // patch, resized_w // patch
    num_patches = grid_h * grid_w
    return Geometry((1, grid_h, grid_w), num_patches // merge**2, num_patches)


def _processor(settings: Settings) -> dict[str, int] | str:
    if wrong := edges_fault(settings):
        return wrong
    return {
        "patch": settings.get("patch_size") or 14,
        "merge": settings.get("merge_size") or 2,
        "frames": settings.get("temporal_patch_size") or 2,
    }


def _video(
    kind: type[VideoSettings], defaults: Settings, config: Settings, given: Settings
) -> VideoSettings | None:
    if config.get("video_token_id") is None:
        return None
    if kind is VideoSettings:  # an older way to say the same
        older = (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels"))
        edges = {edge: given[name] for edge, name in older if given.get(name) is not None}
        given = {**given, "size": {**(given.get("size") or defaults["size"]), **edges}}
    return read_settings(kind, defaults, given)


_RULES = (partial(_video, VideoSettings, _QWEN2_VIDEO), partial(_video, InVolume, _QWEN3_VIDEO))
_SEEN2, SEEN3 = (
    (("model.visual",), Images(_geometry, _processor, takes_bounds=True, video=video), _FLAT)
    for video in _RULES
)
FAMILIES = {
    "qwen2_vl": Family(
        _QWEN2_STACK | _QWEN2_TOWER, *_SEEN2, sizes=_QWEN | {"ratio": 4}, is_flat=True
    ),
    "qwen2_5_vl": Family(_QWEN2_STACK | _QWEN2_5_TOWER, *_SEEN2, sizes=_QWEN, is_flat=True),
    "qwen3_vl": Family(
        tensors.stack(layers=tensors.QWEN3_LAYER | tensors.MLP, biased=tensors.BIASED)
        | _QWEN3_TOWER,
        *SEEN3,
        sizes=_QWEN | {"head": 128},
    ),
    "qwen3_vl_moe": Family(
        tensors.stack(**_QWEN3, dense=tensors.MLP, sparse=tensors.EXPERTS) | _QWEN3_TOWER,
        *SEEN3,
        transposed=".mlp.experts.",
        sizes=_QWEN | {"head": 128},
        is_tied=True,
    ),
}
