"""The layout of PaddleOCR-VL, as `published.py` has those of the other families.

*Recorded.*  Number of all parameters: scripts that check it of a checkpoint; the names below give
it exactly.  Fields of config.json: a test of another engine has them.  Bounds of images: those of a
program that prepares them as PaddleOCR-VL 1.5 does.  Names: programs that convert its tensors.
"""

from __future__ import annotations

from typing import Any

from tests.model_files.published import (
    ATTENTION,
    HALVES,
    MLP,
    NORMS,
    Layout,
    siglip,
    stack,
    text_of,
    with_biases,
)

_VISION = "visual.vision_model."
_HEAD = {
    **with_biases(
        f"{_VISION}head.",
        {"attention.out_proj": "tower tower", "layernorm": "tower"}
        | {"mlp.fc1": "tower_ffn tower", "mlp.fc2": "tower tower_ffn"},
    ),
    f"{_VISION}head.attention.in_proj_weight": "3*tower tower",
    f"{_VISION}head.attention.in_proj_bias": "3*tower",
    f"{_VISION}head.probe": "1 1 tower",
    f"{_VISION}embeddings.packing_position_embedding.weight": "32768 tower",
}
PADDLE = Layout(
    {
        **stack("model.", ATTENTION, NORMS, MLP),
        **siglip(_VISION),
        **_HEAD,
        **with_biases(
            "mlp_AR.",
            {"pre_norm": "tower", "linear_1": "4*tower 4*tower", "linear_2": "hidden 4*tower"},
        ),
    },
    {
        "model_type": "paddleocr_vl",
        "architectures": ["PaddleOCRVLForConditionalGeneration"],
        **text_of(1024, 3072, 18, 16, 2, head_dim=128, vocab_size=103424),
        "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "mrope_section": [16, 24, 24], "rope_type": "default", "type": "default",
        },
        "rope_theta": 500000, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_bias": False, "use_cache": False,
        "image_token_id": 100295, "video_token_id": 101307, "vision_start_token_id": 101305,
        "vision_end_token_id": 101306,
        "vision_config": {
            "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "image_size": 384,
            "intermediate_size": 4304, "layer_norm_eps": 1e-06, "model_type": "paddleocr_vl",
            "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 27,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "tokens_per_second": 2,
        },
    },
    files={
        "preprocessor_config.json": {
            "do_rescale": True, "do_resize": True, "do_normalize": True, "do_convert_rgb": True,
            "min_pixels": 112896, "max_pixels": 1003520, "patch_size": 14, "merge_size": 2,
            "temporal_patch_size": 1, "resample": 3, **HALVES,
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "processor_class": "PaddleOCRVLProcessor",
        }
    },
    others=("tokenizer.json", "tokenizer_config.json"),
    template="tokenizer_config.json",
)  # fmt: skip
CHECKPOINTS: dict[str, tuple[Any, ...]] = {  # sizes, tensors, numbers, source
    "PaddlePaddle/PaddleOCR-VL": ({}, 620, 958588736, "scripts that check a checkpoint"),
}
