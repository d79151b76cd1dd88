"""Every published checkpoint that is supported, by name: its sizes, and how many numbers it has.

The layouts, and where all this comes from, are in `published.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.model_files import published as record
from tests.model_files.published import Layout, text_of
from tests.model_files.published_gemma import CHECKPOINTS as OF_GEMMA
from tests.model_files.published_gemma import GEMMA4, REDUCED
from tests.model_files.published_glm import CHECKPOINTS as OF_GLM
from tests.model_files.published_glm import LAYOUTS as GLM
from tests.model_files.published_internvl import CHECKPOINTS as OF_INTERNVL
from tests.model_files.published_internvl import INTERNVL
from tests.model_files.published_kimi import DEEPSEEK, KIMI
from tests.model_files.published_mistral import CHECKPOINTS as OF_MISTRAL
from tests.model_files.published_mistral import MISTRAL3
from tests.model_files.published_ocr2 import CHECKPOINTS as OF_OCR2
from tests.model_files.published_ocr2 import OCR2
from tests.model_files.published_paddle import CHECKPOINTS as OF_PADDLE
from tests.model_files.published_paddle import PADDLE
from tests.model_files.published_qwen3_5 import QWEN3_5, QWEN3_5_MOE
from tests.model_files.published_smolvlm import IDEFICS3, SMOLVLM

LAYOUTS = {**record.LAYOUTS, "kimi_k25": KIMI, "qwen3_5": QWEN3_5, "qwen3_5_moe": QWEN3_5_MOE}
LAYOUTS |= {"idefics3": IDEFICS3, "smolvlm": SMOLVLM, "internvl": INTERNVL}
LAYOUTS |= {"gemma4": GEMMA4, "mistral3": MISTRAL3, "paddleocr_vl": PADDLE, **GLM}
LAYOUTS |= {"deepseek_ocr2": OCR2, "deepseek_v3": DEEPSEEK}


@dataclass(frozen=True)
class Published:
    """`config`: what differs from the layout's.  `source` of `num_parameters`; empty: derived."""

    family: str
    config: Mapping[str, Any]
    num_tensors: int
    num_parameters: int
    source: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)  # pattern to shape, as in a layout

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.family]


def _qwen2(vocab: int, tie: bool, *text: int) -> dict[str, Any]:
    vision = {"hidden_size": text[0]}
    return text_of(*text, vocab_size=vocab, tie_word_embeddings=tie) | {"vision_config": vision}


def _qwen2_5(tower_ffn: int, vocab: int, tie: bool, *text: int) -> dict[str, Any]:
    vision = {"intermediate_size": tower_ffn, "out_hidden_size": text[0]}
    return text_of(*text, vocab_size=vocab, tie_word_embeddings=tie) | {"vision_config": vision}


def _qwen3_vl(tie: bool, *text: int, **more: Any) -> dict[str, Any]:
    small = text[0] < 4096 and not more
    tower, ffn, depth = (1024, 4096, 24) if small else (1152, 4304, 27)
    levels = [5, 11, 17] if small else [8, 16, 24]
    return {
        "tie_word_embeddings": tie,
        "text_config": text_of(*text, tie_word_embeddings=tie, **more),
        "vision_config": {
            "hidden_size": tower, "intermediate_size": ffn, "depth": depth,
            "out_hidden_size": text[0], "deepstack_visual_indexes": levels,
        },
    }  # fmt: skip


def _qwen3_5(tie: bool, value_heads: int, *text: int, **experts: int) -> dict[str, Any]:
    types = (["linear_attention"] * 3 + ["full_attention"]) * (text[2] // 4)
    more = {"layer_types": types, "linear_num_value_heads": value_heads}
    return {
        "tie_word_embeddings": tie,
        "text_config": text_of(*text, tie_word_embeddings=tie, **more, **experts),
        "vision_config": {"out_hidden_size": text[0]},
    }


def _llava(vocab: int, tie: bool, *text: int) -> dict[str, Any]:
    return {
        "tie_word_embeddings": False,  # the text part alone says it
        "text_config": text_of(*text, vocab_size=vocab, tie_word_embeddings=tie),
    }


def _smolvlm(*text: int) -> dict[str, Any]:
    found = text_of(*text)
    if text[2] == 32:  # the default
        del found["num_hidden_layers"]
    return {"text_config": found}


def _llama(vocab: int, tie: bool, *text: int, **more: Any) -> dict[str, Any]:
    return text_of(*text, vocab_size=vocab, tie_word_embeddings=tie, **more)


_LLAMA3_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip
_INV_FREQ = {"model.layers.{layers}.self_attn.rotary_emb.inv_freq": "half_head"}
_INDEX, _TABLE = (
    "its index, as scripts on GitHub check it",
    "tables of models in public repositories",
)
_KINDS = "its numbers by kind in public scripts, without scales"
_CARD = "sizes: its model card; classes: transformers' documentation, as Qwen3.5's"
PUBLISHED = {
    "Qwen/Qwen2-VL-2B-Instruct": Published(
        "qwen2_vl", _qwen2(151936, True, 1536, 8960, 28, 12, 2), 729, 2208985600, _TABLE
    ),
    "Qwen/Qwen2-VL-7B-Instruct": Published(
        "qwen2_vl", _qwen2(152064, False, 3584, 18944, 28, 28, 4), 730, 8291375616,
        "total_size of AIN's index, in float32",
    ),
    "Qwen/Qwen2-VL-72B-Instruct": Published(
        "qwen2_vl", _qwen2(152064, False, 8192, 29568, 80, 64, 8), 1354, 73405560320, _TABLE
    ),
    "Qwen/Qwen2.5-VL-3B-Instruct": Published(
        "qwen2_5_vl", _qwen2_5(3420, 151936, True, 2048, 11008, 36, 16, 2), 824, 3754622976, _TABLE
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": Published(
        "qwen2_5_vl", _qwen2_5(3420, 152064, False, 3584, 18944, 28, 28, 4),
        729, 8292166656, _INDEX,
    ),
    "Qwen/Qwen2.5-VL-32B-Instruct": Published(
        "qwen2_5_vl", _qwen2_5(3456, 152064, False, 5120, 27648, 64, 40, 8),
        1161, 33452718336, _INDEX,
    ),
    "Qwen/Qwen2.5-VL-72B-Instruct": Published(
        "qwen2_5_vl", _qwen2_5(3456, 152064, False, 8192, 29568, 80, 64, 8), 1353, 73410777344
    ),
    "Qwen/Qwen3-VL-2B-Instruct": Published(
        "qwen3_vl", _qwen3_vl(True, 2048, 6144, 28, 16, 8), 625, 2127532032, _INDEX
    ),
    "Qwen/Qwen3-VL-4B-Instruct": Published(
        "qwen3_vl", _qwen3_vl(True, 2560, 9728, 36, 32, 8), 713, 4437815808, _INDEX
    ),
    "Qwen/Qwen3-VL-8B-Instruct": Published(
        "qwen3_vl", _qwen3_vl(False, 4096, 12288, 36, 32, 8), 750, 8767123696, _INDEX
    ),
    "Qwen/Qwen3-VL-32B-Instruct": Published(
        "qwen3_vl", _qwen3_vl(False, 5120, 25600, 64, 64, 8), 1058, 33357390064, _INDEX
    ),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": Published(
        "qwen3_vl_moe",
        _qwen3_vl(False, 2048, 6144, 48, 32, 4, moe_intermediate_size=768),
        882, 31070754032, _INDEX,
    ),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": Published(
        "qwen3_vl_moe",
        _qwen3_vl(False, 4096, 12288, 94, 64, 4, moe_intermediate_size=1536),
        1388, 235670022896, _INDEX,
    ),
    "Qwen/Qwen3.5-9B": Published(
        "qwen3_5", _qwen3_5(False, 32, 4096, 12288, 32, 16, 4), 775, 9653104368
    ),
    "Qwen/Qwen3.5-27B": Published(
        "qwen3_5", _qwen3_5(False, 48, 5120, 17408, 64, 24, 4), 1199, 27781427952
    ),
    "Qwen/Qwen3.5-35B-A3B": Published(
        "qwen3_5_moe",
        _qwen3_5(
            False, 32, 2048, 0, 40, 16, 2,
            moe_intermediate_size=512, shared_expert_intermediate_size=512,
        ),
        1811, 35951822704, "number of tensors: issue 1251 of sglang-jax",
    ),
    "Qwen/Qwen3.6-27B": Published(
        "qwen3_5", _qwen3_5(False, 48, 5120, 17408, 64, 24, 4), 1199, 27781427952, _CARD
    ),
    "Qwen/Qwen3.8-27B": Published(
        "qwen3_5", _qwen3_5(False, 48, 5120, 17408, 64, 24, 4), 1199, 27781427952,
        "class and sizes: pull request 176 of LoongForge, which converted all its files",
    ),
    "Qwen/Qwen3.6-35B-A3B": Published(
        "qwen3_5_moe",
        _qwen3_5(
            False, 32, 2048, 0, 40, 16, 2,
            moe_intermediate_size=512, shared_expert_intermediate_size=512,
        ),
        1811, 35951822704, _CARD,
    ),
    "llava-hf/llava-onevision-qwen2-0.5b-ov-hf": Published(
        "llava_onevision", _llava(152000, True, 896, 4864, 24, 14, 2), 716, 893675552
    ),
    "llava-hf/llava-onevision-qwen2-7b-ov-hf": Published(
        "llava_onevision", _llava(152128, False, 3584, 18944, 28, 28, 4), 765, 8030807584
    ),
    "HuggingFaceTB/SmolVLM-256M-Instruct": Published(
        "idefics3", _smolvlm(576, 1536, 30, 9, 3), 471, 256484928, "jobs that count its numbers"
    ),
    "HuggingFaceTB/SmolVLM-500M-Instruct": Published(
        "idefics3", _smolvlm(960, 2560, 32, 15, 5), 489, 507482304
    ),
    "HuggingFaceTB/SmolVLM2-256M-Video-Instruct": Published(
        "smolvlm", _smolvlm(576, 1536, 30, 9, 3), 471, 256484928
    ),
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": Published(
        "smolvlm", _smolvlm(960, 2560, 32, 15, 5), 489, 507482304
    ),
    "Qwen/Qwen3-0.6B": Published(
        "qwen3", _llama(151936, True, 1024, 3072, 28, 16, 8), 310, 596049920
    ),
    "Qwen/Qwen3-8B": Published(
        "qwen3", _llama(151936, False, 4096, 12288, 36, 32, 8), 399, 8190735360, _TABLE
    ),
    "Qwen/Qwen3-32B": Published(
        "qwen3", _llama(151936, False, 5120, 25600, 64, 64, 8), 707, 32762123264
    ),
    "meta-llama/Llama-2-7b-chat-hf": Published(
        "llama", _llama(32000, False, 4096, 11008, 32, 32, 32, rope_theta=10000.0),
        323, 6738417664, extra=_INV_FREQ,
    ),
    "meta-llama/Meta-Llama-3-8B-Instruct": Published(
        "llama", _llama(128256, False, 4096, 14336, 32, 32, 8), 291, 8030261248
    ),
    "meta-llama/Llama-3.2-1B-Instruct": Published(
        "llama",
        _llama(
            128256, True, 2048, 8192, 16, 32, 8,
            head_dim=64, rope_scaling=_LLAMA3_ROPE | {"factor": 32.0},
        ),
        146, 1235814400,
    ),
    "meta-llama/Llama-3.3-70B-Instruct": Published(
        "llama", _llama(128256, False, 8192, 28672, 80, 64, 8, rope_scaling=_LLAMA3_ROPE),
        723, 70553706496,
    ),
    "deepseek-ai/DeepSeek-V3": Published("deepseek_v3", {}, 46183, 684489845504, _KINDS),
    "deepseek-ai/DeepSeek-R1": Published("deepseek_v3", {}, 46183, 684489845504, _KINDS),
    "moonshotai/Kimi-K2.5": Published("kimi_k25", {}, 70310, 1026879376368),
    **{name: Published("internvl", *row) for name, row in OF_INTERNVL.items()},
    **{name: Published("mistral3", *row) for name, row in OF_MISTRAL.items()},
    **{name: Published(*row) for name, row in OF_GLM.items()},
    **{name: Published("deepseek_ocr2", *row) for name, row in OF_OCR2.items()},
    **{name: Published("paddleocr_vl", *row) for name, row in OF_PADDLE.items()},
    **{name: Published("gemma4", *row) for name, row in OF_GEMMA.items()},
}  # fmt: skip
_REDUCED_VISION = {
    "depth": 3, "embed_dim": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 8,
    "deepstack_visual_indexes": [0, 2], "fullatt_block_indexes": [1], "window_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "hidden_size": 32,
    "out_hidden_size": 64, "num_position_embeddings": 64,
}  # fmt: skip
_REDUCED_TEXT = text_of(64, 96, 2, 4, 2, vocab_size=272, head_dim=16, num_experts=4)
_REDUCED_TEXT |= {"moe_intermediate_size": 48, "max_position_embeddings": 2048}
_REDUCED_TEXT |= {"bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 256}
_REDUCED_TEXT |= {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
_REDUCED_TOKENS = {
    "vision_start_token_id": 259, "vision_end_token_id": 260, "image_token_id": 262,
    "video_token_id": 263, "image_token_index": 262, "video_token_index": 263,
    "media_placeholder_token_id": 262, "bos_token_id": 257, "eos_token_id": 258,
}  # fmt: skip


def config_of(published: Published) -> dict[str, Any]:
    """config.json."""
    return _merged(published.layout.config, published.config)


def reduced(published: Published) -> dict[str, Any]:
    """The same config.json in small, with the tokens of the bundled tokenizer."""
    config = config_of(published)
    vision = config.get("vision_config", {})
    vision |= {name: size for name, size in _REDUCED_VISION.items() if name in vision}
    if published.family == "qwen2_vl":
        vision["hidden_size"] = 64  # that of the language model
    text = config.get("text_config", config)
    text |= {name: size for name, size in _REDUCED_TEXT.items() if name in text}
    if published.family == "kimi_k25":
        text["num_key_value_heads"] = text["num_attention_heads"]
        config["projection_hidden_size"] = vision["hidden_size"]
    if published.family == "deepseek_v3":
        text |= {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1}
        text["first_k_dense_replace"] = 1
    if "partial_rotary_factor" in (text.get("rope_parameters") or ()):
        text["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    if "mrope_section" in (text.get("rope_scaling") or ()):
        section = [2, 1, 1] if text.get("partial_rotary_factor") == 0.5 else [2, 3, 3]
        text["rope_scaling"] = text["rope_scaling"] | {"mrope_section": section}
    if "image_grid_pinpoints" in config:
        config["image_grid_pinpoints"] = [[32, 64], [64, 32], [64, 64]]
    config |= {name: i for name, i in _REDUCED_TOKENS.items() if name in config}
    return _merged(config, REDUCED) if published.family == "gemma4" else config


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    found = {k: dict(v) if isinstance(v, Mapping) else v for k, v in base.items()}
    for key, value in changes.items():
        inner = found.get(key)
        found[key] = _merged(inner, value) if isinstance(inner, dict) else value
    return found
