"""The side that is right: transformers' own tokenizer, processors and model, of one directory.

This verb alone runs transformers' models.  Pictures are prepared by its Pillow processors where a
family has them, so that torchvision is needed only for families that have no others.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

import torch

from epd.cli.verify.findings import LeftOut
from epd.cli.verify.questions import Asked, Body, Foreign, pictures_of
from epd.engine.weights.loading import DTYPES
from epd.model_files.checkpoint import read_config, read_optional

logger = logging.getLogger(__name__)
_NOT_OF_MODELS = frozenset(
    "attention_mask batch_num_images mm_token_type_ids num_patches num_soft_tokens_per_image rows "
    "cols".split()
)
_MODELS = ("AutoModelForImageTextToText", "AutoModelForCausalLM")


class Theirs:
    """`directory`: of the files; `sees`: whether its model takes pictures."""

    def __init__(self, directory: Path, device: str, dtype: str, *, sees: bool) -> None:
        self.directory, self.device, self.sees = directory, device, sees
        self.dtype = DTYPES[dtype]

    @cached_property
    def tokenizer(self) -> Foreign:
        """Of tokenizer.json as it is."""
        from transformers import PreTrainedTokenizerFast

        found = PreTrainedTokenizerFast.from_pretrained(self.directory)
        if found.chat_template is None:  # processors alone read this
            said = read_optional(self.directory / "chat_template.json")
            found.chat_template = said.get("chat_template")
        return found

    @cached_property
    def auto_tokenizer(self) -> Foreign:
        """Of the class that tokenizer_config.json names: some of these take the vocabulary and
        merges of tokenizer.json, but build a pre-tokenizer of their own."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.directory)

    @cached_property
    def image_processor(self) -> Foreign:
        from transformers import AutoImageProcessor

        for backend in ({"backend": "pil"}, {}):  # some families have none for Pillow
            with suppress(ImportError, ValueError):
                found = AutoImageProcessor.from_pretrained(self.directory, **backend)
                said = read_optional(self.directory / "processor_config.json")
                if "spatial_merge_size" in said:  # by which the processor of texts asks for more
                    found.patch_size = said["patch_size"] * said["spatial_merge_size"]
                return found
        raise LeftOut(
            f"transformers prepares pictures of {read_config(self.directory)['model_type']} "
            "only with torchvision: pip install torchvision"
        )

    @cached_property
    def processor(self) -> Foreign:
        """Of texts with pictures; its processor of videos, which needs torchvision, is left out."""
        config, of_family = self._config, self._of_family
        names = sys.modules[of_family.__module__].__dict__
        if not names.get("num2words", True):  # which it needs for videos alone
            names["num2words"] = str
        unchecked = {"check_argument_for_proper_class": lambda *_: None}
        plain = type(of_family.__name__, (of_family,), unchecked)
        said = read_optional(self.directory / "processor_config.json")
        settings = {name: v for name, v in said.items() if not isinstance(v, dict)}
        settings.pop("processor_class", None)
        parts = dict.fromkeys(of_family.get_attributes())
        parts |= {"image_processor": self.image_processor, "tokenizer": self.tokenizer}
        found = plain(**parts, **settings)
        token_ids = (getattr(config, f"image_token_{kind}", None) for kind in ("id", "index"))
        found.image_token_id = next(filter(None, token_ids))
        found.image_token = self.tokenizer.convert_ids_to_tokens(found.image_token_id)
        return found

    @cached_property
    def _config(self) -> Foreign:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.directory)

    @property
    def _of_family(self) -> Foreign:
        """The class of processors, or that which the files name where it has none of its own."""
        import transformers
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

        named = read_optional(self.directory / "preprocessor_config.json").get("processor_class")
        kind: Foreign = PROCESSOR_MAPPING.get(type(self._config), None)
        kind = kind or getattr(transformers, str(named))
        return getattr(_processing(kind.__module__), kind.__name__)

    # --- text -------------------------------------------------------------------------------------

    def text(self, body: Body) -> str:
        """The prompt as the template writes it; empty: it refuses the conversation."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                [self._message(message) for message in body["messages"]],
                tools=body.get("tools"), tokenize=False, add_generation_prompt=True,
            )  # fmt: skip
        except Exception as error:  # whatever a template raises
            logger.debug("the template refuses it: %s", error)
            return ""
        return text

    def _message(self, message: Body) -> Body:
        """As templates take it: of a model with pictures in parts, and arguments as an object."""
        content = message["content"]
        if isinstance(content, list):
            content = [part if part["type"] == "text" else {"type": "image"} for part in content]
        elif self.sees and message["role"] != "tool":
            content = [{"type": "text", "text": content}] if content else []
        said = [call["function"] for call in message.get("tool_calls", ())]
        calls = [
            {"type": "function", "function": one | {"arguments": json.loads(one["arguments"])}}
            for one in said
        ]
        return message | {"content": content} | ({"tool_calls": calls} if calls else {})

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def inputs(self, body: Body) -> Body:
        """Keyword arguments of the model: placeholders expanded, pixels, grids."""
        text = self.text(body)
        images = pictures_of(body)
        if not images:
            return {"input_ids": torch.tensor([self.ids(text)])}
        said = {"add_special_tokens": False}
        found = self.processor(text=[text], images=images, return_tensors="pt", text_kwargs=said)
        inputs = {name: v for name, v in found.items() if name not in _NOT_OF_MODELS}
        if "mm_token_type_ids" in inspect.signature(self.model.forward).parameters:
            ids = inputs["input_ids"]
            inputs["mm_token_type_ids"] = (ids == self.processor.image_token_id).int()
        return inputs

    def pixels(self, image: Foreign) -> Body:
        """With the arguments that the processor of prompts gives to that of pictures."""
        asked = {**getattr(self._of_family, "images_kwargs", {}), "return_tensors": "pt"}
        found = self.image_processor(images=[image], **asked)
        return {name: v for name, v in found.items() if name not in _NOT_OF_MODELS}

    # --- the model --------------------------------------------------------------------------------

    @cached_property
    def model(self) -> Foreign:
        import transformers
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()  # layers that --layers leaves out are no news
        config = read_config(self.directory)
        names = [*(config.get("architectures") or ()), _MODELS[not self.sees]]
        name = next(name for name in names if hasattr(transformers, name))
        kind = getattr(transformers, name)
        model = kind.from_pretrained(self.directory, dtype=self.dtype)
        return model.to(self.device).eval().requires_grad_(False)

    @contextmanager
    def in_twice_the_bits(self) -> Iterator[None]:
        """The same weights, and what is computed of them with hardly any rounding."""
        dtype, experts = self.dtype, self.model.get_experts_implementation()
        self._convert(torch.float64 if dtype is torch.float32 else torch.float32)
        self.model.set_experts_implementation("eager")  # the only one that takes float64
        try:
            yield
        finally:
            self._convert(dtype)
            self.model.set_experts_implementation(experts)

    def _convert(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)

    def numbers(self, asked: Asked) -> torch.Tensor:
        """Rows of a picture, with those of further levels side by side, or logits behind a prompt,
        `[vocabulary]`."""
        with torch.inference_mode():
            if isinstance(asked, dict):
                logits: torch.Tensor = self.model(**self._placed(self.inputs(asked))).logits
                return logits[0, -1].cpu()
            pixels = self._placed(self.pixels(asked))
            output = self.model.model.get_image_features(**pixels, return_dict=True)
        levels = (output.pooler_output, *(getattr(output, "deepstack_features", None) or ()))
        return torch.cat([_joined(level) for level in levels], dim=-1).cpu()

    def answer(
        self, body: Body, num_tokens: int, ends: Sequence[int]
    ) -> tuple[list[int], torch.Tensor]:
        """A greedy answer, and the logits of which each of its tokens was chosen."""
        inputs = self._placed(self.inputs(body))
        with torch.inference_mode():
            output = self.model.generate(
                **inputs,
                attention_mask=torch.ones_like(inputs["input_ids"]),
                max_new_tokens=num_tokens,
                do_sample=False,
                repetition_penalty=1.0,
                eos_token_id=list(ends) or None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        said = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return said, torch.cat(output.logits).float().cpu()

    def _placed(self, inputs: Body) -> Body:
        """On the device; and the model forgets where tokens of the prompt before stood."""
        if hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None
        return {
            name: v.to(self.device, self.dtype if v.is_floating_point() else v.dtype)
            if isinstance(v, torch.Tensor) else v
            for name, v in inputs.items()
        }  # fmt: skip


def _processing(name: str) -> Foreign:
    """The module of a processor of texts: for its import torchvision's form of the processor of
    images may give way to Pillow's."""
    with suppress(ImportError):
        return importlib.import_module(name)
    package, _, family = name.rpartition(".processing_")
    of_images = f"{package}.image_processing_{family}"
    sys.modules[of_images] = importlib.import_module(f"{package}.image_processing_pil_{family}")
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules[of_images]


def _joined(rows: Foreign) -> torch.Tensor:
    found = torch.cat(list(rows)) if isinstance(rows, list | tuple) else rows
    return found.reshape(-1, found.shape[-1])
