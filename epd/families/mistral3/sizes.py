"""Mistral 3: names and shapes; an image keeps its ratio, and only a longer one is made smaller.

Both sides become multiples of a patch's side times the merge.  In a prompt the rows of each line
stand apart: a mark follows each, another one the last.
"""

from __future__ import annotations

from epd.errors import MediaError
from epd.families.kimi.sizes import LATENT, LATENT_BIASES, SPLIT_QUERY
from epd.model_files import tensors
from epd.model_files.checkpoint import Settings
from epd.model_files.family import Family, Geometry, Images

_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"
_WINDOW = 4096  # of a Mistral that says nothing of it
_TOWER, _PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
_BLOCK = {
    "attention_norm": "tower", "ffn_norm": "tower",
    **{f"attention.{name}_proj": "tower tower" for name in "qkvo"},
    "feed_forward.gate_proj": "tower_ffn tower", "feed_forward.up_proj": "tower_ffn tower",
    "feed_forward.down_proj": "tower tower_ffn",
}  # fmt: skip


def _plain(config: Settings) -> Settings:
    """The merge among the settings of the tower; a window as a kind of layers."""
    found, vision, text = dict(config), config.get("vision_config"), config.get("text_config")
    if isinstance(vision, dict):
        found["vision_config"] = vision | {
            "spatial_merge_size": config.get("spatial_merge_size", 2)
        }
    if isinstance(text, dict):
        usual = _WINDOW if (text.get("model_type") or "mistral") == "mistral" else None
        if text.get("sliding_window", usual) is not None:
            found["text_config"] = text | {"layer_types": ["sliding_attention"]}
    return found


def _fault(config: Settings) -> str:
    whole = _is_latent(config) and not config["text_config"].get("q_lora_rank")
    return "text_config.q_lora_rank: whole queries are not supported" if whole else ""


def _is_latent(config: Settings) -> bool:
    return (config.get("text_config") or {}).get("model_type") == "mistral4"


def side(model_config: Settings) -> int:
    """Pixels of an embedding row's square."""
    patch = int(model_config["vision_config"]["patch_size"])
    return patch * int(model_config.get("spatial_merge_size") or 2)


def _geometry(model_config: Settings, settings: Settings, width: int, height: int) -> Geometry:
    longest = int((settings.get("size") or {}).get("longest_edge") or 1024)
    ratio = max(1.0, height / longest, width / longest)
    row = side(model_config)
    columns, lines = ((int(pixels / ratio) - 1) // row + 1 for pixels in (width, height))
    if not columns * lines:
        raise MediaError(
            f"the image is {width} x {height} pixels; made {longest} long, nothing of its other "
            "side is left: crop it"
        )
    merge = row // int(model_config["vision_config"]["patch_size"])
    grid_thw = (1, lines * merge, columns * merge)
    return Geometry(grid_thw, lines * columns, lines * columns * merge**2, (lines - 1, 1))


def _lines_text(tiles: tuple[int, int], placeholder: str) -> str:
    return _BREAK.join([placeholder] * (tiles[0] + 1)) + _END


def _processor(settings: Settings) -> dict[str, int] | str:
    if (edges := settings.get("size")) and not edges.get("longest_edge"):
        return "size: images are resized to a longest_edge, which it lacks"
    return {"patch": settings.get("patch_size") or 16}


FAMILIES = {
    "mistral3": Family(
        tensors.stack(
            plain=tensors.LAYER | tensors.MLP,
            latent=LATENT | SPLIT_QUERY | tensors.NORMS,
            latent_biased=LATENT_BIASES | {"self_attn.q_a_proj.bias": "query_rank"},
            latent_dense=tensors.MLP,
            latent_sparse=tensors.EXPERTS | tensors.SHARED_EXPERTS,
        )
        | {f"{_TOWER}.transformer.layers.{{blocks}}.{n}.weight": w for n, w in _BLOCK.items()}
        | {
            f"{_TOWER}.patch_conv.weight": "tower 3 patch patch",
            f"{_TOWER}.ln_pre.weight": "tower",
            f"{_PROJECTOR}.norm.weight": "tower",
            f"{_PROJECTOR}.patch_merger.merging_layer.weight": "tower merged",
            f"{_PROJECTOR}.linear_1.weight": "hidden tower",
            f"{_PROJECTOR}.linear_2.weight": "hidden hidden",
        },
        (_TOWER, _PROJECTOR),
        Images(_geometry, _processor, tile_text=_lines_text),
        tensors.LLAVA_NAMES,
        text_types=("mistral", "ministral3", "mistral4"),
        is_tied=True,
        plain=_plain,
        fault=_fault,
        ranges={
            "plain": ("layers", lambda config: not _is_latent(config)),
            "latent": ("layers", _is_latent),
            "latent_biased": ("biased", _is_latent),
            "latent_dense": ("dense", _is_latent),
            "latent_sparse": ("sparse", _is_latent),
        },
    ),
}  # fmt: skip
