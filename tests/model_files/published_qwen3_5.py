"""The layouts of Qwen3.5, dense and sparse, as `published.py` has those of the other families.

*Recorded.*  That the experts of the drafting layer are stored one by one: they are 1,811 tensors.

*Derived.*  Names are transformers' and, of the layers that draft, vLLM's; sizes are transformers'
defaults and those of public scripts.
"""

from __future__ import annotations

from tests.model_files.published import (
    ATTENTION,
    HEAD_NORMS,
    LAYOUTS,
    MLP,
    NORMS,
    QWEN3_TOWER,
    Layout,
    stack,
)

_GATED = ATTENTION | {"self_attn.q_proj.weight": "2*q hidden"} | HEAD_NORMS
_DELTA_NET = {
    "linear_attn.in_proj_qkv.weight": "channels hidden",
    "linear_attn.in_proj_z.weight": "values hidden",
    "linear_attn.in_proj_a.weight": "value_heads hidden",
    "linear_attn.in_proj_b.weight": "value_heads hidden",
    "linear_attn.conv1d.weight": "channels 1 kernel",
    "linear_attn.A_log": "value_heads",
    "linear_attn.dt_bias": "value_heads",
    "linear_attn.norm.weight": "value_head",
    "linear_attn.out_proj.weight": "hidden values",
}
_MTP = {
    "mtp.fc.weight": "hidden 2*hidden",
    **{f"mtp.layers.0.{name}": shape for name, shape in (_GATED | NORMS | MLP).items()},
    **{f"mtp.{name}.weight": "hidden" for name in ("norm", "pre_fc_norm_embedding")},
    "mtp.pre_fc_norm_hidden.weight": "hidden",
}
QWEN3_5 = Layout(
    {
        **stack("model.language_model.", _GATED, _DELTA_NET, NORMS, MLP),
        **{name: shape for name, shape in QWEN3_TOWER.items() if "deepstack" not in name},
        **_MTP,
    },
    {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {
            "model_type": "qwen3_5_text", "hidden_act": "silu", "head_dim": 256,
            "rms_norm_eps": 1e-06, "vocab_size": 248320, "max_position_embeddings": 262144,
            "attention_bias": False, "attn_output_gate": True, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                "mrope_interleaved": True, "mrope_section": [11, 11, 10],
            },
        },
        "vision_config": {
            "model_type": "qwen3_5", "hidden_size": 1152, "intermediate_size": 4304, "depth": 27,
            "num_heads": 16, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "num_position_embeddings": 2304, "hidden_act": "gelu_pytorch_tanh", "in_channels": 3,
        },
        "image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053,
        "vision_end_token_id": 248054,
    },
    files=LAYOUTS["qwen3_vl"].files,
)  # fmt: skip
_SHARED = {
    **{f"mlp.shared_expert.{name}_proj.weight": "shared hidden" for name in ("gate", "up")},
    "mlp.shared_expert.down_proj.weight": "hidden shared",
    "mlp.shared_expert_gate.weight": "1 hidden",
    "mlp.gate.weight": "experts hidden",
    "mlp.experts.gate_up_proj": "experts 2*moe hidden",
    "mlp.experts.down_proj": "experts hidden moe",
}
QWEN3_5_MOE = Layout(
    {
        **stack("model.language_model.", _GATED, _DELTA_NET, NORMS, _SHARED),
        **{n: shape for n, shape in QWEN3_5.tensors.items() if "visual" in n},
        **{n: shape for n, shape in _MTP.items() if ".mlp." not in n},
        **{f"mtp.layers.0.{n}": shape for n, shape in _SHARED.items() if "experts." not in n},
        **{f"mtp.layers.0.mlp.experts.{{experts}}.{n[4:]}": shape.replace("ffn", "moe")
           for n, shape in MLP.items()},
    },
    {
        **QWEN3_5.config,
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": {
            **QWEN3_5.config["text_config"], "model_type": "qwen3_5_moe_text",
            "num_experts": 256, "num_experts_per_tok": 8,
        },
        "vision_config": {
            **QWEN3_5.config["vision_config"], "model_type": "qwen3_5_moe",
        },
    },
    files=LAYOUTS["qwen3_vl"].files,
)  # fmt: skip
