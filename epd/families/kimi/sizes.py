"""Kimi-K2.5: names and shapes; an image is made smaller, never larger (NaViT).

It fits a number of patches and a length of a side, and black is put below it and to its right up to
multiples of `patch_size * merge_size`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from epd.model_files import tensors
from epd.model_files.checkpoint import Settings
from epd.model_files.family import Family, Geometry, Images

LATENT = {
    "self_attn.kv_a_proj_with_mqa.weight": "latent hidden",
    "self_attn.kv_a_layernorm.weight": "rank",
    "self_attn.kv_b_proj.weight": "heads*key_value rank",
    "self_attn.o_proj.weight": "hidden heads*value",
}
LATENT_BIASES = {"self_attn.kv_a_proj_with_mqa.bias": "latent", "self_attn.o_proj.bias": "hidden"}
SPLIT_QUERY = {
    "self_attn.q_a_proj.weight": "query_rank hidden",
    "self_attn.q_a_layernorm.weight": "query_rank",
    "self_attn.q_b_proj.weight": "heads*query query_rank",
}
_ROUTED = tensors.EXPERTS | {"mlp.gate.e_score_correction_bias": "experts"}
_ROUTED |= tensors.SHARED_EXPERTS
_MOONVIT = {
    **tensors.with_biases(
        "model.vision_tower.layers.{blocks}.",
        {f"attn.{name}": "tower tower" for name in ("q_proj", "k_proj", "v_proj", "proj")}
        | {"mlp.fc1": "tower_ffn tower", "mlp.fc2": "tower tower_ffn"}
        | {"norm1": "tower", "norm2": "tower"},
    ),
    **tensors.with_biases("model.vision_tower.", {"final_layernorm": "tower"}),
    **tensors.with_biases("model.vision_tower.", {"patch_embed.proj": "tower 3 patch patch"}),
    "model.vision_tower.patch_embed.pos_emb.position_embeddings": "rows columns tower",
    **tensors.with_biases(
        "model.mm_projector.", {"pre_norm": "projected", "in_proj": "merged merged"}
    ),
    **tensors.with_biases("model.mm_projector.", {"out_proj": "hidden merged"}),
}
_BLOCK = r"^(vision_tower\.encoder\.blocks\.\d+)\."


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


def _geometry(model_config: Settings, settings: Settings, width: int, height: int) -> Geometry:
    navit = navit_settings(settings)
    sides = navit_resize(navit, width, height)
    block = navit.patch_size * navit.merge_size
    grid_h, grid_w = (-(-side // block) * navit.merge_size for side in sides)
    num_patches = grid_h * grid_w
    return Geometry((1, grid_h, grid_w), num_patches // navit.merge_size**2, num_patches)


def _processor(settings: Settings) -> dict[str, int] | str:
    navit = navit_settings(settings)
    if rows := navit.fixed_output_tokens:
        return f"fixed_output_tokens: every image has {rows} rows, which this engine lacks"
    return {"patch": navit.patch_size, "merge": navit.merge_size}


_LAYERS = {
    "layers": LATENT | tensors.NORMS,
    "split": SPLIT_QUERY,
    "dense": tensors.MLP,
    "sparse": _ROUTED,
    "whole": {"self_attn.q_proj.weight": "heads*query hidden"},
    "biased": LATENT_BIASES,
}
FAMILIES = {
    "deepseek_v3": Family(tensors.stack("model.", **_LAYERS), drafts_behind=True),
    "kimi_k25": Family(
        tensors.stack(**_LAYERS) | _MOONVIT,
        ("model.vision_tower", "model.mm_projector"),
        Images(_geometry, _processor),
        (
            (_BLOCK + "norm1", r"\1.norm2"),
            (_BLOCK + "norm0", r"\1.norm1"),
            (_BLOCK + r"mlp\.fc1", r"\1.mlp.fc2"),
            (_BLOCK + r"mlp\.fc0", r"\1.mlp.fc1"),
            (_BLOCK + "wo", r"\1.attn.proj"),
            (r"^language_model\.(lm_head|model)", r"\1"),
            (r"^model\.(?!language_model|vision_tower|mm_projector)", "model.language_model."),
            (r"^(vision_tower|mm_projector)\.", r"model.\1."),
            (r"\.vision_tower\.encoder\.", ".vision_tower."),
            (r"\.blocks\.", ".layers."),
            (r"\.pos_emb\.weight$", ".pos_emb.position_embeddings"),
            (r"\.mm_projector\.proj\.0\.", ".mm_projector.in_proj."),
            (r"\.mm_projector\.proj\.2\.", ".mm_projector.out_proj."),
        ),
        ((".wqkv.", (".attn.q_proj.", ".attn.k_proj.", ".attn.v_proj.")),),
        sizes={"rows": 64, "columns": 64, "projected": 1152, "merge": 2},
        text_types=("deepseek_v3", "kimi_k2"),
        is_tied=True,
        drafts_behind=True,
    ),
}
