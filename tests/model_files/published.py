"""Checkpoints as they are published: config.json, names and shapes of tensors, files beside them.

No hub can be asked where the tests run, so this is the record.  Where each part comes from:

*Recorded.*  Names of Qwen2-VL: the index of AIN, a 7B in 7 files (`mohamadfayez/ain-model` on
GitHub, 730 names).  Names of Qwen3-VL: the index of Cosmos-Reason2, an 8B in 4 files
(`sarcascoder/nvidia-reason2`, 750 names).  config.json of Qwen2-VL: olmOCR's, a 7B
(`BrianYAU-NTEC/olmOCR`).  Expert shapes of Qwen3-VL-MoE: transformers' pull request 43201, and
43956 which went through all of that collection.  That small models have no head: issue 1016 of
QwenLM/Qwen3-VL.  `num_parameters` with a source: public scripts that check an index's `total_size`
or count the numbers of all tensors.

*Derived.*  Names of Qwen2.5-VL, LLaVA-OneVision, Qwen3 and Llama: those that transformers' classes
had when the checkpoint was saved (that of LLaVA-OneVision from its conversion script), which its
mappings for old checkpoints turn into today's.  Sizes and processors' settings: transformers'
defaults and the model cards.  Sizes are not taken on trust: with names and shapes they must give
`num_parameters` exactly.  Without a source that number is what the record gives itself.

A pattern has ranges in braces (`{layers}`) and a shape in words; config.json gives the numbers.
Sizes, and how a pattern becomes names, are in `published_checkpoints.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]
ATTENTION = {
    "self_attn.q_proj.weight": "q hidden",
    "self_attn.k_proj.weight": "kv hidden",
    "self_attn.v_proj.weight": "kv hidden",
    "self_attn.o_proj.weight": "hidden q",
}
NORMS = {"input_layernorm.weight": "hidden", "post_attention_layernorm.weight": "hidden"}
MLP = {
    "mlp.gate_proj.weight": "ffn hidden",
    "mlp.up_proj.weight": "ffn hidden",
    "mlp.down_proj.weight": "hidden ffn",
}
_EXPERTS = {
    "mlp.gate.weight": "experts hidden",
    "mlp.experts.gate_up_proj": "experts hidden 2*moe",  # multiplied the other way round today
    "mlp.experts.down_proj": "experts moe hidden",
}
BIASES = {
    f"self_attn.{name}_proj.bias": size for name, size in {"q": "q", "k": "kv", "v": "kv"}.items()
}
HEAD_NORMS = {"self_attn.q_norm.weight": "head", "self_attn.k_norm.weight": "head"}


def stack(prefix: str, *layer: Mapping[str, str]) -> dict[str, str]:
    """A decoder without its head."""
    parts = dict(itertools.chain.from_iterable(part.items() for part in layer))
    return {
        f"{prefix}embed_tokens.weight": "vocab hidden",
        f"{prefix}norm.weight": "hidden",
        **{f"{prefix}layers.{{layers}}.{name}": shape for name, shape in parts.items()},
    }


def text_of(hidden: int, ffn: int, layers: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    """Sizes of a language model in config.json."""
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        **more,
    }


def with_biases(prefix: str, weights: Mapping[str, str]) -> dict[str, str]:
    """Each of `weights` and a bias of its first size."""
    found = {}
    for name, shape in weights.items():
        found[f"{prefix}{name}.weight"] = shape
        found[f"{prefix}{name}.bias"] = shape.split()[0]
    return found


_QWEN2_TOWER = {
    **with_biases(
        "visual.blocks.{blocks}.",
        {"attn.qkv": "3*tower tower", "attn.proj": "tower tower", "mlp.fc1": "4*tower tower"}
        | {"mlp.fc2": "tower 4*tower", "norm1": "tower", "norm2": "tower"},
    ),
    **with_biases(
        "visual.merger.", {"ln_q": "tower", "mlp.0": "4*tower 4*tower", "mlp.2": "hidden 4*tower"}
    ),
    "visual.patch_embed.proj.weight": "tower 3 2 patch patch",
}
_QWEN2_5_TOWER = {
    **with_biases(
        "visual.blocks.{blocks}.",
        {"attn.qkv": "3*tower tower", "attn.proj": "tower tower"}
        | {"mlp.gate_proj": "tower_ffn tower", "mlp.up_proj": "tower_ffn tower"}
        | {"mlp.down_proj": "tower tower_ffn"},
    ),
    "visual.blocks.{blocks}.norm1.weight": "tower",
    "visual.blocks.{blocks}.norm2.weight": "tower",
    **with_biases("visual.merger.", {"mlp.0": "4*tower 4*tower", "mlp.2": "hidden 4*tower"}),
    "visual.merger.ln_q.weight": "tower",
    "visual.patch_embed.proj.weight": "tower 3 2 patch patch",
}
QWEN3_TOWER = {
    **with_biases(
        "model.visual.blocks.{blocks}.",
        {"attn.qkv": "3*tower tower", "attn.proj": "tower tower", "norm1": "tower"}
        | {"mlp.linear_fc1": "tower_ffn tower", "mlp.linear_fc2": "tower tower_ffn"}
        | {"norm2": "tower"},
    ),
    **with_biases(
        "model.visual.merger.",
        {"norm": "tower", "linear_fc1": "4*tower 4*tower", "linear_fc2": "hidden 4*tower"},
    ),
    **with_biases(
        "model.visual.deepstack_merger_list.{levels}.",
        {"norm": "4*tower", "linear_fc1": "4*tower 4*tower", "linear_fc2": "hidden 4*tower"},
    ),
    **with_biases("model.visual.patch_embed.", {"proj": "tower 3 2 patch patch"}),
    "model.visual.pos_embed.weight": "places tower",
}


def siglip(prefix: str) -> dict[str, str]:
    """A tower."""
    return {
        **with_biases(
            f"{prefix}encoder.layers.{{blocks}}.",
            {f"self_attn.{name}_proj": "tower tower" for name in ("q", "k", "v", "out")}
            | {"mlp.fc1": "tower_ffn tower", "mlp.fc2": "tower tower_ffn"}
            | {"layer_norm1": "tower", "layer_norm2": "tower"},
        ),
        **with_biases(
            prefix, {"embeddings.patch_embedding": "tower 3 patch patch", "post_layernorm": "tower"}
        ),
        f"{prefix}embeddings.position_embedding.weight": "places tower",
    }


_SIGLIP = {
    **siglip("vision_tower.vision_model."),
    **with_biases(
        "multi_modal_projector.", {"linear_1": "hidden tower", "linear_2": "hidden hidden"}
    ),
    "image_newline": "hidden",
}

_TOKENS = {
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
}
_MROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}
_QWEN2_TEXT = {
    "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 32768,
    "max_window_layers": 28, "attention_dropout": 0.0, "initializer_range": 0.02,
    "use_cache": True, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
_QWEN3_TEXT = {
    "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-06,
    "max_position_embeddings": 262144, "vocab_size": 151936, "rope_theta": 5000000,
    "rope_scaling": {
        "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default",
    },
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
_QWEN3_VISION = {
    "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "num_heads": 16, "patch_size": 16,
    "num_position_embeddings": 2304, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
_PATCHES = {"temporal_patch_size": 2, "merge_size": 2}


@dataclass(frozen=True)
class Layout:
    """What checkpoints of a family have in common.

    `config`: config.json but for sizes.  `files`: JSON files beside it, by name; `others`: files
    that are copied for a person's sake or that another loader reads.
    """

    tensors: Mapping[str, str]
    config: Mapping[str, Any]
    head: str = "lm_head.weight"
    skipped: str = ""  # pattern of tensors that are not read on purpose
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    others: tuple[str, ...] = _TOKENIZER
    template: str = "chat_template.json"
    # Of config.json, where shapes differ by layer: instead of `tensors`.
    shapes: Callable[[Mapping[str, Any]], dict[str, tuple[int, ...]]] | None = None


LAYOUTS = {
    "qwen2_vl": Layout(
        {**stack("model.", ATTENTION, NORMS, MLP, BIASES), **_QWEN2_TOWER},
        {
            "model_type": "qwen2_vl",
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "vision_config": {
                "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3,
                "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
                "temporal_patch_size": 2,
            },
            "rope_scaling": _MROPE, "vision_token_id": 151654, **_TOKENS, **_QWEN2_TEXT,
        },
        files={
            "preprocessor_config.json": {
                "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, **_PATCHES, **CLIP,
                "image_processor_type": "Qwen2VLImageProcessor",
                "processor_class": "Qwen2VLProcessor",
            }
        },
    ),
    "qwen2_5_vl": Layout(
        {**stack("model.", ATTENTION, NORMS, MLP, BIASES), **_QWEN2_5_TOWER},
        {
            "model_type": "qwen2_5_vl",
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "vision_config": {
                "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "num_heads": 16,
                "in_chans": 3, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
                "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
                "tokens_per_second": 2, "temporal_patch_size": 2,
            },
            "rope_scaling": _MROPE, "vision_token_id": 151654, **_TOKENS, **_QWEN2_TEXT,
        },
        files={
            "preprocessor_config.json": {
                "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, **_PATCHES, **CLIP,
                "image_processor_type": "Qwen2_5_VLImageProcessor",
                "processor_class": "Qwen2_5_VLProcessor",
            }
        },
    ),
    "qwen3_vl": Layout(
        {
            **stack("model.language_model.", ATTENTION, NORMS, MLP, HEAD_NORMS),
            **QWEN3_TOWER,
        },
        {
            "model_type": "qwen3_vl",
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "text_config": {"model_type": "qwen3_vl_text", **_QWEN3_TEXT},
            "vision_config": {"model_type": "qwen3_vl", **_QWEN3_VISION},
            **_TOKENS,
        },
        files={
            "preprocessor_config.json": {
                "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16,
                **_PATCHES, **HALVES, "processor_class": "Qwen3VLProcessor",
                "image_processor_type": "Qwen2VLImageProcessorFast",
            },
            "video_preprocessor_config.json": {
                "size": {"longest_edge": 25165824, "shortest_edge": 4096}, "patch_size": 16,
                **_PATCHES, **HALVES, "processor_class": "Qwen3VLProcessor",
                "video_processor_type": "Qwen3VLVideoProcessor",
            },
        },
    ),
    "llava_onevision": Layout(
        {
            **stack("language_model.model.", ATTENTION, NORMS, MLP, BIASES),
            **_SIGLIP,
        },
        {
            "model_type": "llava_onevision",
            "architectures": ["LlavaOnevisionForConditionalGeneration"],
            "text_config": {"model_type": "qwen2", **_QWEN2_TEXT},
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 384,
                "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 26,
                "patch_size": 14, "vision_use_head": False,
            },
            "image_token_index": 151646, "video_token_index": 151647,
            "projector_hidden_act": "gelu", "use_image_newline_parameter": True,
            "vision_aspect_ratio": "anyres_max_9", "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "image_grid_pinpoints": [[384 * i, 384 * j] for i in range(1, 7) for j in range(1, 7)],
        },
        head="language_model.lm_head.weight",
        files={
            "preprocessor_config.json": {
                "do_convert_rgb": True, "do_normalize": True, "do_pad": True, "do_rescale": True,
                "do_resize": True, "resample": 3, "rescale_factor": 1 / 255, **HALVES,
                "size": {"height": 384, "width": 384},
                "image_grid_pinpoints": [
                    [384 * i, 384 * j] for i in range(1, 7) for j in range(1, 7)
                ],
                "image_processor_type": "LlavaOnevisionImageProcessor",
                "processor_class": "LlavaOnevisionProcessor",
            },
            "processor_config.json": {
                "image_token": "<image>", "video_token": "<video>", "num_image_tokens": 729,
                "processor_class": "LlavaOnevisionProcessor",
                "vision_feature_select_strategy": "full",
            },
        },
        others=(*_TOKENIZER, "added_tokens.json", "special_tokens_map.json"),
    ),
    "qwen3": Layout(
        stack("model.", ATTENTION, NORMS, MLP, HEAD_NORMS),
        {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            **_QWEN3_TEXT, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
            "max_position_embeddings": 40960, "max_window_layers": 28, "use_sliding_window": False,
        },
        template="tokenizer_config.json",
    ),
    "llama": Layout(
        stack("model.", ATTENTION, NORMS, MLP),
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu", "rms_norm_eps": 1e-05, "max_position_embeddings": 8192,
            "rope_theta": 500000.0, "rope_scaling": None, "attention_bias": False,
            "bos_token_id": 1, "eos_token_id": 2,
        },
        others=("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        template="tokenizer_config.json",
    ),
}  # fmt: skip
LAYOUTS["qwen3_vl_moe"] = Layout(
    {**stack("model.language_model.", ATTENTION, NORMS, _EXPERTS, HEAD_NORMS), **QWEN3_TOWER},
    {
        **LAYOUTS["qwen3_vl"].config,
        "model_type": "qwen3_vl_moe",
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "text_config": {
            **_QWEN3_TEXT, "model_type": "qwen3_vl_moe_text", "decoder_sparse_step": 1,
            "mlp_only_layers": [], "norm_topk_prob": True, "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        "vision_config": {"model_type": "qwen3_vl_moe", **_QWEN3_VISION},
    },
    files=LAYOUTS["qwen3_vl"].files,
)  # fmt: skip
