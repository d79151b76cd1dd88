"""The layouts of Kimi-K2.5 and DeepSeek-V3, as `published.py` has those of the other families.

*Derived.*  Names from transformers' mapping for what is published, those of the layer that drafts
from vLLM and SGLang; sizes from that of Kimi-K2 and transformers' defaults; in bfloat16.  What is
published has experts of four bits, that of DeepSeek-V3 eight (`stored_formats.py`), and that of
Kimi-K2.5 no tokenizer.json.
"""

from __future__ import annotations

from tests.model_files.published import HALVES, MLP, NORMS, Layout, stack, with_biases

_LATENT = {
    "self_attn.q_a_proj.weight": "query_rank hidden",
    "self_attn.q_a_layernorm.weight": "query_rank",
    "self_attn.q_b_proj.weight": "heads*query query_rank",
    "self_attn.kv_a_proj_with_mqa.weight": "latent hidden",
    "self_attn.kv_a_layernorm.weight": "rank",
    "self_attn.kv_b_proj.weight": "heads*key_value rank",
    "self_attn.o_proj.weight": "hidden heads*value",
}
_MIXTURE = {
    **{
        f"mlp.{path}.{name.removeprefix('mlp.')}": shape.replace("ffn", "moe")
        for path in ("experts.{experts}", "shared_experts")
        for name, shape in MLP.items()
    },
    "mlp.gate.weight": "experts hidden",
    "mlp.gate.e_score_correction_bias": "experts",
}


def _stack(prefix: str) -> dict[str, str]:
    kinds = {"dense": MLP, "sparse": _MIXTURE}
    return stack(prefix, _LATENT, NORMS) | {
        f"{prefix}layers.{{{layers}}}.{name}": shape
        for layers, mlp in kinds.items()
        for name, shape in mlp.items()
    }


_MOONVIT = {
    **with_biases(
        "vision_tower.encoder.blocks.{blocks}.",
        {"wqkv": "3*tower tower", "wo": "tower tower", "norm0": "tower", "norm1": "tower"}
        | {"mlp.fc0": "tower_ffn tower", "mlp.fc1": "tower tower_ffn"},
    ),
    **with_biases("vision_tower.", {"encoder.final_layernorm": "tower"}),
    **with_biases("vision_tower.", {"patch_embed.proj": "tower 3 patch patch"}),
    "vision_tower.patch_embed.pos_emb.weight": "64 64 tower",
    **with_biases("mm_projector.", {"pre_norm": "tower", "proj.0": "4*tower 4*tower"}),
    **with_biases("mm_projector.", {"proj.2": "hidden 4*tower"}),
}

KIMI = Layout(
    {**_stack("language_model.model."), **_MOONVIT},
    {
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": {
            "model_type": "kimi_k2", "attention_bias": False, "vocab_size": 163840,
            "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
            "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 384,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.827,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rms_norm_eps": 1e-05,
            "max_position_embeddings": 262144, "rope_theta": 50000.0, "num_nextn_predict_layers": 0,
            "rope_scaling": {
                "type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
            },
            "hidden_act": "silu", "tie_word_embeddings": False,
        },
        "vision_config": {
            "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16,
            "num_hidden_layers": 27, "patch_size": 14,
        },
        "media_placeholder_token_id": 163605, "tie_word_embeddings": False,
    },
    head="language_model.lm_head.weight",
    files={
        "preprocessor_config.json": {
            "media_proc_cfg": {
                "in_patch_limit": 16384, "patch_size": 14, **HALVES, "merge_kernel_size": 2,
                "fixed_output_tokens": None, "patch_limit_on_one_side": 512,
            },
        },
    },
    template="tokenizer_config.json",
)  # fmt: skip
_DRAFTS = {
    "eh_proj.weight": "hidden 2*hidden",
    **{f"{name}.weight": "hidden" for name in ("enorm", "hnorm", "shared_head.norm")},
    **{f"{name}.weight": "vocab hidden" for name in ("embed_tokens", "shared_head.head")},
}
DEEPSEEK = Layout(
    {
        **_stack("model."),
        **{f"model.layers.{{behind}}.{name}": shape
           for name, shape in (_LATENT | NORMS | _MIXTURE | _DRAFTS).items()},
    },
    {
        **KIMI.config["text_config"],
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 129280, "num_attention_heads": 128, "num_key_value_heads": 128,
        "n_routed_experts": 256, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-06, "num_nextn_predict_layers": 1,
        "max_position_embeddings": 163840, "rope_theta": 10000.0,
        "rope_scaling": KIMI.config["text_config"]["rope_scaling"] | {
            "factor": 40.0, "beta_fast": 32.0,
        },
    },
    template="tokenizer_config.json",
)  # fmt: skip
