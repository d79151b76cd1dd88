"""GLM-4.1V to 4.6V and GLM-OCR: names and shapes; both sides of an image are rounded.

As in the Qwen families, but an image counts as the two frames of a patch: bounds are of both.  One
that is smaller than a row is made larger first.  A processor's name has the rules of its videos.
"""

from __future__ import annotations

from collections.abc import Callable

from epd.media_files.film_rules import AtRate, ByLength
from epd.media_files.video import VideoSettings, read_settings
from epd.model_files import tensors
from epd.model_files.checkpoint import Settings
from epd.model_files.family import Family, Geometry, Images
from epd.model_files.geometry import smart_resize

_VISUAL = "model.visual."
_VIDEO: Settings = {
    "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000},
    "patch_size": 14,
    "fps": 2.0,
}
Range = tuple[str, Callable[[Settings], bool]]


def _plain(config: Settings) -> Settings:
    """What part of a head turns, where rope has its other settings."""
    text = config.get("text_config")
    if not isinstance(text, dict) or text.get("partial_rotary_factor") is None:
        return config
    name = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    turned = {"partial_rotary_factor": text["partial_rotary_factor"]}
    rope = text.get(name) or {}
    joined = turned | rope if isinstance(rope, dict) else rope
    return {**config, "text_config": text | {name: joined}}


def _units(settings: Settings) -> dict[str, int]:
    """Sides of a patch, of patches that are merged, and frames of a patch."""
    names = {"patch": ("patch_size", 14), "merge": ("merge_size", 2)}
    names |= {"frames": ("temporal_patch_size", 2)}
    return {word: int(settings.get(name) or usual) for word, (name, usual) in names.items()}


def _geometry(model_config: Settings, settings: Settings, width: int, height: int) -> Geometry:
    size = settings.get("size") or {}
    patch, merge, frames = _units(settings).values()
    least = size.get("shortest_edge") or 112 * 112
    most = size.get("longest_edge") or 28 * 28 * 15000
    factor = patch * merge
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    sides = smart_resize(height, width, factor, least / frames, most / frames)
    grid_h, grid_w = (side // patch for side in sides)
    return Geometry((1, grid_h, grid_w), grid_h * grid_w // merge**2, grid_h * grid_w)


def _processor(settings: Settings) -> dict[str, int] | str:
    size = settings.get("size") or {}
    if bool(size.get("shortest_edge")) != bool(size.get("longest_edge")):
        return "size: one of shortest_edge and longest_edge, where both are needed"
    return _units(settings)


def _video(config: Settings, given: Settings) -> VideoSettings | None:
    if config.get("video_token_id") is None:
        return None
    named = (given.get(f"{what}_processor_type") for what in ("video", "image"))
    kind = next(filter(None, named), config.get("model_type"))
    rules = ByLength if "46v" in str(kind).lower() else AtRate
    return read_settings(rules, _VIDEO, {**given, "cap_pixels_per_frame": False})


def _biased(section: str, usual: object) -> Callable[[Settings], bool]:
    return lambda config: bool((config.get(section) or {}).get("attention_bias", usual))


def _tower(ffn: str, context: str, *unbiased: str) -> dict[str, str]:
    """`ffn`: of a block; `context`: of the merger; `unbiased`: what has no bias in any tower."""
    block = {"attn.qkv": "3*tower tower", "attn.proj": "tower tower"}
    block |= {f"mlp.{name}_proj": f"{ffn} tower" for name in ("gate", "up")}
    block |= {"mlp.down_proj": f"tower {ffn}"}
    biases = {name: shape.split()[0] for name, shape in block.items() if name not in unbiased}
    return {
        **{f"{_VISUAL}blocks.{{blocks}}.{n}.weight": shape for n, shape in block.items()},
        **{f"{_VISUAL}blocks.{{tower_biased}}.{n}.bias": size for n, size in biases.items()},
        **{f"{_VISUAL}blocks.{{blocks}}.norm{n}.weight": "tower" for n in (1, 2)},
        **tensors.with_biases(_VISUAL, {"patch_embed.proj": "tower 3 frames patch patch"}),
        **tensors.with_biases(_VISUAL, {"downsample": "out tower merge merge"}),
        **tensors.with_biases(_VISUAL, {"merger.post_projection_norm": "out"}),
        f"{_VISUAL}post_layernorm.weight": "tower",
        f"{_VISUAL}merger.proj.weight": "out out",
        **{f"{_VISUAL}merger.{n}_proj.weight": f"{context} out" for n in ("gate", "up")},
        f"{_VISUAL}merger.down_proj.weight": f"out {context}",
    }


_FOUR_NORMS = tensors.LAYER | {
    f"post_{name}_layernorm.weight": "hidden" for name in ("self_attn", "mlp")
}
_DENSE = {"mlp.gate_up_proj.weight": "2*ffn hidden", "mlp.down_proj.weight": "hidden ffn"}
_EXPERTS = tensors.EXPERTS | {"mlp.gate.e_score_correction_bias": "experts"}
_EXPERTS |= tensors.SHARED_EXPERTS
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_TOWER = _tower("out", "tower_ffn", "attn.proj", *_MLP) | {
    f"{_VISUAL}post_conv_layernorm.weight": "tower",
    f"{_VISUAL}embeddings.position_embedding.weight": "tiles tower",
}
_OCR_TOWER = _tower("tower_ffn", "3*out") | {
    f"{_VISUAL}blocks.{{blocks}}.attn.{n}_norm.weight": "tower_head" for n in "qk"
}
_BIASED, _PLAIN = (("blocks", _biased("vision_config", usual)) for usual in (True, False))


def _family(held: dict[str, str], text: str, **ranges: Range) -> Family:
    return Family(
        held,
        ("model.visual",),
        Images(_geometry, _processor, video=_video),
        drafts_behind=True,  # in GLM-OCR's files, and not read
        sizes={"frames": 2, "merge": 2, "image": 336, "patch": 14},
        text_types=(text,),
        plain=_plain,
        ranges={"tower_biased": _PLAIN} | ranges,
    )


_GLM4V = tensors.stack(layers=_FOUR_NORMS | _DENSE | tensors.QKV_BIASES) | _TOWER
_OCR = tensors.stack(layers=_FOUR_NORMS | _DENSE) | _OCR_TOWER
_LAYERS = {"among": tensors.QKV_BIASES, "dense": tensors.MLP, "sparse": _EXPERTS}
_MOE = tensors.stack(layers=tensors.LAYER, **_LAYERS) | _TOWER
FAMILIES = {
    "glm4v": _family(_GLM4V, "glm4v_text"),
    "glm46v": _family(_GLM4V, "glm4v_text"),
    "glm_ocr": _family(_OCR, "glm_ocr_text", tower_biased=_BIASED),
    "glm4v_moe": _family(_MOE, "glm4v_moe_text", among=("layers", _biased("text_config", True))),
}
