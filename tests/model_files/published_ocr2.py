"""The layout of DeepSeek-OCR 2, as `published.py` has those of the other families.

*Recorded.*  Sizes of the language model: a test of another engine has them.  Names: transformers'
table of conversions, for the checkpoint's own code.

*Derived.*  Sizes of SAM: transformers' defaults, which are SAM-B's.  Those of its reader: Qwen2's
of half a billion parameters, which the width of SAM's last convolution has.
"""

from __future__ import annotations

from typing import Any

from tests.model_files.published import (
    ATTENTION,
    BIASES,
    MLP,
    NORMS,
    Layout,
    stack,
    text_of,
    with_biases,
)

_SAM, _READER = "model.sam_model.", "model.qwen2_model."
_WORDS = {"hidden": "896", "q": "896", "kv": "128", "ffn": "4864"}
_SEEING = {
    **{
        name: shape
        for i in range(12)
        for name, shape in with_biases(
            f"{_SAM}blocks.{i}.",
            {"norm1": "768", "norm2": "768", "attn.qkv": "2304 768", "attn.proj": "768 768"}
            | {"mlp.lin1": "3072 768", "mlp.lin2": "768 3072"},
        ).items()
    },
    **{
        f"{_SAM}blocks.{i}.attn.rel_pos_{axis}": f"{127 if i in (2, 5, 8, 11) else 27} 64"
        for i in range(12)
        for axis in "hw"
    },
    **with_biases(f"{_SAM}patch_embed.", {"proj": "768 3 16 16"}),
    f"{_SAM}pos_embed": "1 64 64 768",
    f"{_SAM}neck.0.weight": "256 768 1 1",
    f"{_SAM}neck.2.weight": "256 256 3 3",
    **with_biases(f"{_SAM}neck.", {"1": "256", "3": "256"}),
    f"{_SAM}net_2.weight": "512 256 3 3",
    f"{_SAM}net_3.weight": "896 512 3 3",
    **{
        f"{_READER}model.model.layers.{i}.{name}": " ".join(_WORDS[w] for w in shape.split())
        for i in range(24)
        for name, shape in (ATTENTION | BIASES | NORMS | MLP).items()
    },
    f"{_READER}model.model.norm.weight": "896",
    f"{_READER}query_768.weight": "144 896",
    f"{_READER}query_1024.weight": "256 896",
    **with_biases("model.projector.", {"layers": "hidden 896"}),
    "model.view_seperator": "hidden",
}
_EXPERTS = {
    "mlp.gate.weight": "experts hidden",
    **{f"mlp.experts.{{experts}}.{n[4:]}": w.replace("ffn", "moe") for n, w in MLP.items()},
    **{f"mlp.shared_experts.{n[4:]}": w.replace("ffn", "2*moe") for n, w in MLP.items()},
}
OCR2 = Layout(
    {
        **stack("model.", ATTENTION, NORMS),
        **{f"model.layers.0.{name}": shape for name, shape in MLP.items()},
        **{f"model.layers.{i}.{n}": w for i in range(1, 12) for n, w in _EXPERTS.items()},
        **_SEEING,
    },
    {
        "model_type": "deepseek_ocr2",
        "architectures": ["DeepseekOcr2ForConditionalGeneration"],
        "image_token_id": 128815, "tie_word_embeddings": False,
        "text_config": text_of(1280, 6848, 12, 10, 10, vocab_size=129280, head_dim=128) | {
            "model_type": "deepseek_ocr2_text", "hidden_act": "silu", "rms_norm_eps": 1e-06,
            "max_position_embeddings": 8192, "attention_bias": False, "mlp_bias": False,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "n_group": 1,
            "n_routed_experts": 64, "n_shared_experts": 2, "routed_scaling_factor": 1.0,
            "topk_group": 1, "topk_method": "greedy", "num_experts_per_tok": 6,
            "moe_intermediate_size": 896, "mlp_layer_types": ["dense", *["sparse"] * 11],
        },
        "vision_config": {
            "model_type": "deepseek_ocr2_vision",
            "sam_config": {"model_type": "deepseek_ocr2_sam_vision_model"},
            "encoder_config": text_of(896, 4864, 24, 14, 2)
            | {"model_type": "deepseek_ocr2_encoder", "rms_norm_eps": 1e-06},
        },
    },
)  # fmt: skip
CHECKPOINTS: dict[str, tuple[Any, ...]] = {  # sizes, tensors, numbers
    "deepseek-community/DeepSeek-OCR-2": ({}, 2707, 3389119360),
}
