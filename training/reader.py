"""Asks a checkpoint through transformers on this machine: the reference for every other path.

Only the image half of a processor is used. The ready-made Processor classes need torchvision, which
has no build for CPU torch.  They only add: render the chat template, repeat each image placeholder
once per merged row, mark those tokens.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer
from transformers import Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from epd.tiny import CHECKPOINT
from training.tasks import Message, Sample
from training.vocabulary import IMAGE_PAD

Inputs = dict[str, torch.Tensor]

IMAGE_PLACEHOLDER = "<|image_pad|>"
MAX_NEW_TOKENS = 128


class Reader:
    """A loaded checkpoint that answers questions greedily, one at a time."""

    def __init__(
        self,
        checkpoint: Path = CHECKPOINT,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        _hush(transformers.logging)
        self.device = device
        self.dtype = dtype
        model: Any = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=dtype)
        self.model = model.to(device).eval()
        self.tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self.image_processor = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)
        template = (checkpoint / "chat_template.jinja").read_text()
        self._render = jinja2.Environment(autoescape=False).from_string(template).render
        merge = json.loads((checkpoint / "preprocessor_config.json").read_text())["merge_size"]
        self._patches_per_row = merge**2

    def answer(self, sample: Sample) -> str:
        """The model's answer to a sample."""
        return self.ask(sample.images, sample.messages)

    @torch.inference_mode()
    def ask(self, images: Sequence[Image.Image], messages: Sequence[Message]) -> str:
        """The greedy answer; `images` in the order in which the messages mention them."""
        inputs = self.inputs(images, messages)
        output = self.model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        new_tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
        return str(self.tokenizer.decode(new_tokens, skip_special_tokens=True))

    def inputs(self, images: Sequence[Image.Image], messages: Sequence[Message]) -> Inputs:
        """What the model's forward takes: input_ids [1, T], pixel_values [patches, 384], ..."""
        prompt = self._render(messages=messages, add_generation_prompt=True)
        pictures: dict[str, Any] = {}
        if images:
            pictures = dict(self.image_processor(list(images), return_tensors="pt"))
            pictures["pixel_values"] = pictures["pixel_values"].to(self.dtype)
            prompt = self._expand(prompt, pictures["image_grid_thw"])
        ids = torch.tensor([self.tokenizer.encode(prompt).ids])
        tensors = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": torch.eq(ids, IMAGE_PAD).int(),
            **pictures,
        }
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def _expand(self, prompt: str, grids: torch.Tensor) -> str:
        """Each placeholder repeated once per row that the encoder gives for its picture."""
        first, *rest = prompt.split(IMAGE_PLACEHOLDER)
        rows = (grids.prod(-1) // self._patches_per_row).tolist()
        pieces = zip(rows, rest, strict=True)
        return first + "".join(IMAGE_PLACEHOLDER * count + piece for count, piece in pieces)


def _hush(logging: Any) -> None:
    """No progress bars and no advice while loading."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@functools.cache
def committed_reader() -> Reader:
    """The committed checkpoint in fp32, loaded once per process."""
    return Reader()
