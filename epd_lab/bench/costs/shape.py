"""A checkpoint directory without weights: the shape of a model of the field, to be measured.

Speed depends on shapes, not on values, so `--load-format dummy` (random weights, made on the
device) measures a model that need not be downloaded.  The shapes are those of Qwen3-VL-4B, -8B and
-32B-Instruct, and of its mixtures of experts, 30B-A3B and 235B-A22B (their published config.json).
Those of Qwen3.5-4B and -9B are from transformers' defaults, public scripts and counts of
parameters.  For Qwen3.6-27B, -35B-A3B and Kimi-K2.5, published_checkpoints.py of tests/model_files
has the sources; for PaddleOCR-VL, published_paddle.py beside it.  Layers of Qwen2.5-72B are those
of a Qwen3-VL; 16 dense layers have the sizes of Kimi-K2.5's.  Words come from the bundled model's
tokenizer, filled up to the vocabulary, so that every token has a text.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCABULARY = 151_936
_TEXT = {
    "model_type": "qwen3_vl_text", "vocab_size": VOCABULARY, "hidden_size": 2560,
    "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "attention_bias": False,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 5_000_000.0, "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}  # fmt: skip
_VISION = {
    "model_type": "qwen3_vl_vision", "depth": 24, "hidden_size": 1024,
    "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4096, "num_heads": 16, "in_channels": 3,
    "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 2560,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
}  # fmt: skip
_MIDDLE_TEXT = {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "tie_word_embeddings": False,
}
_LARGE_TEXT = {
    "hidden_size": 5120,
    "intermediate_size": 25_600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "tie_word_embeddings": False,
}
_LARGE_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 5120,
    "deepstack_visual_indexes": [8, 16, 24],
}
_SPARSE_TEXT = {
    "model_type": "qwen3_vl_moe_text",
    "hidden_size": 2048,
    "intermediate_size": 6144,  # of layers without experts, and there are none
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
_LARGE_SPARSE_TEXT = _SPARSE_TEXT | {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "moe_intermediate_size": 1536,
}
_SPARSE_VISION = _LARGE_VISION | {"model_type": "qwen3_vl_moe", "out_hidden_size": 2048}
_SPARSE = {"model_type": "qwen3_vl_moe", "architectures": ["Qwen3VLMoeForConditionalGeneration"]}
_HUGE_TEXT = {
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "tie_word_embeddings": False,
}
_HUGE_VISION = _LARGE_VISION | {"out_hidden_size": 8192}
_HYBRID_TEXT = {
    "model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": 4096,
    "intermediate_size": 12_288, "num_hidden_layers": 32, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 256,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10], "mrope_interleaved": True,
    },
}  # fmt: skip
_LARGE_HYBRID_TEXT = _HYBRID_TEXT | {
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
    "linear_num_value_heads": 48,
}
_HYBRID_VISION = {
    "model_type": "qwen3_5", "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304, "out_hidden_size": 4096, "deepstack_visual_indexes": None,
}  # fmt: skip
_SMALL_HYBRID_TEXT = _HYBRID_TEXT | {
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "tie_word_embeddings": True,
}
_SMALL_HYBRID_VISION = _HYBRID_VISION | {
    name: _VISION[name] for name in ("depth", "hidden_size", "intermediate_size", "out_hidden_size")
}
_HYBRID = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
_SPARSE_HYBRID_TEXT = _HYBRID_TEXT | {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_SPARSE_HYBRID_VISION = _HYBRID_VISION | {"model_type": "qwen3_5_moe", "out_hidden_size": 2048}
_SPARSE_HYBRID = {
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
}
_LATENT_TEXT = {
    "model_type": "deepseek_v3",
    "vocab_size": 163_840,
    "hidden_size": 7168,
    "intermediate_size": 18_432,  # of the dense layer, and of the 9 experts of a token together
    "num_hidden_layers": 16,  # of 61: what a card holds
    "first_k_dense_replace": 16,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 50_000.0,
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_SPARSE_LATENT_TEXT = _LATENT_TEXT | {
    "num_hidden_layers": 61,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
}
_LATENT_VISION = dict.fromkeys(_VISION) | {
    "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16,
    "num_hidden_layers": 27, "patch_size": 14,
}  # fmt: skip
_LATENT = {"model_type": "kimi_k25", "architectures": ["Kimi_K25ForConditionalGeneration"]}
_PAGES_TEXT = {
    "model_type": "paddleocr_vl_text", "vocab_size": 103_424, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 16,
    "num_key_value_heads": 2, "tie_word_embeddings": False, "use_bias": False,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 500_000.0, "mrope_section": [16, 24, 24],
    },
}  # fmt: skip
_PAGES_VISION = dict.fromkeys(_VISION) | {
    "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16,
    "num_hidden_layers": 27, "image_size": 384, "patch_size": 14, "spatial_merge_size": 2,
}  # fmt: skip
_PAGES = {"model_type": "paddleocr_vl", "architectures": ["PaddleOCRVLForConditionalGeneration"]}
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "4b": ({}, {}, {}),
    "8b": (_MIDDLE_TEXT, _LARGE_VISION | {"out_hidden_size": 4096}, {}),
    "32b": (_LARGE_TEXT, _LARGE_VISION, {}),
    "30b-a3b": (_SPARSE_TEXT, _SPARSE_VISION, _SPARSE),
    "235b-a22b": (_LARGE_SPARSE_TEXT, _SPARSE_VISION | {"out_hidden_size": 4096}, _SPARSE),
    "72b": (_HUGE_TEXT, _HUGE_VISION, {}),
    "qwen3.5-4b": (_SMALL_HYBRID_TEXT, _SMALL_HYBRID_VISION, _HYBRID),
    "qwen3.5-9b": (_HYBRID_TEXT, _HYBRID_VISION, _HYBRID),
    "qwen3.6-27b": (_LARGE_HYBRID_TEXT, _HYBRID_VISION | {"out_hidden_size": 5120}, _HYBRID),
    "qwen3.6-35b-a3b": (_SPARSE_HYBRID_TEXT, _SPARSE_HYBRID_VISION, _SPARSE_HYBRID),
    "kimi-k2.5": (_SPARSE_LATENT_TEXT, _LATENT_VISION, _LATENT),
    "paddleocr-vl": (_PAGES_TEXT, _PAGES_VISION, _PAGES),
    "kimi-dense": (_LATENT_TEXT, _LATENT_VISION, _LATENT),
}
"""What each has instead of the first's: of the text, of the vision, and of both."""
_IMAGES: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_OTHER_IMAGES: dict[str, dict[str, Any]] = {
    "kimi_k25": {"image_processor_type": "Kimi_K25ImageProcessor"},
    "paddleocr_vl": {
        "image_processor_type": "PaddleOCRVLImageProcessor",
        "size": {"shortest_edge": 112_896, "longest_edge": 1_003_520},
        "temporal_patch_size": 1,
    },
}


def write(directory: Path, bundled: Path, size: str = "4b") -> Path:
    """Make `directory`, with the words and the chat template of the `bundled` checkpoint."""
    text, vision, whole = SIZES[size]
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(bundled / name, directory / name)
    tokenizer = json.loads((bundled / "tokenizer.json").read_text())
    words: dict[str, int] = tokenizer["model"]["vocab"]
    # Added tokens must be among the words too: those that are not are numbered behind them.
    words.update({added["content"]: added["id"] for added in tokenizer["added_tokens"]})
    taken = set(words.values())
    words.update({f"Ġw{i}": i for i in range(text.get("vocab_size", VOCABULARY)) if i not in taken})
    _write(directory / "tokenizer.json", tokenizer)
    images = _IMAGES | {"patch_size": vision.get("patch_size", _VISION["patch_size"])}
    images |= _OTHER_IMAGES.get(whole.get("model_type", ""), {})
    _write(directory / "preprocessor_config.json", images)
    own = json.loads((bundled / "config.json").read_text())
    special = {key: value for key, value in own.items() if key.endswith("_token_id")}
    end = own["text_config"].get("eos_token_id")
    config = {
        "architectures": own["architectures"],
        "model_type": own["model_type"],
        "tie_word_embeddings": text.get("tie_word_embeddings", True),
        "text_config": _TEXT | text | {"eos_token_id": end},
        "vision_config": {k: v for k, v in (_VISION | vision).items() if v is not None},
    }
    _write(directory / "config.json", config | special | whole)
    return directory


def store(directory: Path, settings: Mapping[str, Any] | None) -> None:
    """Let its weights be stored in the way that this quantization_config names; None: none."""
    if settings is not None:
        config = json.loads((directory / "config.json").read_text())
        _write(directory / "config.json", config | {"quantization_config": settings})


def is_mixture(directory: Path) -> bool:
    """Whether layers of this checkpoint have experts to choose from."""
    path = directory / "config.json"
    text = json.loads(path.read_text()).get("text_config", {}) if path.is_file() else {}
    return any(name in text for name in ("num_experts", "n_routed_experts"))


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
