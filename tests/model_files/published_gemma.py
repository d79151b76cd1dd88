"""The layouts of Gemma 4, as `published.py` has those of the other families.

*Recorded.*  Sizes of E2B and 26B-A4B: config.json as tests and tools of other engines have it.
*Derived.*  Names: those of transformers' class, and keys and values that it leaves unread.  Shapes
differ by layer, so they are counted out here.  Of the part that hears, nothing is on record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.model_files.published import Layout, text_of

_WINDOW, _FULL = "sliding_attention", "full_attention"
_STACK, _TOWER = "model.language_model.", "model.vision_tower."
Shape = tuple[int, ...]


def shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Every name and shape that is stored with this config.json."""
    text, vision = config["text_config"], config["vision_config"]
    found = {
        f"{_STACK}embed_tokens.weight": (text["vocab_size"], text["hidden_size"]),
        f"{_STACK}norm.weight": (text["hidden_size"],),
        "model.embed_vision.embedding_projection.weight": (
            text["hidden_size"],
            vision["hidden_size"],
        ),
        **_tower(vision),
    }
    if width := text["hidden_size_per_layer_input"]:
        every = width * text["num_hidden_layers"]
        found |= {
            f"{_STACK}embed_tokens_per_layer.weight": (text["vocab_size_per_layer_input"], every),
            f"{_STACK}per_layer_model_projection.weight": (every, text["hidden_size"]),
            f"{_STACK}per_layer_projection_norm.weight": (width,),
        }
    for index in range(text["num_hidden_layers"]):
        layer = _layer(text, index)
        found |= {f"{_STACK}layers.{index}.{name}": shape for name, shape in layer.items()}
    return found


def _layer(text: Mapping[str, Any], index: int) -> dict[str, Shape]:
    hidden, ffn = text["hidden_size"], text["intermediate_size"]
    is_full = text["layer_types"][index] == _FULL
    reads = index >= text["num_hidden_layers"] - text["num_kv_shared_layers"]
    head = text["global_head_dim"] if is_full else text["head_dim"]
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    if is_full and text["attention_k_eq_v"]:
        kv_heads = text["num_global_key_value_heads"]
    if reads and text["use_double_wide_mlp"]:
        ffn *= 2
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    found: dict[str, Shape] = {f"{name}_layernorm.weight": (hidden,) for name in norms}
    found |= {
        "layer_scalar": (1,),
        "self_attn.q_proj.weight": (heads * head, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "self_attn.k_proj.weight": (kv_heads * head, hidden),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    if not (is_full and text["attention_k_eq_v"]):
        found["self_attn.v_proj.weight"] = (kv_heads * head, hidden)
    if width := text["hidden_size_per_layer_input"]:
        found |= {
            "per_layer_input_gate.weight": (width, hidden),
            "per_layer_projection.weight": (hidden, width),
            "post_per_layer_input_norm.weight": (hidden,),
        }
    if text["enable_moe_block"]:
        experts, moe = text["num_experts"], text["moe_intermediate_size"]
        found |= {
            "router.proj.weight": (experts, hidden),
            "router.scale": (hidden,),
            "router.per_expert_scale": (experts,),
            "experts.gate_up_proj": (experts, 2 * moe, hidden),
            "experts.down_proj": (experts, hidden, moe),
            "post_feedforward_layernorm_1.weight": (hidden,),
            "post_feedforward_layernorm_2.weight": (hidden,),
            "pre_feedforward_layernorm_2.weight": (hidden,),
        }
    return found


def _tower(vision: Mapping[str, Any]) -> dict[str, Shape]:
    width, ffn, patch = (
        vision[name] for name in ("hidden_size", "intermediate_size", "patch_size")
    )
    found: dict[str, Shape] = {
        f"{_TOWER}patch_embedder.input_proj.weight": (width, 3 * patch**2),
        f"{_TOWER}patch_embedder.position_embedding_table": (
            2,
            vision["position_embedding_size"],
            width,
        ),
    }
    if vision["standardize"]:
        found |= {f"{_TOWER}std_{name}": (width,) for name in ("bias", "scale")}
    products = {f"self_attn.{name}_proj": (width, width) for name in "qkvo"} | {
        "mlp.gate_proj": (ffn, width),
        "mlp.up_proj": (ffn, width),
        "mlp.down_proj": (width, ffn),
    }
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    for index in range(vision["num_hidden_layers"]):
        block = f"{_TOWER}encoder.layers.{index}."
        found |= {f"{block}{name}_layernorm.weight": (width,) for name in norms}
        found |= {f"{block}self_attn.{n}_norm.weight": (vision["head_dim"],) for n in "qk"}
        found |= {f"{block}{name}.linear.weight": shape for name, shape in products.items()}
        if vision["use_clipped_linears"]:
            ends = [f"{way}_{end}" for way in ("input", "output") for end in ("min", "max")]
            found |= {f"{block}{name}.{end}": () for name in products for end in ends}
    return found


GEMMA4 = Layout(
    {},
    {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
        "audio_token_id": 258881, "boa_token_id": 256000, "boi_token_id": 255999,
        "eoa_token_index": 258883, "eoi_token_id": 258882, "image_token_id": 258880,
        "video_token_id": 258884, "initializer_range": 0.02, "tie_word_embeddings": True,
        "vision_soft_tokens_per_image": 280,
        "text_config": {
            "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 1,
            "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02,
            "model_type": "gemma4_text", "pad_token_id": 0, "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "tie_word_embeddings": True, "use_cache": True, "vocab_size": 262144,
            "vocab_size_per_layer_input": 262144,
        },
        "vision_config": {
            "attention_bias": False, "attention_dropout": 0.0, "default_output_length": 280,
            "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02,
            "max_position_embeddings": 131072, "model_type": "gemma4_vision", "patch_size": 16,
            "pooling_kernel_size": 3, "position_embedding_size": 10240, "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
        },
    },
    files={
        "processor_config.json": {
            "image_processor": {
                "do_convert_rgb": True, "do_normalize": False, "do_rescale": True,
                "do_resize": True, "image_mean": [0.0] * 3, "image_std": [1.0] * 3,
                "image_processor_type": "Gemma4ImageProcessor", "image_seq_length": 280,
                "max_soft_tokens": 280, "patch_size": 16, "pooling_kernel_size": 3, "resample": 3,
                "rescale_factor": 0.00392156862745098,
            },
            "image_seq_length": 280, "processor_class": "Gemma4Processor",
            "video_processor": {
                "do_convert_rgb": True, "do_normalize": True, "do_rescale": True,
                "do_resize": True, "do_sample_frames": True, "image_mean": [0.0] * 3,
                "image_std": [1.0] * 3, "max_soft_tokens": 70, "num_frames": 32, "patch_size": 16,
                "pooling_kernel_size": 3, "resample": 3, "rescale_factor": 0.00392156862745098,
                "return_metadata": False, "video_processor_type": "Gemma4VideoProcessor",
            },
        }
    },
    others=("tokenizer.json", "tokenizer_config.json"),
    shapes=shapes,
)  # fmt: skip


def _config(
    text: tuple[int, ...], context: int, window: int, period: int, vision: dict[str, Any],
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    kinds = [_FULL if i % period == period - 1 else _WINDOW for i in range(text[2])]
    own = {"layer_types": kinds, "sliding_window": window, "max_position_embeddings": context}
    heads = vision["num_attention_heads"]
    seeing = vision | {"num_key_value_heads": heads, "head_dim": vision["hidden_size"] // heads}
    return {"text_config": text_of(*text, **own, **more), "vision_config": seeing}


CHECKPOINTS = {
    "google/gemma-4-E2B-it": (
        _config(
            (1536, 6144, 35, 8, 1), 131072, 512, 5,
            {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16,
             "num_attention_heads": 12, "use_clipped_linears": True, "standardize": False},
            attention_k_eq_v=False, enable_moe_block=False, hidden_size_per_layer_input=256,
            num_global_key_value_heads=None, num_kv_shared_layers=20, use_double_wide_mlp=True,
            num_experts=None, moe_intermediate_size=None, top_k_experts=None,
            use_bidirectional_attention=None,
        ),
        1259, 4815994595,
    ),
    "google/gemma-4-26B-A4B-it": (
        _config(
            (2816, 2112, 30, 16, 8), 262144, 1024, 6,
            {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
             "num_attention_heads": 16, "use_clipped_linears": False, "standardize": True},
            attention_k_eq_v=True, enable_moe_block=True, hidden_size_per_layer_input=0,
            num_global_key_value_heads=2, num_kv_shared_layers=0, use_double_wide_mlp=False,
            num_experts=128, moe_intermediate_size=704, top_k_experts=8,
            use_bidirectional_attention="vision",
        ),
        1013, 25805936206,
    ),
}  # fmt: skip
# In small: sizes of layers that differ.
REDUCED = {
    "text_config": {
        "num_hidden_layers": 4, "layer_types": [_WINDOW, _FULL] * 2, "num_kv_shared_layers": 2,
        "global_head_dim": 32, "num_key_value_heads": 1, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 272, "num_experts": None, "moe_intermediate_size": None,
        "pad_token_id": 0,
    },
    "vision_config": {
        "head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 64, "patch_size": 16,
    },
    "audio_token_id": 271,
}  # fmt: skip
