"""Mistral 3 in small: language models of Mistral Small 3.1, Ministral 3 and Mistral Small 4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engine.tiny_tokens import name_tokens, plain_template


def config(image: int, text: dict[str, Any], spread: float) -> dict[str, Any]:
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 2, "image_size": 64, "patch_size": 8, "initializer_range": spread,
    }  # fmt: skip
    return {
        "text_config": text | {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
        "vision_config": vision,
        "image_token_index": image,
        "tie_word_embeddings": False,
    }


def config_ministral(image: int, text: dict[str, Any], spread: float) -> dict[str, Any]:
    """Queries grow from the 32nd token on."""
    rope = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    found = config(image, text, spread)
    found["text_config"] |= {"model_type": "ministral3", "rope_parameters": rope}
    return found


def config_mistral4(image: int, text: dict[str, Any], spread: float) -> dict[str, Any]:
    """Queries grow likewise, over latent rows; a dense layer, and experts in groups."""
    found = config_ministral(image, text, spread)
    found["text_config"] |= {
        "model_type": "mistral4", "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "moe_intermediate_size": 24, "routed_scaling_factor": 1.5,
    }  # fmt: skip
    del found["text_config"]["head_dim"]
    return found


def write_companions(directory: Path) -> dict[str, Any]:
    """Template, tokens and settings of prompts; gives those of images."""
    (directory / "chat_template.jinja").write_text(plain_template("[IMG]"))
    name_tokens(directory, "[IMG]", ("[IMG_BREAK]", "[IMG_END]"))
    prompts = {"patch_size": 8, "spatial_merge_size": 2}
    (directory / "processor_config.json").write_text(json.dumps(prompts))
    return {
        "image_processor_type": "PixtralImageProcessor", "patch_size": 8,
        "size": {"longest_edge": 128},
    }  # fmt: skip
