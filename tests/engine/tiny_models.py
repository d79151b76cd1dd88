"""Tiny random-weight checkpoints of every supported family, complete directories for any test.

`make_model(family, directory)` writes config, weights (in the layout that save_pretrained gives,
the published one), tokenizer, chat template, image processor settings and generation
config.  Images of 40 to 100 pixels give 4 to 40 rows.  Weights are drawn wider than usual
(`initializer_range`), so that logits differ by much more than rounding and a wrong row changes
tokens.
"""

from __future__ import annotations

import importlib
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.engine import (
    tiny_deepseek,
    tiny_gemma,
    tiny_glm,
    tiny_idefics,
    tiny_internvl,
    tiny_mistral,
    tiny_paddle,
)
from tests.engine.tiny_tokens import plain_template

FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "llava_onevision",
    "qwen3",
    "llama",
    "kimi_k25",
    "qwen3_5",
    "qwen3_5_moe",
    "idefics3",
    "internvl",
    "mistral3",
    "glm4v",
    "glm_ocr",
    "glm4v_moe",
    "paddleocr_vl",
    "gemma4",
    "deepseek_ocr2",
)
VISION_FAMILIES = (*FAMILIES[:5], *FAMILIES[7:])
# Of families above, for tests marked long.
SECOND_SIZES = (
    *("internvl_moe", "ministral3", "glm46v", "paddleocr_vl_biased", "gemma4_moe"),
    *("deepseek_ocr2_wide", "mistral4"),
)
OF_GEMMA = ("gemma4", "gemma4_moe")
OF_FOUR_NORMS = ("glm4v", "glm46v", "glm_ocr")  # transformers' own layers are run
OF_GLM = ("glm4v", "glm46v", "glm_ocr", "glm4v_moe")
WITHOUT_VIDEOS = (
    *("llava_onevision", "kimi_k25", "idefics3", "smolvlm"),
    *("mistral3", "ministral3", "mistral4", "paddleocr_vl", "paddleocr_vl_biased"),
    *("deepseek_ocr2", "deepseek_ocr2_wide"),
)
WITH_STATES = ("qwen3_5", "qwen3_5_moe")
EMBEDDED = Path(__file__).parents[2] / "epd" / "tiny" / "checkpoint"

_IMAGE, _VIDEO, _VISION_START, _VISION_END = 262, 263, 259, 260
_RANGE = 0.15
_TEXT: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": _RANGE,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": None,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_TOKENS = {
    "image_token_id": _IMAGE,
    "video_token_id": _VIDEO,
    "vision_start_token_id": _VISION_START,
    "vision_end_token_id": _VISION_END,
}
_PIXELS = {"size": {"shortest_edge": 1024, "longest_edge": 16384}, "patch_size": 8, "merge_size": 2}


def _qwen2_vl() -> dict[str, Any]:
    vision = {
        "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2,
        "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "initializer_range": _RANGE,
    }  # fmt: skip
    text = _TEXT | {"rope_parameters": _MROPE}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": False} | _TOKENS


def _qwen2_5_vl() -> dict[str, Any]:
    vision = {
        "depth": 3, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2,
        "intermediate_size": 64, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "window_size": 32, "fullatt_block_indexes": [1], "initializer_range": _RANGE,
    }  # fmt: skip
    text = _TEXT | {"rope_parameters": _MROPE}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": False} | _TOKENS


def _qwen3_vl() -> dict[str, Any]:
    vision = {
        "depth": 3, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2,
        "intermediate_size": 64, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
        "initializer_range": _RANGE,
    }  # fmt: skip
    rope = _MROPE | {"mrope_interleaved": True}
    text = _TEXT | {"head_dim": 16, "rope_parameters": rope}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": True} | _TOKENS


def _qwen3_vl_moe() -> dict[str, Any]:
    config = _qwen3_vl() | {"tie_word_embeddings": False}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config["text_config"] = config["text_config"] | experts
    return config


def _qwen3_5() -> dict[str, Any]:
    config = _qwen3_vl()
    rope = config["text_config"]["rope_parameters"] | {"partial_rotary_factor": 0.5}
    rope["mrope_section"] = [2, 1, 1]
    config["text_config"] |= {
        "num_hidden_layers": 4, "head_dim": 16, "rope_parameters": rope,
        "layer_types": ["linear_attention", "full_attention"] * 2, "linear_conv_kernel_dim": 4,
        # A key of fewer numbers may have hardly any length: rounding decides where it points.
        "linear_key_head_dim": 16, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }  # fmt: skip
    del config["vision_config"]["deepstack_visual_indexes"]
    return config


def _qwen3_5_moe() -> dict[str, Any]:
    config = _qwen3_5() | {"tie_word_embeddings": False}
    config["text_config"] |= {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
    }  # fmt: skip
    return config


def _llava_onevision() -> dict[str, Any]:
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
        "vision_use_head": False, "initializer_range": _RANGE,
    }  # fmt: skip
    sides = (32, 64, 96)
    return {
        "text_config": _TEXT | {"model_type": "qwen2"},
        "vision_config": vision,
        "image_token_id": _IMAGE,
        "video_token_id": _VIDEO,
        "image_grid_pinpoints": [[height, width] for height in sides for width in sides],
        "vision_aspect_ratio": "anyres_max_4",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": False,
    }


def _kimi_k25() -> dict[str, Any]:
    """Latent attention, one dense layer, experts in groups; positions of 8 x 8 places."""
    text = {
        "model_type": "deepseek_v3", "hidden_size": 32, "intermediate_size": 48,
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12, "v_head_dim": 10, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "moe_intermediate_size": 24, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
    }  # fmt: skip
    vision = {
        "patch_size": 8, "pos_emb_height": 8, "pos_emb_width": 8, "num_attention_heads": 2,
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48,
    }  # fmt: skip
    return {
        "text_config": _TEXT | text,
        "vision_config": vision,
        "projection_hidden_size": 32,
        "tie_word_embeddings": False,
    } | _TOKENS


_IDEFICS3 = tiny_idefics.config(_IMAGE, _TEXT, _RANGE)
_INTERNVL = "InternVLConfig", "InternVLForConditionalGeneration"
_MISTRAL3 = "Mistral3Config", "Mistral3ForConditionalGeneration"
_OCR2 = "DeepseekOcr2Config", "DeepseekOcr2ForConditionalGeneration"
_PADDLE = "PaddleOCRVLConfig", "PaddleOCRVLForConditionalGeneration"
_GEMMA4 = "Gemma4Config", "Gemma4ForConditionalGeneration"
_CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VLConfig", "Qwen2VLForConditionalGeneration", _qwen2_vl()),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl()),
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration", _qwen3_vl()),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration", _qwen3_vl_moe()),
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", _qwen3_5()),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration", _qwen3_5_moe()),
    "llava_onevision": (
        "LlavaOnevisionConfig",
        "LlavaOnevisionForConditionalGeneration",
        _llava_onevision(),
    ),
    "kimi_k25": ("Kimi_K25Config", "Kimi_K25ForConditionalGeneration", _kimi_k25()),
    "idefics3": (
        "Idefics3Config",
        "Idefics3ForConditionalGeneration",
        tiny_idefics.config(_IMAGE, _TEXT, _RANGE),
    ),
    "smolvlm": (
        "SmolVLMConfig",
        "SmolVLMForConditionalGeneration",
        tiny_idefics.config(_IMAGE, _TEXT, _RANGE),
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _TEXT | {"head_dim": 16}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", dict(_TEXT)),
    "mistral3": (*_MISTRAL3, tiny_mistral.config(_IMAGE, _TEXT, _RANGE)),
    "ministral3": (*_MISTRAL3, tiny_mistral.config_ministral(_IMAGE, _TEXT, _RANGE)),
    "gemma4": (*_GEMMA4, tiny_gemma.config(_IMAGE, _TEXT, _RANGE)),
    "gemma4_moe": (*_GEMMA4, tiny_gemma.config_moe(_IMAGE, _TEXT, _RANGE)),
    "internvl": (*_INTERNVL, tiny_internvl.config(_IMAGE, _TEXT, _RANGE)),
    "internvl_moe": (*_INTERNVL, tiny_internvl.config_moe(_IMAGE, _TEXT, _RANGE)),
    "deepseek_ocr2": (*_OCR2, tiny_deepseek.config(_IMAGE, _TEXT, _RANGE)),
    "deepseek_ocr2_wide": (*_OCR2, tiny_deepseek.config_wide(_IMAGE, _TEXT, _RANGE)),
    "paddleocr_vl": (*_PADDLE, tiny_paddle.config(_IMAGE, _TEXT, _RANGE)),
    "paddleocr_vl_biased": (*_PADDLE, tiny_paddle.config_biased(_IMAGE, _TEXT, _RANGE)),
    **{
        family: (
            f"{name}Config",
            f"{name}ForConditionalGeneration",
            tiny_glm.config(family, _TEXT, _RANGE),
        )
        for family, name in zip(OF_GLM, ("Glm4v", "Glm46V", "GlmOcr", "Glm4vMoe"), strict=True)
    },
    "mistral4": (*_MISTRAL3, tiny_mistral.config_mistral4(_IMAGE, _TEXT, _RANGE)),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _kimi_k25()["text_config"]),
}


def is_known(family: str) -> bool:
    """To the transformers that is installed."""
    return family not in _CONFIGS or hasattr(
        importlib.import_module("transformers"), _CONFIGS[family][0]
    )


def make_model(
    family: str, directory: Path | str, text: dict[str, Any] | None = None, **save: Any
) -> Path:
    """Write a checkpoint of `family` into `directory` and return it.

    `text`: changes to the settings of the language model.  `save` goes to save_pretrained
    (`max_shard_size="100KB"` makes a sharded checkpoint).
    """
    import torch

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config_name, class_name, settings = _CONFIGS[family]
    if text:
        sees = "text_config" in settings
        settings = settings | ({"text_config": settings["text_config"] | text} if sees else text)
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, config_name)(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed((*FAMILIES, *_CONFIGS).index(family))
        model = getattr(transformers, class_name)(config)
        _shake(model)
        if family == "kimi_k25":  # transformers reads a placeholder that was said as token 0
            model.lm_head.weight.data[[_IMAGE, _VIDEO]] = 0
    model.generation_config.update(
        eos_token_id=[258, 256], pad_token_id=256, do_sample=False, bos_token_id=None
    )
    model.save_pretrained(directory, **save)
    if family == "qwen3_vl_moe":
        _transpose_experts(directory)
    _write_companions(family, directory)
    return directory


def _shake(model: Any) -> None:
    """Random biases and norms: a fresh model's zeros and ones would hide a dropped tensor."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.add_(torch.randn_like(buffer))
            if name.endswith(("layer_scalar", "std_bias", "std_scale")):
                buffer.copy_(1 + torch.randn_like(buffer) * 0.1)
            if name.endswith(("_min", "_max")):  # of products that are clipped
                buffer.fill_(-1.5 if name.endswith("_min") else 1.5)


def _transpose_experts(directory: Path) -> None:
    """Published checkpoints store experts as [experts, in, out]; save_pretrained does not."""
    from safetensors.torch import load_file, save_file

    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if ".mlp.experts." in name:
                tensors[name] = tensor.transpose(1, 2).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})


def _write_companions(family: str, directory: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(EMBEDDED / name, directory / name)
    if family == "llava_onevision":
        (directory / "chat_template.jinja").write_text(plain_template("<|image_pad|>\n"))
        processor = {
            "num_image_tokens": 16, "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_4",
        }  # fmt: skip
        (directory / "processor_config.json").write_text(json.dumps(processor))
        settings: dict[str, Any] = {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 32, "width": 32},
            "image_grid_pinpoints": _llava_onevision()["image_grid_pinpoints"],
        }
    elif family in ("idefics3", "smolvlm"):
        settings = tiny_idefics.write_companions(directory)
    elif family in ("internvl", "internvl_moe"):
        settings = tiny_internvl.write_companions(directory, _CONFIGS[family][2])
    elif family in ("mistral3", "ministral3", "mistral4"):
        settings = tiny_mistral.write_companions(directory)
    elif family in ("paddleocr_vl", "paddleocr_vl_biased"):
        settings = tiny_paddle.write_companions(directory)
    elif family.startswith("deepseek_ocr2"):
        settings = tiny_deepseek.write_companions(directory, _CONFIGS[family][2])
    elif family in OF_GLM:
        settings = tiny_glm.write_companions(directory, family)
    elif family in OF_GEMMA:
        settings = tiny_gemma.write_companions(directory)
    elif family == "kimi_k25":
        settings = {
            "image_processor_type": "Kimi_K25ImageProcessor", "patch_size": 8, "merge_size": 2,
            "max_patches": 256, "size": {"max_height": 40, "max_width": 40},
        }  # fmt: skip
    elif family in VISION_FAMILIES:
        settings = {"image_processor_type": "Qwen2VLImageProcessor"} | _PIXELS
        (directory / "video_preprocessor_config.json").write_text(json.dumps(_PIXELS, indent=1))
    else:
        return
    (directory / "preprocessor_config.json").write_text(json.dumps(settings, indent=1))


@cache
def cached_model(family: str) -> Path:
    """One directory per family and process; the operating system clears it with its temporary
    files.  Use the fixture `model_dir` where pytest is at hand."""
    return make_model(family, Path(tempfile.mkdtemp(prefix=f"tiny-{family}-")))
