"""Is this a model directory that can be served?  Answered without torch, before any process starts.

What is checked here is what a person gets wrong: the path, a half-copied directory, a family that
is not supported. Shapes of tensors are the engine's business, at loading.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from epd.cli.hub import find_model, is_hub_name
from epd.engine.checkpoint import ModelError, read_config, read_preprocessor, weight_files

VISION_FAMILIES = (
    "kimi_k25",
    "llava_onevision",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
)
TEXT_FAMILIES = ("llama", "qwen3")
BUNDLED_NAME = "epd-tiny"


def bundled_model() -> Path:
    """The tiny model that comes with the package."""
    from epd.tiny import CHECKPOINT

    return CHECKPOINT


def served_name(model_dir: str) -> str:
    """In the API, if nothing else is asked for; empty: like the directory."""
    if not model_dir:
        return BUNDLED_NAME
    return model_dir if is_hub_name(model_dir) else ""


def check_model(
    model_dir: str, roles: Collection[str], with_gateway: bool, *, weights: bool = True
) -> Path:
    """The absolute directory of a model that these roles can serve.

    `model_dir`: a directory, ORG/NAME of the Hugging Face hub, or "" for the bundled one.

    `weights`: they must be there too.

    Raises ModelError: one sentence with the file and the remedy.
    """
    needs_weights = bool(roles) and weights
    directory = find_model(model_dir, weights=needs_weights) if model_dir else bundled_model()
    config = read_config(directory)
    family = str(config["model_type"])
    if family not in (*VISION_FAMILIES, *TEXT_FAMILIES):
        raise ModelError(
            f"{directory} is a {family!r} model; supported are "
            f"{', '.join(sorted((*VISION_FAMILIES, *TEXT_FAMILIES)))}"
        )
    if "encode" in roles and len(roles) == 1 and family in TEXT_FAMILIES:
        raise ModelError(
            f"{directory} is a text-only {family!r} model; it has nothing to encode: start it with "
            "prefill and decode"
        )
    if family in VISION_FAMILIES and not read_preprocessor(directory):
        raise ModelError(
            f"{directory} has no preprocessor_config.json, and images cannot be prepared without "
            "it: copy it from the published checkpoint"
        )
    if needs_weights:
        weight_files(directory)
    if with_gateway and not (directory / "tokenizer.json").is_file():
        remedy = "copy it from the published checkpoint"
        if (directory / "tiktoken.model").is_file():
            remedy = (
                "make it of tiktoken.model, with save_pretrained of what transformers' "
                "AutoTokenizer.from_pretrained gives for this directory"
            )
        raise ModelError(
            f"{directory} has no tokenizer.json; the gateway reads only the fast tokenizer's file: "
            f"{remedy}"
        )
    return directory
