"""Gemma 4: names and shapes; an image fills a budget of rows, as near as its ratio allows.

A frame of a video fills a smaller one, behind its time; a video is so many frames at equal steps.

Layers are of two kinds: most see a window, some everything, and these have heads of another width.
The last layers of the E models have no keys and values of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ClassVar

from epd.errors import MediaError
from epd.media_files.video import Sampling, VideoSettings, read_settings
from epd.model_files import tensors
from epd.model_files.checkpoint import Settings
from epd.model_files.family import Family, Geometry, Images

BUDGETS = (70, 140, 280, 560, 1120)  # rows of an image or a frame, that its processor takes
BUDGET = 280  # where it names none
_WINDOW, FULL = "sliding_attention", "full_attention"
_TEXT, _TOWER = "model.language_model", "model.vision_tower"


def layer_types(text: Settings) -> list[str]:
    """Of each layer; the last one sees everything, whatever config.json has."""
    count = int(text.get("num_hidden_layers") or 0)
    found = list(text.get("layer_types") or [FULL if i % 6 == 5 else _WINDOW for i in range(count)])
    return [*found[:-1], FULL]


def _plain(config: Settings) -> Settings:
    """Both kinds of layers by names of their own: transformers writes what differs by layer."""
    text, vision = config.get("text_config"), config.get("vision_config")
    found = dict(config)
    if isinstance(vision, dict):
        found["vision_config"] = vision | {
            "hidden_act": vision.get("hidden_activation"), "rope_parameters": None,
            "spatial_merge_size": vision.get("pooling_kernel_size"),
        }  # fmt: skip
    if not isinstance(text, dict):
        return found
    each, ropes = text.get("per_layer_config"), text.get("rope_parameters")
    full: object = next(iter(each.values()), {}) if isinstance(each, dict) else None
    if not isinstance(full, dict):
        heads = text.get("attention_k_eq_v") and text.get("num_global_key_value_heads")
        full = {"head_dim": text.get("global_head_dim"), "num_key_value_heads": heads}
    own = {
        "global_head_dim": full.get("head_dim"),
        "num_global_key_value_heads": (
            full.get("num_key_value_heads") or text.get("num_key_value_heads")
        ),
        "hidden_act": text.get("hidden_activation"),
        "num_experts_per_tok": text.get("top_k_experts"),
        "rope_parameters": ropes.get(_WINDOW) if isinstance(ropes, dict) else ropes,
    }
    if isinstance(text.get("layer_types"), list | None):
        own["layer_types"] = layer_types(text)
    return found | {"text_config": text | own}


def _fault(config: Settings) -> str:
    text, vision = _plain(config)["text_config"], config.get("vision_config") or {}
    each, ropes = text.get("per_layer_config") or {}, config["text_config"].get("rope_parameters")
    full = [i for i, kind in enumerate(text["layer_types"]) if kind == FULL]
    if each and (
        sorted(each, key=int) != [str(i) for i in full]
        or any(one != next(iter(each.values())) for one in each.values())
    ):
        return "text_config.per_layer_config: it has not the layers that see everything, alike"
    if ropes and (ropes.get(FULL) or {}).get("rope_type") != "proportional":
        return "text_config.rope_parameters: that of full_attention is not proportional"
    if text.get("attention_bias"):
        return "text_config.attention_bias: biases are not taken"
    if text.get("use_bidirectional_attention") not in (None, "vision"):
        return "text_config.use_bidirectional_attention: only pictures are seen both ways"
    own = text["layer_types"][: len(text["layer_types"]) - (text.get("num_kv_shared_layers") or 0)]
    if set(own) != set(text["layer_types"]):
        return "text_config.num_kv_shared_layers: no layer before them has what they read"
    heads = vision.get("num_attention_heads"), vision.get("num_key_value_heads")
    width = vision.get("head_dim", 64) * (heads[0] or 12)
    if heads[0] != heads[1] or width != vision.get("hidden_size", 768):
        return "vision_config: its heads do not share out hidden_size"
    return ""


def _filled(budget: int, patch: int, merge: int, width: int, height: int) -> tuple[int, int]:
    """Lines and columns of rows, at most so many.  Raises MediaError."""
    side = patch * merge
    factor = math.sqrt(budget * merge**2 * patch**2 / (height * width))
    lines, columns = math.floor(factor * height / side), math.floor(factor * width / side)
    if not lines and columns:
        lines, columns = 1, min(width // height, budget)
    elif not columns and lines:
        lines, columns = min(height // width, budget), 1
    if not 0 < lines * columns <= budget:
        raise MediaError(f"{width} x {height} pixels do not fit {budget} rows: crop it")
    return lines, columns


def _geometry(model_config: Settings, settings: Settings, width: int, height: int) -> Geometry:
    patch, merge = (
        int(settings.get("patch_size") or 16),
        int(settings.get("pooling_kernel_size") or 3),
    )
    budget = int(settings.get("max_soft_tokens") or BUDGET)
    lines, columns = _filled(budget, patch, merge, width, height)
    num_rows = lines * columns
    return Geometry((1, lines * merge, columns * merge), num_rows, num_rows * merge**2)


class Films(VideoSettings, frozen=True, kw_only=True):
    """Frames fill a budget each, and stand apart, behind their times."""

    takes: ClassVar[Collection[str]] = ("num_frames",)
    patch_size: int = 16
    temporal_patch_size: int = 1
    merge_size: int = 3
    min_pixels: int = 0
    max_pixels: int = 0
    max_soft_tokens: int = BUDGETS[0]
    num_frames: int | None = 32
    image_mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    image_std: tuple[float, ...] = (1.0, 1.0, 1.0)

    @property
    def sizes(self) -> dict[str, int]:
        return {"patch": self.patch_size, "merge": self.merge_size}

    def chosen(self, total: int, rate: float, wanted: Sampling, limit: int) -> Iterable[int]:
        """A video that is shorter, which the processor refuses, is taken whole."""
        number = min(wanted.num_frames or self.num_frames or total, total, limit)
        return (at * total // number for at in range(number))

    def bounded(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        patch, merge = self.patch_size, self.merge_size
        lines, columns = _filled(self.max_soft_tokens, patch, merge, width, height)
        return lines * patch * merge, columns * patch * merge

    def texts(self, frames: Sequence[int], rate: float) -> list[tuple[str, str]]:
        times = (divmod(int(index / rate), 60) for index in frames)
        said = (f"{minutes:02d}:{seconds:02d} <|image>" for minutes, seconds in times)
        return [(" " * (at > 0) + time, "<image|>") for at, time in enumerate(said)]


def films(config: Settings, given: Settings) -> Films | None:
    """Settings of videos; transformers prepares none by those of images, which stand in here."""
    if given.get("image_processor_type"):
        return None
    found = read_settings(Films, {}, {**given, "merge_size": given.get("pooling_kernel_size")})
    assert isinstance(found, Films)
    return found


def _processor(settings: Settings) -> dict[str, int] | str:
    if (settings.get("max_soft_tokens") or BUDGET) not in BUDGETS:
        return f"max_soft_tokens: an image has one of {', '.join(map(str, BUDGETS))} rows"
    if settings.get("fps") is not None or settings.get("do_sample_frames") is False:
        return "fps, do_sample_frames: of a video, num_frames are taken"
    return {
        "patch": settings.get("patch_size") or 16,
        "merge": settings.get("pooling_kernel_size") or 3,
    }


def _said(name: str, *, of: str = "text_config", wanted: bool = True) -> Callable[[Settings], bool]:
    """Whether a field of config.json is so."""
    return lambda config: bool((config.get(of) or {}).get(name)) == wanted


_NORMS = {
    f"{name}.weight": "hidden"
    for name in (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    )
}
_LAYERS = {
    "layers": _NORMS | {"layer_scalar": "1"},
    "sliding": {"self_attn.q_proj.weight": "q hidden", "self_attn.o_proj.weight": "hidden q",
                "self_attn.q_norm.weight": "head"},
    "full": {"self_attn.q_proj.weight": "full_q hidden", "self_attn.o_proj.weight": "hidden full_q",
             "self_attn.q_norm.weight": "full_head"},
    "own_sliding": {"self_attn.k_proj.weight": "kv hidden", "self_attn.v_proj.weight": "kv hidden",
                    "self_attn.k_norm.weight": "head"},
    "own_full": {"self_attn.k_proj.weight": "full_kv hidden",
                 "self_attn.k_norm.weight": "full_head"},
    "valued": {"self_attn.v_proj.weight": "full_kv hidden"},
    "own_layers": tensors.MLP,
    "narrow": tensors.MLP,
    "wide": {name: shape.replace("ffn", "2*ffn") for name, shape in tensors.MLP.items()},
    "embedded": {"per_layer_input_gate.weight": "per_layer hidden",
                 "per_layer_projection.weight": "hidden per_layer",
                 "post_per_layer_input_norm.weight": "hidden"},
    "mixed": {"router.proj.weight": "experts hidden", "router.scale": "hidden",
              "router.per_expert_scale": "experts",
              "experts.gate_up_proj": "experts 2*moe hidden",
              "experts.down_proj": "experts hidden moe",
              "post_feedforward_layernorm_1.weight": "hidden",
              "post_feedforward_layernorm_2.weight": "hidden",
              "pre_feedforward_layernorm_2.weight": "hidden"},
}  # fmt: skip
_PRODUCTS = {
    **{f"self_attn.{name}_proj": "tower tower" for name in "qkvo"},
    "mlp.gate_proj": "tower_ffn tower", "mlp.up_proj": "tower_ffn tower",
    "mlp.down_proj": "tower tower_ffn",
}  # fmt: skip
_BLOCKS = {
    "blocks": dict.fromkeys(_NORMS, "tower")
    | {f"{name}.linear.weight": shape for name, shape in _PRODUCTS.items()}
    | {f"self_attn.{name}_norm.weight": "tower_head" for name in "qk"},
    "clipped": {
        f"{name}.{way}_{end}": ""
        for name in _PRODUCTS for way in ("input", "output") for end in ("min", "max")
    },
}  # fmt: skip
FAMILIES = {
    "gemma4": Family(
        tensors.stack(**_LAYERS)
        | {
            f"{_TEXT}.{name}{{once_embedded}}.weight": shape
            for name, shape in {
                "embed_tokens_per_layer": "per_layer_vocab layers*per_layer",
                "per_layer_model_projection": "layers*per_layer hidden",
                "per_layer_projection_norm": "per_layer",
            }.items()
        }
        | {
            f"{_TOWER}.encoder.layers.{{{blocks}}}.{name}": shape
            for blocks, part in _BLOCKS.items() for name, shape in part.items()
        }
        | {
            f"{_TOWER}.patch_embedder.input_proj.weight": "tower 3*patch*patch",
            f"{_TOWER}.patch_embedder.position_embedding_table": "2 positions_along tower",
            f"{_TOWER}.std_bias{{once_standard}}": "tower",
            f"{_TOWER}.std_scale{{once_standard}}": "tower",
            "model.embed_vision.embedding_projection.weight": "hidden tower",
        },
        (_TOWER, "model.embed_vision"),
        Images(
            _geometry,
            _processor,
            tile_text=lambda tiles, place: f"<|image>{place}<image|>",
            video=films,
            video_place="<|video|>",
        ),
        # Of what hears, and of layers that read others' keys and values, which no code reads.
        skipped=(r"^model\.(audio_tower|embed_audio)\.", r"\.self_attn\.[kv]_(proj|norm)\.weight$"),
        layer_types=frozenset({_WINDOW, FULL}),
        sizes={"full_head": 512, "per_layer": 256, "per_layer_vocab": 262144, "merge": 3,
               "patch": 16, "positions_along": 10240},
        text_types=("gemma4_text",),
        is_tied=True,
        per_layer_embeddings=f"{_TEXT}.embed_tokens_per_layer",
        plain=_plain,
        fault=_fault,
        ranges={
            "valued": ("own_full", _said("attention_k_eq_v", wanted=False)),
            "narrow": ("reading_layers", _said("use_double_wide_mlp", wanted=False)),
            "wide": ("reading_layers", _said("use_double_wide_mlp")),
            "embedded": ("layers", _said("hidden_size_per_layer_input")),
            "mixed": ("layers", _said("enable_moe_block")),
            "clipped": ("blocks", _said("use_clipped_linears", of="vision_config")),
            "once_embedded": ("once", _said("hidden_size_per_layer_input")),
            "once_standard": ("once", _said("standardize", of="vision_config")),
        },
    ),
}  # fmt: skip
