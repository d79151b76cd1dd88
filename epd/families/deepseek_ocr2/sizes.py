"""DeepSeek-OCR 2: names and shapes; an image is stretched over tiles, and shown whole on a square.

One that no side is longer than a tile is shown whole alone.  Rows of tiles come first, then those
of the whole, then one that ends the image.  A view has as many rows as the tower has queries for
its size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from epd.families.internvl.sizes import tile_grid
from epd.model_files import sam_tensors, tensors
from epd.model_files.checkpoint import Settings
from epd.model_files.family import Family, Geometry, Images

TILED = {"crop_to_patches": True, "min_patches": 2, "max_patches": 6}
_QUERIES = {48: 144, 64: 256}  # of transformers' class, by patches along a view's side
_SAM = {  # SAM-B's
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 1024,
    "patch_size": 16, "mlp_ratio": 4.0, "window_size": 14, "output_channels": 256,
    "global_attn_indexes": [2, 5, 8, 11], "downsample_channels": [512, 896], "qkv_bias": True,
    "use_abs_pos": True, "use_rel_pos": True,
}  # fmt: skip
_READER = {
    "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32,
}  # fmt: skip


def _parts(config: Settings) -> tuple[Settings, Settings]:
    """SAM, and the model that reads it, with what transformers has by default."""
    vision = config.get("vision_config") or {}
    given = [(vision.get(name) or {}).items() for name in ("sam_config", "encoder_config")]
    sam, reader = ({name: v for name, v in part if v is not None} for part in given)
    return _SAM | sam, _READER | reader


def sides(settings: Settings) -> tuple[int, int]:
    """Pixels along a tile, and along the view of the whole."""
    whole = (settings.get("size") or {}).get("height") or 1024
    return int(settings.get("tile_size") or 768), int(whole)


def _plain(config: Settings) -> Settings:
    """SAM's numbers as those of the tower, and a list of the layers without experts."""
    try:
        (sam, _), text = _parts(config), config["text_config"]
        kinds, far = text.get("mlp_layer_types") or (), sam["global_attn_indexes"]
        dense = [i for i, kind in enumerate(kinds) if kind == "dense"]
        ffn = int(sam.get("mlp_dim") or sam["mlp_ratio"] * sam["hidden_size"])
        own = {"intermediate_size": ffn, "mlp_ratio": None, "fullatt_block_indexes": far}
        more = {"mlp_only_layers": dense, "first_k_dense_replace": None, "head_dim": None}
        parts = {"text_config": text | more, "vision_config": config["vision_config"] | sam | own}
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return config  # whose types are looked at next
    return {**config, **parts}


def _fault(config: Settings) -> str:
    (sam, reader), text = _parts(config), config.get("text_config") or {}
    if len(text.get("mlp_layer_types") or ()) != text.get("num_hidden_layers"):
        return "text_config.mlp_layer_types: it has to name each layer, dense or sparse"
    if text.get("mlp_bias") or (text.get("topk_method") or "greedy") != "greedy":
        return "text_config: experts with an mlp_bias, or a topk_method by groups, are not taken"
    if other := [name for name, value in _SAM.items() if value is True and not sam[name]]:
        return f"vision_config.sam_config.{other[0]}: a tower like that is not supported"
    if sam["downsample_channels"][1] != reader["hidden_size"]:
        return "vision_config.sam_config.downsample_channels: they do not end at the reader's"
    return ""


def _geometry(model_config: Settings, settings: Settings, width: int, height: int) -> Geometry:
    patch, views = int(_parts(model_config)[0]["patch_size"]), sides(settings)
    tile, whole = (side // patch for side in views)
    if not {tile, whole} <= {*_QUERIES}:
        raise ValueError(f"the tower has queries for {[*_QUERIES]} patches along a side of a view")
    is_cut = max(width, height) > views[0]
    columns, lines = tile_grid(TILED, views[0], width, height) if is_cut else (0, 0)
    tiles = lines * columns
    num_rows = tiles * _QUERIES[tile] + _QUERIES[whole] + 1
    grid = (1, lines * tile, columns * tile) if tiles else (1, whole, whole)
    return Geometry(grid, num_rows, tiles * tile**2 + whole**2)


def _words(config: Settings) -> Mapping[str, int | Sequence[int]]:
    sam, reader = _parts(config)
    layers, far = range(sam["num_hidden_layers"]), sam["global_attn_indexes"]
    side = sam["image_size"] // sam["patch_size"]
    head = reader["hidden_size"] // reader["num_attention_heads"]
    return {
        "near": [i for i in layers if i not in far], "far": [i for i in layers if i in far],
        "window_span": 2 * sam["window_size"] - 1, "side": side, "span": 2 * side - 1,
        "neck": sam["output_channels"], "shrunk": sam["downsample_channels"][0],
        "readers": range(reader["num_hidden_layers"]), "reader": reader["hidden_size"],
        "reader_ffn": reader["intermediate_size"],
        "reader_kv": head * reader["num_key_value_heads"],
    }  # fmt: skip


_OF_READER = {"hidden": "reader", "q": "reader", "kv": "reader_kv", "ffn": "reader_ffn"}
_TOWER = sam_tensors.tower("sam_encoder.") | {
    "sam_encoder.proj.conv1.weight": "shrunk neck 3 3",
    "sam_encoder.proj.conv2.weight": "reader shrunk 3 3",
    **{f"vision_encoder.layers.{{readers}}.{n}": " ".join(_OF_READER[w] for w in shape.split())
       for n, shape in (tensors.LAYER | tensors.QKV_BIASES | tensors.MLP).items()},
    "vision_encoder.norm.weight": "reader",
    **{f"query_{16 * n}_resolution.weight": f"{count} reader" for n, count in _QUERIES.items()},
}  # fmt: skip
_LAYERS = {"layers": tensors.LAYER, "biased": tensors.BIASED, "dense": tensors.MLP}
_RENAMES = (  # published names are those of the class that came with the checkpoint
    *((rf"sam_model\.{old}\.", f"sam_model.{new}.") for old, new in sam_tensors.NAMES.items()),
    (r"sam_model\.net_2\.", "sam_model.proj.conv1."),
    (r"sam_model\.net_3\.", "sam_model.proj.conv2."),
    (r"sam_model\.", "vision_tower.sam_encoder."),
    (r"qwen2_model\.model\.model\.", "vision_tower.vision_encoder."),
    (r"qwen2_model\.(query_\d+)\.", r"vision_tower.\1_resolution."),
    (r"projector\.layers\.", "multi_modal_projector."),
    (r"view_seperator$", "view_separator"),
    (r"(embed_tokens|layers|norm)\.", r"language_model.\1."),
)
FAMILIES = {
    "deepseek_ocr2": Family(
        tensors.stack(**_LAYERS, sparse=tensors.EXPERTS | tensors.SHARED_EXPERTS)
        | {f"model.vision_tower.{name}": shape for name, shape in _TOWER.items()}
        | tensors.with_biases("model.", {"multi_modal_projector": "hidden reader"})
        | {"model.view_separator": "hidden"},
        ("model.vision_tower", "model.multi_modal_projector", "model.view_separator"),
        Images(_geometry, lambda settings: {}),
        tuple((rf"^model\.{old}", f"model.{new}") for old, new in _RENAMES),
        text_types=("deepseek_ocr2_text",),
        plain=_plain,
        fault=_fault,
        words=_words,
    ),
}
