"""What transformers itself answers: the golden tokens and logits of every comparison.

Independent of epd: own placeholder expansion (the Processor classes need torchvision), row counts
from the processor's grids or from the model's own features.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

Messages = Sequence[dict[str, Any]]


@cache
def reference_model(model_dir: Path) -> Any:
    """The whole model in fp32 with transformers' own loader."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = json.loads((model_dir / "config.json").read_text())
    model_class = getattr(transformers, config["architectures"][0])
    return model_class.from_pretrained(model_dir, dtype=torch.float32).eval()


@cache
def reference_processor(model_dir: Path) -> Any:
    """Hugging Face's PIL image processor with the directory's settings."""
    settings = json.loads((model_dir / "preprocessor_config.json").read_text())
    if settings["image_processor_type"].startswith("Llava"):
        from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
            LlavaOnevisionImageProcessorPil as Processor,
        )
    else:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil as Processor,
        )
    return Processor(**settings)


@cache
def tokenizer(model_dir: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def render(model_dir: Path, messages: Messages) -> list[int]:
    """Chat messages to token ids, one placeholder per image, as transformers renders them."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((model_dir / "chat_template.jinja").read_text())
    text = template.render(messages=messages, add_generation_prompt=True)
    return list(tokenizer(model_dir).encode(text, add_special_tokens=False).ids)


def image_token(model_dir: Path) -> int:
    config = json.loads((model_dir / "config.json").read_text())
    return int(config.get("image_token_id", config.get("image_token_index", -1)))


def reference_inputs(
    model_dir: Path, prompt: Messages | Sequence[int], images: Sequence[Any]
) -> dict[str, Any]:
    """Keyword arguments of the model: placeholders expanded, pixels, grids."""
    chat = bool(prompt) and isinstance(prompt[0], dict)
    ids = render(model_dir, prompt) if chat else list(prompt)  # type: ignore[arg-type]
    if not images:
        return {"input_ids": torch.tensor([ids])}
    features = dict(reference_processor(model_dir)(images=list(images), return_tensors="pt"))
    model = reference_model(model_dir)
    if "image_grid_thw" in features:
        merge = model.config.vision_config.spatial_merge_size
        counts = (features["image_grid_thw"].prod(-1) // merge**2).tolist()
    else:
        features.pop("batch_num_images", None)
        with torch.inference_mode():
            output = model.model.get_image_features(**features, return_dict=True)
        counts = [len(rows) for rows in output.pooler_output]
    token = image_token(model_dir)
    expanded: list[int] = []
    remaining = iter(counts)
    for token_id in ids:
        expanded += [token] * next(remaining) if token_id == token else [token_id]
    input_ids = torch.tensor([expanded])
    inputs = {"input_ids": input_ids} | features
    if "image_grid_thw" in features:
        inputs["mm_token_type_ids"] = (input_ids == token).int()
    return inputs


def reference_generate(
    model_dir: Path,
    prompt: Messages | Sequence[int],
    images: Sequence[Any] = (),
    max_new_tokens: int = 16,
    **generate: Any,
) -> list[int]:
    """Greedy output tokens of `transformers.generate` in fp32, the end token included.

    `prompt`: chat messages, or token ids with one placeholder per image.  `images`: PIL, in order.
    """
    inputs = reference_inputs(model_dir, prompt, images)
    model = reference_model(model_dir)
    model.model.rope_deltas = None
    with torch.inference_mode():
        output = model.generate(
            **inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=256, **generate
        )
    return list(output[0, inputs["input_ids"].shape[1] :].tolist())


def reference_logits(
    model_dir: Path, prompt: Messages | Sequence[int], images: Sequence[Any] = ()
) -> torch.Tensor:
    """fp32 logits behind the last prompt token, `[vocabulary]`."""
    inputs = reference_inputs(model_dir, prompt, images)
    model = reference_model(model_dir)
    model.model.rope_deltas = None
    with torch.inference_mode():
        return model(**inputs).logits[0, -1].float()
