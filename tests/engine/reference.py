"""What transformers itself answers: the golden tokens and logits of every comparison.

Independent of epd: own placeholder expansion (the Processor classes need torchvision), row counts
from the processor's grids or from the model's own features.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.engine import reference_gemma, reference_glm
from tests.engine.hf_video import kimi_image_processor, video_processor

Messages = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class ReferenceVideo:
    """All frames of a video, uint8 `[frames, height, width, 3]`, and how they are sampled."""

    frames: Any
    fps: float
    sampling: dict[str, Any] = field(default_factory=dict)  # of `sample_frames`; empty: none


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
    if settings["image_processor_type"].startswith("Kimi"):
        return kimi_image_processor(settings)
    if settings["image_processor_type"].startswith("GotOcr2"):  # as the processor of prompts asks
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
            GotOcr2ImageProcessorPil,
        )

        return GotOcr2ImageProcessorPil(**settings | {"crop_to_patches": True})
    if settings["image_processor_type"].startswith("Glm4"):
        from transformers.models.glm4v.image_processing_pil_glm4v import (
            Glm4vImageProcessorPil as Processor,
        )
    elif settings["image_processor_type"].startswith("DeepseekOcr2"):
        from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
            DeepseekOcr2ImageProcessorPil as Processor,
        )
    elif settings["image_processor_type"].startswith("PaddleOCRVL"):
        from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
            PaddleOCRVLImageProcessorPil as Processor,
        )
    elif settings["image_processor_type"].startswith("Idefics3"):
        from transformers.models.idefics3.image_processing_pil_idefics3 import (
            Idefics3ImageProcessorPil as Processor,
        )
    elif settings["image_processor_type"].startswith("Pixtral"):
        from transformers.models.pixtral.image_processing_pil_pixtral import (
            PixtralImageProcessorPil as Processor,
        )

        settings["patch_size"] *= 2  # as PixtralProcessor does, by the merge
    elif settings["image_processor_type"].startswith("Gemma4"):
        from transformers.models.gemma4.image_processing_pil_gemma4 import (
            Gemma4ImageProcessorPil as Processor,
        )
    elif settings["image_processor_type"].startswith("Llava"):
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


def render(
    model_dir: Path, messages: Messages, videos: Sequence[str] = (), images: Sequence[str] = ()
) -> list[int]:
    """Chat messages to token ids, one placeholder per image, as transformers renders them.

    `videos`, `images`: what takes the place of each video's placeholder, and of each image's.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((model_dir / "chat_template.jinja").read_text())
    text = template.render(messages=messages, add_generation_prompt=True)
    place = placeholder(model_dir) if images else "\0"
    for image in images:
        before, _, behind = text.partition(place)
        text = before + image.replace(place, "\0") + behind
    text = text.replace("\0", place)
    first, *pieces = text.split(video_place(model_dir))
    assert len(pieces) == len(videos)
    text = first + "".join(video + piece for video, piece in zip(videos, pieces, strict=True))
    return list(tokenizer(model_dir).encode(text, add_special_tokens=False).ids)


def video_features(
    model_dir: Path, videos: Sequence[ReferenceVideo]
) -> tuple[dict[str, Any], list[str]]:
    """Keyword arguments of the model, and the text of each video, by transformers' own code."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.video_utils import VideoMetadata

    model_type = json.loads((model_dir / "config.json").read_text())["model_type"]
    processor = video_processor(model_dir)
    asked = reference_gemma.without_rate if model_type == "gemma4" else dict
    each: list[Any] = []
    for video in videos:
        total = len(video.frames)
        metadata = VideoMetadata(
            total_num_frames=total,
            fps=video.fps,
            frames_indices=list(range(total)),
            duration=total / video.fps,  # as those of transformers that read a film
        )
        each.append(
            processor(
                videos=[video.frames],
                video_metadata=[metadata],
                do_sample_frames=bool(video.sampling),
                return_metadata=True,
                return_tensors="pt",
                **asked(video.sampling),
            )
        )
    if model_type == "gemma4":
        return reference_gemma.of_videos(each)
    if model_type == "internvl":
        return _as_tiles(model_dir, each)
    features = {
        name: torch.cat([one[name] for one in each])
        for name in ("pixel_values_videos", "video_grid_thw")
    }
    found = [one["video_metadata"][0] for one in each]
    if model_type == "qwen2_5_vl":
        pair = processor.temporal_patch_size
        features["second_per_grid_ts"] = torch.tensor([pair / m.sampled_fps for m in found])
    inputs = {"video_grid_thw": features["video_grid_thw"], "video_metadata": found}
    if model_type.startswith("glm"):
        return features, reference_glm.texts(processor, placeholder(model_dir), inputs)
    if not model_type.startswith("qwen3"):
        counts = (features["video_grid_thw"].prod(-1) // processor.merge_size**2).tolist()
        return features, ["<|video_pad|>" * count for count in counts]
    writer = SimpleNamespace(
        video_processor=processor,
        vision_start_token="<|vision_start|>",
        video_token="<|video_pad|>",
        vision_end_token="<|vision_end|>",
        _calculate_timestamps=lambda *a: Qwen3VLProcessor._calculate_timestamps(None, *a),
    )
    texts = [
        Qwen3VLProcessor.replace_video_token(writer, inputs, i)  # type: ignore[arg-type]
        for i in range(len(videos))
    ]
    return features, texts


def _as_tiles(model_dir: Path, each: Sequence[Any]) -> tuple[dict[str, Any], list[str]]:
    """Frames of each video, and its text, by transformers' own code."""
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    writer = _internvl(model_dir)
    texts = [InternVLProcessor.replace_video_token(writer, one, 0) for one in each]
    return {"videos": [one["pixel_values_videos"][0] for one in each]}, texts


def _internvl(model_dir: Path) -> Any:
    config = json.loads((model_dir / "config.json").read_text())
    return SimpleNamespace(
        start_image_token="<img>",
        end_image_token="</img>",
        image_token=placeholder(model_dir),
        image_seq_length=config["image_seq_length"],
    )


def tile_texts(model_dir: Path, images: Sequence[Any]) -> list[str]:
    """Of each image with the names of its tiles, by transformers' own code; else nothing."""
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    config = json.loads((model_dir / "config.json").read_text())
    if config["model_type"] == "internvl":
        writer = _internvl(model_dir)
        found = reference_processor(model_dir)(images=list(images))
        return [InternVLProcessor.replace_image_token(writer, found, i) for i in range(len(images))]
    if config["model_type"] == "mistral3":
        return _line_texts(model_dir, images)
    if config["model_type"] == "gemma4":
        found = reference_processor(model_dir)(images=list(images))
        return reference_gemma.image_texts(found, len(images))
    if "scale_factor" not in config:
        return []
    vision = config["vision_config"]
    side = vision["image_size"] // vision["patch_size"]
    writer = SimpleNamespace(
        fake_image_token="<fake_token_around_image>",
        global_image_tag="<global-img>",
        image_token="<image>",
        image_seq_len=side**2 // config["scale_factor"] ** 2,
    )
    found = reference_processor(model_dir)(images=[list(images)], return_row_col_info=True)
    return [Idefics3Processor.replace_image_token(writer, found, i) for i in range(len(images))]


def _line_texts(model_dir: Path, images: Sequence[Any]) -> list[str]:
    """As PixtralProcessor, whose module needs torchvision."""
    processor = reference_processor(model_dir)
    sizes, side = processor(images=list(images))["image_sizes"], processor.patch_size
    return [
        "[IMG_BREAK]".join(["[IMG]" * (width // side)] * (height // side)) + "[IMG_END]"
        for height, width in sizes
    ]


def placeholder(model_dir: Path) -> str:
    """The text of the token that stands for an image."""
    return tokenizer(model_dir).id_to_token(image_token(model_dir)) or ""


def video_place(model_dir: Path) -> str:
    """The same of a video."""
    config = json.loads((model_dir / "config.json").read_text())
    if config["model_type"] == "internvl":
        return "<video>"
    token_id = config.get("video_token_id")
    found = None if token_id is None else tokenizer(model_dir).id_to_token(token_id)
    return found or "<|video_pad|>"


def image_token(model_dir: Path) -> int:
    config = json.loads((model_dir / "config.json").read_text())
    return int(config.get("image_token_id", config.get("image_token_index", -1)))


def reference_inputs(
    model_dir: Path,
    prompt: Messages | Sequence[int],
    images: Sequence[Any],
    videos: Sequence[ReferenceVideo] = (),
) -> dict[str, Any]:
    """Keyword arguments of the model: placeholders expanded, pixels, grids."""
    chat = bool(prompt) and isinstance(prompt[0], dict)
    shown, texts = video_features(model_dir, videos) if videos else ({}, [])
    tiles = tile_texts(model_dir, images) if images else []
    ids = render(model_dir, prompt, texts, tiles) if chat else list(prompt)  # type: ignore[arg-type]
    if not images and not videos:
        return {"input_ids": torch.tensor([ids])}
    if "videos" in shown:  # among the images, as the prompt has them
        tiles_of = reference_processor(model_dir)
        held = {
            "image": (tiles_of(images=[i], return_tensors="pt")["pixel_values"] for i in images),
            "video": iter(shown["videos"]),
        }
        parts = [part["type"] for message in prompt for part in message["content"]]  # type: ignore[index, union-attr]
        pixels = torch.cat([next(held[kind]) for kind in parts if kind in held])
        return {"input_ids": torch.tensor([ids]), "pixel_values": pixels}
    if tiles:
        asked = reference_processor(model_dir)(images=images[:1])
        flat = not {"num_patches", "image_sizes", "image_position_ids"}.isdisjoint(asked)
        nested = list(images) if flat else [list(images)]
        found = reference_processor(model_dir)(images=nested, return_tensors="pt")
        found.pop("num_patches", None)
        if found.pop("num_soft_tokens_per_image", None) is None:
            return {"input_ids": torch.tensor([ids]), **found}
        shown |= found
    if not {"video_position_ids", "image_position_ids"}.isdisjoint(shown):
        return reference_gemma.inputs(shown, ids, tokenizer(model_dir))
    features, counts = _image_features(model_dir, images) if images else ({}, [])
    token = image_token(model_dir)
    if videos and "<|begin_of_image|>" in texts[0]:
        rows = [placeholder(model_dir) * count for count in counts]
        ids = render(model_dir, prompt, texts, rows)  # type: ignore[arg-type]
        return reference_glm.inputs(prompt, features | shown, ids, token)  # type: ignore[arg-type]
    expanded: list[int] = []
    remaining = iter(counts)
    for token_id in ids:
        expanded += [token] * next(remaining) if token_id == token else [token_id]
    input_ids = torch.tensor([expanded])
    inputs = {"input_ids": input_ids} | features | shown
    if hasattr(reference_model(model_dir).model, "get_rope_index"):
        kinds = (input_ids == token).int()
        if videos:
            config = json.loads((model_dir / "config.json").read_text())
            kinds += 2 * (input_ids == config["video_token_id"]).int()
        inputs["mm_token_type_ids"] = kinds
    return inputs


def _image_features(model_dir: Path, images: Sequence[Any]) -> tuple[dict[str, Any], list[int]]:
    """Pixels and grids, and the number of rows of each image."""
    features = dict(reference_processor(model_dir)(images=list(images), return_tensors="pt"))
    model = reference_model(model_dir)
    if "image_grid_thw" in features:
        vision = model.config.vision_config
        merge = getattr(vision, "spatial_merge_size", 2)
        return features, (features["image_grid_thw"].prod(-1) // merge**2).tolist()
    features.pop("batch_num_images", None)
    with torch.inference_mode():
        output = model.model.get_image_features(**features, return_dict=True)
    return features, [len(rows) for rows in output.pooler_output]


def reference_generate(
    model_dir: Path,
    prompt: Messages | Sequence[int],
    images: Sequence[Any] = (),
    max_new_tokens: int = 16,
    videos: Sequence[ReferenceVideo] = (),
    **generate: Any,
) -> list[int]:
    """Greedy output tokens of `transformers.generate` in fp32, the end token included.

    `prompt`: chat messages, or token ids with one placeholder per image.  `images`: PIL, in order.
    """

    def asked() -> list[int]:
        inputs = reference_inputs(model_dir, prompt, images, videos)
        model = reference_model(model_dir)
        model.model.rope_deltas = None
        with torch.inference_mode():
            output = model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=256,
                **generate,
            )
        return list(output[0, inputs["input_ids"].shape[1] :].tolist())

    question = _question(model_dir, prompt, images, videos)
    return list(_once(("generate", *question, max_new_tokens, repr(generate)), asked))


def reference_logits(
    model_dir: Path,
    prompt: Messages | Sequence[int],
    images: Sequence[Any] = (),
    videos: Sequence[ReferenceVideo] = (),
) -> torch.Tensor:
    """fp32 logits behind the last prompt token, `[vocabulary]`."""

    def asked() -> torch.Tensor:
        inputs = reference_inputs(model_dir, prompt, images, videos)
        model = reference_model(model_dir)
        model.model.rope_deltas = None
        with torch.inference_mode():
            return model(**inputs).logits[0, -1].float()

    return _once(("logits", *_question(model_dir, prompt, images, videos)), asked).clone()


_KNOWN: dict[Any, Any] = {}


def _once(key: Any, ask: Callable[[], Any]) -> Any:
    """Several files ask transformers the same."""
    if key not in _KNOWN:
        _KNOWN[key] = ask()
    return _KNOWN[key]


def _question(
    model_dir: Path,
    prompt: Messages | Sequence[int],
    images: Sequence[Any],
    videos: Sequence[ReferenceVideo],
) -> tuple[Any, ...]:
    """All that an answer depends on."""
    pixels = [(image.mode, image.size, image.tobytes()) for image in images]
    films = [(repr(v.sampling), v.fps, v.frames.shape, v.frames.tobytes()) for v in videos]
    return model_dir, repr(prompt), tuple(pixels), tuple(films)
