"""The side that is right: transformers' own tokenizer, processors and model, of one directory.

This verb alone runs transformers' models.  Pictures are prepared by its Pillow processors where a
family has them, so that torchvision is needed only for families that have no others.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from functools import cached_property
from inspect import signature
from pathlib import Path

import torch

from epd.cli.verify.questions import Body, Foreign, pictures_of
from epd.engine.weights.loading import DTYPES
from epd.model_files.checkpoint import read_config, read_optional

logger = logging.getLogger(__name__)
_MODELS = ("AutoModelForImageTextToText", "AutoModelForCausalLM")


class LeftOut(Exception):
    """This side has no answer here to compare with; the text has the reason and the remedy."""


class Theirs:
    """`directory`: of the files; `sees`: whether its model takes pictures."""

    def __init__(self, directory: Path, device: str, dtype: str, *, sees: bool) -> None:
        self.directory, self.device, self.dtype, self.sees = directory, device, dtype, sees

    @cached_property
    def tokenizer(self) -> Foreign:
        """Of tokenizer.json as it is.

        AutoTokenizer takes the class that tokenizer_config.json names; some of these build another
        tokenizer of the same vocabulary.
        """
        from transformers import PreTrainedTokenizerFast

        found = PreTrainedTokenizerFast.from_pretrained(self.directory)
        if found.chat_template is None:  # processors alone read these
            plain = self.directory / "chat_template.jinja"
            said = read_optional(self.directory / "chat_template.json").get("chat_template")
            found.chat_template = plain.read_text() if plain.exists() else said
        return found

    @cached_property
    def auto_tokenizer(self) -> Foreign:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.directory)

    @cached_property
    def image_processor(self) -> Foreign:
        from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(self.directory, backend="pil")
        except (ImportError, ValueError):
            pass
        try:  # a family without one for Pillow
            return AutoImageProcessor.from_pretrained(self.directory)
        except (ImportError, ValueError):
            raise LeftOut(
                f"transformers prepares pictures of {read_config(self.directory)['model_type']} "
                "only with torchvision: pip install torchvision"
            ) from None

    @cached_property
    def processor(self) -> Foreign:
        """Of texts with pictures; its processor of videos, which needs torchvision, is left out."""
        from transformers import AutoConfig
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

        config = AutoConfig.from_pretrained(self.directory)
        of_family: Foreign = PROCESSOR_MAPPING[type(config)]
        names = vars(sys.modules[of_family.__module__])
        if not names.get("num2words", True):  # which it needs for videos alone
            names["num2words"] = str
        unchecked = {"check_argument_for_proper_class": lambda *_: None}
        plain = type(of_family.__name__, (of_family,), unchecked)
        said = read_optional(self.directory / "processor_config.json")
        settings = {name: v for name, v in said.items() if not isinstance(v, dict)}
        settings.pop("processor_class", None)
        parts = {"image_processor": self.image_processor, "tokenizer": self.tokenizer}
        if "video_processor" in of_family.get_attributes():
            parts["video_processor"] = None
        for name in signature(of_family.__init__).parameters:
            if name not in settings and getattr(config, name, None) is not None:
                settings[name] = getattr(config, name)
        found = plain(**parts, **settings)
        token_id = next(
            getattr(config, name) for name in ("image_token_id", "image_token_index")
            if getattr(config, name, None) is not None
        )  # fmt: skip
        found.image_token_id = token_id
        found.image_token = self.tokenizer.convert_ids_to_tokens(token_id)
        if getattr(found, "num_image_tokens", 0) is None:  # said by the tower alone
            vision = config.vision_config
            found.num_image_tokens = (vision.image_size // vision.patch_size) ** 2
        return found

    # --- text -------------------------------------------------------------------------------------

    def texts(self, body: Body) -> list[str]:
        """The prompt as the template writes it, of contents that are strings and of parts.

        Templates take one or the other; what drops a text is left out.  Empty: it refuses them.
        """
        found = []
        for as_parts in (False, True):
            messages = [_message(message, as_parts=as_parts) for message in body["messages"]]
            try:
                text = self.tokenizer.apply_chat_template(
                    messages, tools=body.get("tools"), tokenize=False, add_generation_prompt=True
                )
            except Exception as error:  # whatever a template raises
                logger.debug("the template refuses it: %s", error)
                continue
            if all(word in text for word in _words(body["messages"])) and text not in found:
                found.append(text)
        return found

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def inputs(self, body: Body) -> Body:
        """Keyword arguments of the model: placeholders expanded, pixels, grids."""
        images = pictures_of(body["messages"])
        text = self.texts(body)[-1]
        if not images:
            return {"input_ids": torch.tensor([self.ids(text)])}
        found = dict(
            self.processor(
                text=[text],
                images=images,
                return_tensors="pt",
                text_kwargs={"add_special_tokens": False},
            )
        )
        found.pop("attention_mask", None)
        found.pop("batch_num_images", None)
        if hasattr(self.model.model, "get_rope_index"):
            found["mm_token_type_ids"] = (found["input_ids"] == self.processor.image_token_id).int()
        else:
            found.pop("mm_token_type_ids", None)
        return found

    def pixels(self, image: Foreign) -> Body:
        found = dict(self.image_processor(images=[image], return_tensors="pt"))
        found.pop("batch_num_images", None)
        return found

    # --- the model --------------------------------------------------------------------------------

    @cached_property
    def model(self) -> Foreign:
        import transformers
        from transformers.utils import logging

        logging.disable_progress_bar()
        config = read_config(self.directory)
        names = [*(config.get("architectures") or ()), _MODELS[not self.sees]]
        name = next(name for name in names if hasattr(transformers, name))
        kind = getattr(transformers, name)
        model = kind.from_pretrained(self.directory, dtype=DTYPES[self.dtype])
        return model.to(self.device).eval().requires_grad_(False)

    def rows(self, image: Foreign) -> torch.Tensor:
        """What its tower makes of a picture; further levels side by side."""
        pixels = self._placed(self.pixels(image))
        pixels = {name: v for name, v in pixels.items() if name not in ("rows", "cols")}
        with torch.inference_mode():
            output = self.model.model.get_image_features(**pixels, return_dict=True)
        rows = output.pooler_output
        whole = _joined(rows)
        levels = [_joined(level) for level in getattr(output, "deepstack_features", None) or ()]
        return torch.cat([whole, *levels], dim=-1).float().cpu()

    def logits(self, inputs: Body) -> torch.Tensor:
        """fp32, behind the last token, `[vocabulary]`."""
        self._forget()
        with torch.inference_mode():
            return self.model(**self._placed(inputs)).logits[0, -1].float().cpu()

    def answer(
        self, inputs: Body, num_tokens: int, ends: Sequence[int]
    ) -> tuple[list[int], torch.Tensor]:
        """A greedy answer, and the logits of which each of its tokens was chosen."""
        self._forget()
        with torch.inference_mode():
            output = self.model.generate(
                **self._placed(inputs),
                attention_mask=torch.ones_like(inputs["input_ids"]).to(self.device),
                max_new_tokens=num_tokens,
                do_sample=False,
                repetition_penalty=1.0,
                eos_token_id=list(ends) or None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        said = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return said, torch.stack([logits[0].float().cpu() for logits in output.logits])

    def _forget(self) -> None:
        """Positions of the prompt before."""
        if hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None

    def _placed(self, inputs: Body) -> Body:
        dtype = DTYPES[self.dtype]
        return {
            name: v.to(self.device, dtype if v.is_floating_point() else v.dtype)
            if isinstance(v, torch.Tensor) else v
            for name, v in inputs.items()
        }  # fmt: skip


def _joined(rows: Foreign) -> torch.Tensor:
    found = torch.cat(list(rows)) if isinstance(rows, list | tuple) else rows
    return found.reshape(-1, found.shape[-1])


def _message(message: Body, *, as_parts: bool) -> Body:
    """As templates take it."""
    content = message["content"]
    if isinstance(content, list):
        content = [{"type": "image"} if "number" in part else part for part in content]
    elif as_parts and message["role"] != "tool":
        content = [{"type": "text", "text": content}] if content else []
    calls = [
        call | {"function": call["function"] | {"arguments": _arguments(call)}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "content": content} | ({"tool_calls": calls} if calls else {})


def _arguments(call: Body) -> Foreign:
    """An object, as transformers' documentation has it."""
    return json.loads(call["function"]["arguments"])


def _words(messages: Sequence[Body]) -> list[str]:
    found = []
    for message in messages:
        content = message["content"]
        parts = content if isinstance(content, list) else [{"text": content}]
        found += [part["text"].strip() for part in parts if part.get("text")]
    return found
