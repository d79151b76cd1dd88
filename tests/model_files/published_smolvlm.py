"""The layouts of SmolVLM and SmolVLM2, as `published.py` has those of the other families.

*Recorded.*  config.json: of DATA-AI_Smol256M-Instruct, a copy of SmolVLM-256M-Instruct's, of
ColSmolVLM-Instruct-500M-base and of SmolVLM2-500M-Video-Instruct; older releases leave out what is
transformers' default.  Names and shapes: tables of SmolVLA, which holds a SmolVLM2-500M.

*Derived.*  What a hub's page does not show of these files: from transformers' defaults.
"""

from __future__ import annotations

from typing import Any

from tests.model_files.published import ATTENTION, HALVES, MLP, NORMS, Layout, siglip, stack

_TEXT = {
    "model_type": "llama", "architectures": ["VLlama3ForCausalLM"], "head_dim": 64,
    "is_llama_config": True, "max_position_embeddings": 8192, "pad_token_id": 2,
    "pixel_shuffle_factor": 4, "qk_layer_norms": False, "rms_norm_eps": 1e-05,
    "rope_interleaved": False, "rope_theta": 100000, "use_resampler": False, "vocab_size": 49280,
}  # fmt: skip
_VISION = {
    "hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512},
    "num_attention_heads": 12, "patch_size": 16, "size": {"longest_edge": 2048},
    "tie_word_embeddings": False,
}  # fmt: skip
_IMAGES = {
    "do_convert_rgb": True, "do_image_splitting": True, "do_normalize": True, "do_pad": True,
    "do_rescale": True, "do_resize": True, **HALVES, "max_image_size": {"longest_edge": 512},
    "resample": 1, "rescale_factor": 0.00392156862745098, "size": {"longest_edge": 2048},
}  # fmt: skip


def _layout(model_type: str, name: str, **images: Any) -> Layout:
    return Layout(
        {
            **stack("model.text_model.", ATTENTION, NORMS, MLP),
            **siglip("model.vision_model."),
            "model.connector.modality_projection.proj.weight": "hidden 16*tower",
        },
        {
            "model_type": model_type, "architectures": [f"{name}ForConditionalGeneration"],
            "image_token_id": 49190, "pad_token_id": 128002, "scale_factor": 4,
            "text_config": _TEXT, "tie_word_embeddings": False, "vocab_size": 49280,
            "vision_config": {"model_type": model_type, **_VISION},
        },
        files={
            "preprocessor_config.json": {
                **_IMAGES, "image_processor_type": f"{name}ImageProcessor",
                "processor_class": f"{name}Processor", **images,
            },
            "processor_config.json": {"image_seq_len": 64, "processor_class": f"{name}Processor"},
        },
        others=(
            *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"),
            *("added_tokens.json", "special_tokens_map.json"),
        ),
    )  # fmt: skip


IDEFICS3 = _layout("idefics3", "Idefics3")
SMOLVLM = _layout(
    "smolvlm",
    "SmolVLM",
    video_sampling={"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}},
)
