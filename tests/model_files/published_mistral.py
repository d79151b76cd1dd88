"""The layouts of Mistral Small 3.1 and of Ministral 3, as `published.py` has those of others.

*Derived.*  Names: those of transformers' class when the checkpoints were saved, as its mappings for
old ones turn them into today's.  Sizes and settings: transformers' defaults and documentation.
"""

from __future__ import annotations

from typing import Any

from tests.model_files.published import ATTENTION, CLIP, MLP, NORMS, Layout, stack, text_of

_BLOCK = {
    "attention_norm": "tower", "ffn_norm": "tower",
    **{f"attention.{name}_proj": "tower tower" for name in "qkvo"},
    "feed_forward.gate_proj": "tower_ffn tower", "feed_forward.up_proj": "tower_ffn tower",
    "feed_forward.down_proj": "tower tower_ffn",
}  # fmt: skip
MISTRAL3 = Layout(
    {
        **stack("language_model.model.", ATTENTION, NORMS, MLP),
        **{f"vision_tower.transformer.layers.{{blocks}}.{n}.weight": w for n, w in _BLOCK.items()},
        "vision_tower.patch_conv.weight": "tower 3 patch patch",
        "vision_tower.ln_pre.weight": "tower",
        "multi_modal_projector.norm.weight": "tower",
        "multi_modal_projector.patch_merger.merging_layer.weight": "tower 4*tower",
        "multi_modal_projector.linear_1.weight": "hidden tower",
        "multi_modal_projector.linear_2.weight": "hidden hidden",
    },
    {
        "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10,
        "model_type": "mistral3", "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1,
        "text_config": {
            "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu",
            "initializer_range": 0.02, "rms_norm_eps": 1e-05, "use_cache": True,
            "vocab_size": 131072, "sliding_window": None,
        },
        "vision_config": {
            "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024,
            "image_size": 1540, "initializer_range": 0.02, "intermediate_size": 4096,
            "model_type": "pixtral", "num_attention_heads": 16, "num_channels": 3,
            "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10000.0,
        },
    },
    head="language_model.lm_head.weight",
    files={
        "preprocessor_config.json": {
            "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
            **CLIP, "image_processor_type": "PixtralImageProcessor", "patch_size": 14,
            "processor_class": "PixtralProcessor", "resample": 3,
            "rescale_factor": 0.00392156862745098, "size": {"longest_edge": 1540},
        },
        "processor_config.json": {
            "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]",
            "image_token": "[IMG]", "patch_size": 14, "processor_class": "PixtralProcessor",
            "spatial_merge_size": 2,
        },
    },
    others=("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
)  # fmt: skip
_YARN = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
    "rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn",
}  # fmt: skip


def _config(kind: str, context: int, *text: int, **more: Any) -> dict[str, Any]:
    own = {"model_type": kind, "tie_word_embeddings": False, "max_position_embeddings": context}
    return {"text_config": text_of(*text, **own, **more), "tie_word_embeddings": False}


CHECKPOINTS = {
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": (
        _config("mistral", 131072, 5120, 32768, 40, 32, 8, rope_theta=1000000000.0),
        585, 24011361280,
    ),
    "mistralai/Ministral-3-8B-Instruct-2512-BF16": (
        _config("ministral3", 262144, 4096, 14336, 34, 32, 8, rope_parameters=_YARN),
        531, 8918026240,
    ),
}  # fmt: skip
