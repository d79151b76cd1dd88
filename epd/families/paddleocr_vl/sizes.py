"""PaddleOCR-VL: names and shapes; both sides of an image are rounded.

As in the Qwen families, but an image whose side is less than that of a row's square is made larger
first.  Published checkpoints have the settings of the language model beside those of the tower, and
SigLIP's pooling head, which nothing reads.
"""

from __future__ import annotations

from epd.model_files import tensors
from epd.model_files.checkpoint import Settings
from epd.model_files.family import Family, Geometry, Images
from epd.model_files.geometry import edges_fault, smart_resize

_VISUAL, _PROJECTOR = "model.visual", "model.projector"


def _plain(config: Settings) -> Settings:
    """The language model in a section of its own, and one word for all of its biases."""
    flat = {name: v for name, v in config.items() if name not in ("model_type", "vision_config")}
    text = config.get("text_config") or flat
    if not isinstance(text, dict):
        return config
    has_bias = text.get("use_bias")
    return {**config, "text_config": {**text, "attention_bias": has_bias, "mlp_bias": has_bias}}


def _geometry(model_config: Settings, settings: Settings, width: int, height: int) -> Geometry:
    size = settings.get("size") or {}
    patch, merge = (int(side) for side in _units(settings).values())
    least = settings.get("min_pixels") or size.get("shortest_edge") or 384 * 384
    most = settings.get("max_pixels") or size.get("longest_edge") or 1536 * 1536
    factor = patch * merge
    if height < factor:
        width, height = round(width * factor / height), factor
    if width < factor:
        width, height = factor, round(height * factor / width)
    grid_h, grid_w = (side // patch for side in smart_resize(height, width, factor, least, most))
    return Geometry((1, grid_h, grid_w), grid_h * grid_w // merge**2, grid_h * grid_w)


def _units(settings: Settings) -> dict[str, int]:
    """Sides of a patch, and of patches that are merged."""
    return {
        "patch": settings.get("patch_size") or 14,
        "merge": settings.get("merge_size") or 2,
    }


def _processor(settings: Settings) -> dict[str, int] | str:
    if wrong := edges_fault(settings):
        return wrong
    if (settings.get("temporal_patch_size") or 1) != 1:
        return "temporal_patch_size: a patch of this model has one frame"
    return _units(settings)


FAMILIES = {
    "paddleocr_vl": Family(
        tensors.stack(**tensors.LLAMA_LAYERS)
        | tensors.siglip(f"{_VISUAL}.vision_model.")
        | tensors.with_biases(
            f"{_PROJECTOR}.",
            {"pre_norm": "tower", "linear_1": "merged merged", "linear_2": "hidden merged"},
        ),
        (_VISUAL, _PROJECTOR),
        Images(_geometry, _processor, takes_bounds=True),
        (
            (r"^mlp_AR\.", f"{_PROJECTOR}."),
            (r"^visual\.", f"{_VISUAL}."),
            (r"^model\.(?!(visual|projector|language_model)\.)", "model.language_model."),
        ),
        skipped=(
            *(r"\.packing_position_embedding\.weight$", r"\bvisual\.vision_model\.head\."),
            *Family({}).skipped,
        ),
        sizes={"merge": 2, "image": 384, "patch": 14, "head": 128},
        text_types=("paddleocr_vl_text",),
        is_tied=True,
        plain=_plain,
    ),
}
