"""The layouts of GLM's families, as `published.py` has those of the other families.

*Recorded.*  GLM-4.5V: a report of its config.json, and of names, shapes and number of all tensors.
GLM-OCR: its config.json and preprocessor_config.json.  GLM-4.1V: a script that converts it, and
config.json as tests of another engine have it.

*Derived.*  Names of GLM-4.1V and GLM-OCR: those of transformers' classes.  The layer of GLM-OCR
that guesses a token more: as those of GLM-4.5 are named.  GLM-4.6V: sizes of GLM-4.1V and GLM-4.5V.
"""

from __future__ import annotations

from typing import Any

from tests.model_files.published import (
    ATTENTION,
    BIASES,
    CLIP,
    MLP,
    NORMS,
    Layout,
    stack,
    text_of,
    with_biases,
)

_STACK = "model.language_model."
_BEHIND = {f"post_{name}_layernorm.weight": "hidden" for name in ("self_attn", "mlp")}
_JOINT = {"mlp.gate_up_proj.weight": "2*ffn hidden", "mlp.down_proj.weight": "hidden ffn"}
_BLOCK = "model.visual.blocks.{blocks}."


def _tower(ffn: str, context: str, **more: str) -> dict[str, str]:
    return {
        f"{_BLOCK}attn.qkv.weight": "3*tower tower",
        f"{_BLOCK}attn.proj.weight": "tower tower",
        **{f"{_BLOCK}mlp.{name}_proj.weight": f"{ffn} tower" for name in ("gate", "up")},
        f"{_BLOCK}mlp.down_proj.weight": f"tower {ffn}",
        **{f"{_BLOCK}norm{number}.weight": "tower" for number in (1, 2)},
        **with_biases(
            "model.visual.",
            {"patch_embed.proj": "tower 3 2 patch patch", "downsample": "out tower 2 2"}
            | {"merger.post_projection_norm": "out"},
        ),
        "model.visual.post_layernorm.weight": "tower",
        "model.visual.merger.proj.weight": "out out",
        **{f"model.visual.merger.{n}_proj.weight": f"{context} out" for n in ("gate", "up")},
        "model.visual.merger.down_proj.weight": f"out {context}",
        **more,
    }


_TOWER = _tower("out", "tower_ffn") | {
    "model.visual.post_conv_layernorm.weight": "tower",
    "model.visual.embeddings.position_embedding.weight": "places tower",
}
_OCR_TOWER = _tower("tower_ffn", "3*out") | {
    f"{_BLOCK}attn.qkv.bias": "3*tower",
    **{f"{_BLOCK}{name}.bias": "tower" for name in ("attn.proj", "mlp.down_proj")},
    **{f"{_BLOCK}mlp.{name}_proj.bias": "tower_ffn" for name in ("gate", "up")},
    **{f"{_BLOCK}attn.{name}_norm.weight": "tower_head" for name in "qk"},
}
_NEXT = f"{_STACK}layers.{{behind}}."  # of GLM-OCR, behind those that count
_GUESS = {
    **{f"{_NEXT}{n}": w for n, w in {**ATTENTION, **NORMS, **_BEHIND, **_JOINT}.items()},
    **{f"{_NEXT}{name}.weight": "hidden" for name in ("enorm", "hnorm", "shared_head.norm")},
    f"{_NEXT}eh_proj.weight": "hidden 2*hidden",
    **{f"{_NEXT}{name}.weight": "vocab hidden" for name in ("embed_tokens", "shared_head.head")},
}
_VISION = {
    "attention_bias": False, "attention_dropout": 0.0, "depth": 24, "hidden_act": "silu",
    "hidden_size": 1536, "image_size": 336, "in_channels": 3, "initializer_range": 0.02,
    "intermediate_size": 13696, "num_heads": 12, "out_hidden_size": 4096, "patch_size": 14,
    "rms_norm_eps": 1e-05, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_TEXT = {
    "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": [151329, 151336, 151338],
    "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 65536,
    "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "use_cache": True, "vocab_size": 151552, "tie_word_embeddings": False,
    "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
}  # fmt: skip
_TOKENS = {
    "image_start_token_id": 151339, "image_end_token_id": 151340, "image_token_id": 151363,
    "video_start_token_id": 151341, "video_end_token_id": 151342, "video_token_id": 151364,
}  # fmt: skip


def _files(kind: str) -> dict[str, Any]:
    images = {
        "do_rescale": True, "merge_size": 2, "patch_size": 14, "temporal_patch_size": 2, **CLIP,
        "size": {"shortest_edge": 12544, "longest_edge": 9633792},
        "image_processor_type": f"{kind}ImageProcessor", "processor_class": f"{kind}Processor",
    }  # fmt: skip
    return {"preprocessor_config.json": images}


def _layout(model_type: str, kind: str, tensors: dict[str, str], **config: Any) -> Layout:
    of_text = "glm4v" if model_type == "glm46v" else model_type
    told: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [f"{kind}ForConditionalGeneration"],
        "text_config": {**_TEXT, "model_type": f"{of_text}_text"},
        "vision_config": {**_VISION, "model_type": f"{of_text}_vision"},
        "tie_word_embeddings": False,
        **_TOKENS,
        **config,
    }
    files = _files("Glm46V" if kind in ("Glm46V", "GlmOcr") else "Glm4v")
    return Layout(tensors, told, files=files, template="tokenizer_config.json",
                  others=("tokenizer.json", "tokenizer_config.json"))  # fmt: skip


_DENSE = {**stack(_STACK, ATTENTION, BIASES, NORMS, _BEHIND, _JOINT), **_TOWER}
_MIXTURE = {
    **{f"mlp.experts.{{experts}}.{n[4:]}": w.replace("ffn", "moe") for n, w in MLP.items()},
    **{f"mlp.shared_experts.{n[4:]}": w.replace("ffn", "moe") for n, w in MLP.items()},
    "mlp.gate.weight": "experts hidden",
    "mlp.gate.e_score_correction_bias": "experts",
}
_MOE = {
    **stack(_STACK, ATTENTION, BIASES, NORMS),
    **{f"{_STACK}layers.{{dense}}.{name}": shape for name, shape in MLP.items()},
    **{f"{_STACK}layers.{{sparse}}.{name}": shape for name, shape in _MIXTURE.items()},
    **_TOWER,
}
LAYOUTS = {
    "glm4v": _layout("glm4v", "Glm4v", _DENSE),
    "glm46v": _layout("glm46v", "Glm46V", _DENSE, video_start_token_id=151361),
    "glm_ocr": _layout(
        "glm_ocr", "GlmOcr",
        {**stack(_STACK, ATTENTION, NORMS, _BEHIND, _JOINT), **_OCR_TOWER, **_GUESS},
        text_config={
            "model_type": "glm_ocr_text", "attention_bias": False, "attention_dropout": 0.0,
            "dtype": "bfloat16", "eos_token_id": [59246, 59253], "head_dim": 128,
            "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 131072,
            "num_nextn_predict_layers": 1, "pad_token_id": 59246, "rms_norm_eps": 1e-05,
            "rope_parameters": {
                "rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 10000,
                "partial_rotary_factor": 1.0,
            },
            "tie_word_embeddings": False, "use_cache": True, "vocab_size": 59392,
        },
        vision_config={
            **_VISION, "model_type": "glm_ocr_vision", "attention_bias": True, "hidden_size": 1024,
            "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 1536,
        },
        image_start_token_id=59256, image_end_token_id=59257, image_token_id=59280,
        video_start_token_id=59258, video_end_token_id=59259, video_token_id=59281,
    ),
    "glm4v_moe": _layout(
        "glm4v_moe", "Glm4vMoe", _MOE,
        text_config={
            **_TEXT, "model_type": "glm4v_moe_text", "first_k_dense_replace": 1, "head_dim": 128,
            "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
            "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
            "routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": False,
        },
        vision_config={**_VISION, "model_type": "glm4v_moe_vision", "intermediate_size": 10944},
    ),
}  # fmt: skip
_9B = {"text_config": text_of(4096, 13696, 40, 32, 2)}
_106B = {"text_config": text_of(4096, 10944, 46, 96, 8)}
_LONG = {"max_position_embeddings": 131072}
CHECKPOINTS = {  # family, sizes, tensors, numbers, source
    "zai-org/GLM-4.1V-9B-Thinking": ("glm4v", _9B, 704, 10292777472, ""),
    "zai-org/GLM-4.6V-Flash": (
        "glm46v", {"text_config": _9B["text_config"] | _LONG}, 704, 10292777472, ""
    ),
    "zai-org/GLM-OCR": (
        "glm_ocr", {"text_config": text_of(1536, 4608, 16, 16, 8)}, 526, 1325258240, ""
    ),
    "zai-org/GLM-4.5V": (
        "glm4v_moe", _106B, 18106, 107710933120, "a report of all its tensors"
    ),
    "zai-org/GLM-4.6V": (
        "glm4v_moe", {"text_config": _106B["text_config"] | _LONG}, 18106, 107710933120, ""
    ),
}  # fmt: skip
