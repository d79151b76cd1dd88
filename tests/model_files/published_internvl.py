"""The layouts of InternVL3 and InternVL3.5, as `published.py` has those of the other families.

*Recorded.*  vision_config: scripts that convert the towers of 300M and 6B.  Sizes of the 1B and its
token: JAX's port of it.  That heads are stored beside embeddings, and that the processor's file has
`crop_to_patches` false: scripts that run InternVL3.5.

*Derived.*  Names: those that transformers' classes had when the checkpoints were converted.  Sizes
of language models: those of Qwen2.5 and Qwen3.  That rope of InternVL3 is dynamic: as in the
config.json of the checkpoints that these were converted from.
"""

from __future__ import annotations

from typing import Any

from tests.model_files.published import (
    ATTENTION,
    BIASES,
    HEAD_NORMS,
    MLP,
    NORMS,
    Layout,
    stack,
    text_of,
    with_biases,
)

_STACK = "language_model.model."
_LAYER = "vision_tower.encoder.layer.{blocks}."
_TOWER_TENSORS = {
    **{f"{_LAYER}attention.{n}_proj.weight": "tower tower" for n in "qkv"},
    **with_biases(
        _LAYER,
        {"attention.projection_layer": "tower tower", "mlp.fc1": "tower_ffn tower"}
        | {"mlp.fc2": "tower tower_ffn"},
    ),
    **{f"{_LAYER}{n}": "tower" for n in ("lambda_1", "lambda_2")},
    **{f"{_LAYER}layernorm_{n}.weight": "tower" for n in ("before", "after")},
    **with_biases(
        "vision_tower.embeddings.patch_embeddings.", {"projection": "tower 3 patch patch"}
    ),
    "vision_tower.embeddings.cls_token": "1 1 tower",
    "vision_tower.embeddings.position_embeddings": "1 places_and_one tower",
    **with_biases(
        "multi_modal_projector.",
        {"layer_norm": "4*tower", "linear_1": "hidden 4*tower", "linear_2": "hidden hidden"},
    ),
}
# What one tower has and the other has not.
_SMALL_TOWER = {
    **{f"{_LAYER}attention.{n}_proj.bias": "tower" for n in "qkv"},
    **{f"{_LAYER}layernorm_{n}.bias": "tower" for n in ("before", "after")},
}
_LARGE_TOWER = {f"{_LAYER}attention.{n}_norm.weight": "tower" for n in "qk"}
_LARGE_VISION = {
    "attention_bias": False, "hidden_size": 3200, "intermediate_size": 12800,
    "norm_type": "rms_norm", "num_attention_heads": 25, "num_hidden_layers": 45,
    "use_qk_norm": True,
}  # fmt: skip
_VISION = {
    "architectures": ["InternVisionModel"], "attention_bias": True, "attention_dropout": 0.0,
    "dropout": 0.0, "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 1024,
    "image_size": [448, 448], "initializer_factor": 0.1, "initializer_range": 1e-10,
    "intermediate_size": 4096, "layer_norm_eps": 1e-06, "layer_scale_init_value": 0.1,
    "model_type": "internvl_vision", "norm_type": "layer_norm", "num_attention_heads": 16,
    "num_channels": 3, "num_hidden_layers": 24, "patch_size": [14, 14], "projection_dropout": 0.0,
    "torch_dtype": "bfloat16", "use_absolute_position_embeddings": True, "use_mask_token": False,
    "use_mean_pooling": True, "use_qk_norm": False,
}  # fmt: skip
_TEXT = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "initializer_range": 0.02, "max_window_layers": 70, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": None, "use_cache": False,
    "use_sliding_window": False, "tie_word_embeddings": False,
}  # fmt: skip
INTERNVL = Layout(
    {**stack(_STACK, ATTENTION, NORMS), **_TOWER_TENSORS},
    {
        "model_type": "internvl", "architectures": ["InternVLForConditionalGeneration"],
        "downsample_ratio": 0.5, "image_seq_length": 256, "image_token_id": 151667,
        "projector_hidden_act": "gelu", "text_config": _TEXT, "vision_config": _VISION,
        "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
    },
    head="language_model.lm_head.weight",
    files={
        "preprocessor_config.json": {
            "crop_to_patches": False, "data_format": "channels_first", "default_to_square": True,
            "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
            "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
            "image_processor_type": "GotOcr2ImageProcessorFast", "max_patches": 12,
            "min_patches": 1, "processor_class": "InternVLProcessor", "resample": 3,
            "rescale_factor": 0.00392156862745098, "size": {"height": 448, "width": 448},
        },
        "processor_config.json": {
            "image_seq_length": 256, "processor_class": "InternVLProcessor",
        },
    },
    others=(
        *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"),
        *("added_tokens.json", "special_tokens_map.json"),
    ),
)  # fmt: skip
_EXPERTS = {
    "mlp.gate.weight": "experts hidden",
    **{f"mlp.experts.{{experts}}.{n[4:]}": w.replace("ffn", "moe") for n, w in MLP.items()},
}
_QWEN2 = {
    "model_type": "qwen2", "max_position_embeddings": 32768, "vocab_size": 151674,
    "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
}  # fmt: skip
_QWEN3 = {
    "model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 40960,
    "vocab_size": 151936, "attention_bias": False, "rope_scaling": None,
}  # fmt: skip
_MOE = {
    "model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip


Row = tuple[dict[str, Any], int, int, str, dict[str, str]]


def _row(*text: int, large: bool, count: tuple[int, int], **more: Any) -> Row:
    """`text`: hidden, ffn, layers, heads, heads of keys; `large`: the tower of 6B.

    A vocabulary is that of InternVL3, an expert's size that of a mixture."""
    is_qwen2, is_mixture = "vocab_size" in more, "moe_intermediate_size" in more
    base = _QWEN2 if is_qwen2 else _QWEN3 | (_MOE if is_mixture else {})
    layer = {**(BIASES if is_qwen2 else HEAD_NORMS), **(_EXPERTS if is_mixture else MLP)}
    extra = {f"{_STACK}layers.{{layers}}.{name}": shape for name, shape in layer.items()}
    config: dict[str, Any] = {"text_config": base | text_of(*text, **more)}
    if large:
        config["vision_config"] = _LARGE_VISION
    if not is_qwen2:
        config["image_token_id"] = 151671
    return config, *count, "", extra | (_LARGE_TOWER if large else _SMALL_TOWER)


CHECKPOINTS = {
    "OpenGVLab/InternVL3-1B-hf": _row(
        896, 4864, 24, 14, 2, vocab_size=151674, large=False, count=(733, 938193024)
    ),
    "OpenGVLab/InternVL3-8B-hf": _row(
        3584, 18944, 28, 28, 4, vocab_size=151674, large=False, count=(781, 7944373760)
    ),
    "OpenGVLab/InternVL3-78B-hf": _row(
        8192, 29568, 80, 64, 8, vocab_size=151674, large=True, count=(1648, 78408318336)
    ),
    "OpenGVLab/InternVL3_5-1B-HF": _row(
        1024, 3072, 28, 16, 8, large=False, count=(753, 1060897792)
    ),
    "OpenGVLab/InternVL3_5-8B-HF": _row(
        4096, 12288, 36, 32, 8, large=False, count=(841, 8528318464)
    ),
    "OpenGVLab/InternVL3_5-30B-A3B-HF": _row(
        2048, 6144, 48, 32, 4, moe_intermediate_size=768, large=False, count=(19309, 30848730112)
    ),
    "OpenGVLab/InternVL3_5-241B-A28B-HF": _row(
        4096, 12288, 94, 64, 4, moe_intermediate_size=1536, large=True, count=(37630, 240699370368)
    ),
}
