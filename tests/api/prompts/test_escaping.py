"""Under `escape` no text of a client becomes a special token, wherever it stands."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from epd.api.asked.template_flags import TemplateFlags
from epd.api.http.errors import ApiError
from epd.api.prompts.chat import ChatRenderer
from epd.api.prompts.prepare import Preparer
from epd.config import GatewayConfig
from epd.tiny import CHECKPOINT
from tests.api.asked.test_reasoning import QWEN3
from tests.api.asked.test_tools import HERMES
from tests.api.prompts.test_prepare import part, png, user

# Text is written next to text, names between the halves of marks, content is cleaned.
JOINS = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{{ t.function.description }}"
    "{% for key, p in t.function.parameters.properties.items() %}<|{{ key }}|>{{ p.type }}"
    "{% if p.type == 'string' %}*{% endif %}{% endfor %}{% endfor %}{{ style }}\n"
    "{% for m in messages %}<|im_start|>{{ m.role }}<|{{ m.name }}|>"
    "{% if m.content is string %}{{ m.content | replace('(-)', '') }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c | tojson }}</tool_call>{% endfor %}<|im_end|>"
    "\n{% endfor %}<|im_start|>assistant\n<tool_response>"
)
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|image_pad|>",
    "[INST]",
    "im_sep",
    " <s>",
)
WORDS = ("<tool_call>", "</tool_call>", "<tool_response>", "</think>", "   ")  # added, not special
MARKS = (*SPECIAL, *WORDS)
NUM_TALKS = int(os.environ.get("EPD_TALKS", "12"))


def byte_level() -> Tokenizer:
    """Trained on the text of its own marks, so that ordinary tokens hold pieces of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*MARKS, "user im_end assistant"] * 9, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """Like Llama 2: a first word gets a space, and what has no piece becomes bytes."""
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "<", "|", ">", "im", "▁user"]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


VOCABULARIES: dict[str, Callable[[], Tokenizer]] = {"bytes": byte_level, "spaces": metaspace}
TEMPLATES = {"bundled": None, "hermes": HERMES, "qwen3": QWEN3, "joins": JOINS}


@cache
def model(vocabulary: str, template: str) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="escaping-"))
    source = TEMPLATES[template] or (CHECKPOINT / "chat_template.jinja").read_text()
    (directory / "chat_template.jinja").write_text(source)
    config: dict[str, Any] = {"model_type": "qwen3_vl"}
    if vocabulary == "bundled":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(CHECKPOINT / name, directory / name)
        if template == "bundled":
            config["image_token_id"] = 262
    else:
        tokenizer = VOCABULARIES[vocabulary]()
        tokenizer.add_special_tokens(
            [AddedToken(mark, rstrip=mark == "[INST]", normalized=False) for mark in SPECIAL]
        )
        tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in WORDS])
        tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@cache
def pair(vocabulary: str, template: str) -> tuple[ChatRenderer, ChatRenderer]:
    """One that escapes, and one that keeps."""
    directory = model(vocabulary, template)
    return ChatRenderer(directory, escapes=True), ChatRenderer(directory)


def ids_of(renderer: ChatRenderer, talk: Any) -> list[int]:
    return renderer.encode(renderer.render(*talk), add_special_tokens=False)


def marks_in(renderer: ChatRenderer, ids: list[int], template: str) -> list[str]:
    """The special tokens among the ids, and the others that the template writes."""
    source = TEMPLATES[template] or (CHECKPOINT / "chat_template.jinja").read_text()
    added = renderer.tokenizer.get_added_tokens_decoder()
    marks = {
        i for i, t in added.items() if t.special or (t.content.strip() and t.content in source)
    }
    return [added[i].content for i in ids if i in marks]


class Client:
    """Writes a text into every place that takes one, out of pieces of marks and other pieces."""

    def __init__(self, seed: int, pieces: tuple[str, ...] = ()) -> None:
        self._random = random.Random(seed)
        self._pieces = pieces

    def text(self) -> str:
        return "".join(self._piece() for _ in range(self._random.randrange(4)))

    def _piece(self) -> str:
        if self._pieces:
            return self._random.choice(self._pieces)
        mark = self._random.choice(MARKS)
        at = self._random.randrange(1, len(mark))
        return self._random.choice(
            (mark, mark[:at], mark[at:], mark[1:-1], mark[2:-2], "a", " ", "\n", "<", "(-)", "☃")
        )

    def value(self) -> Any:
        way = self._random.randrange(3)
        if way == 0:
            return self.text()
        return [self.text()] if way == 1 else {self.text(): self.text()}

    def parts(self) -> list[Any]:
        return [{"type": "text", "text": self.text()} for _ in range(self._random.randint(1, 3))]

    def talk(self) -> Any:
        """Messages, tools and the value of a variable."""
        function = {"name": self.text(), "arguments": {self.text(): self.value()}}
        call = {"id": self.text(), "type": "function", "function": function}
        messages = [
            {"role": "system", "content": self.text(), "name": self.text()},
            {"role": "user", "content": self.text(), "name": self.text()},
            {"role": "user", "content": self.parts()},
            {"role": "assistant", "content": self.text(), "reasoning_content": self.text(),
             "tool_calls": [call]},
            {"role": "tool", "content": self.text(), "tool_call_id": self.text()},
            {"role": "assistant", "content": self.parts()},
        ]  # fmt: skip
        kinds = [self._random.choice(["string", "object", self.text()]) for _ in range(2)]
        properties = {self.text(): {"type": kind} for kind in kinds}
        parameters = {"type": "object", "properties": properties}
        shown = {"name": self.text(), "description": self.text(), "parameters": parameters}
        return messages, [{"type": "function", "function": shown}], self.text()


WHERE = [(v, t) for v in ("bundled", *VOCABULARIES) for t in sorted(TEMPLATES)]


def spoken(template: str, talk: Any) -> Any:
    """What this template takes of it."""
    messages, tools, style = talk
    takes_tools = template in ("bundled", "hermes", "joins")
    flags = TemplateFlags({"style": style} if template == "joins" else {})
    return messages, tools if takes_tools else (), flags


def harmless(value: Any, key: str = "") -> Any:
    """The same with texts that hold no piece of a mark; keys stay apart from each other."""
    if isinstance(value, str):
        is_fixed = key in ("role", "type") and value in (
            "system", "user", "assistant", "tool", "function", "text", "string", "object"
        )  # fmt: skip
        return value if is_fixed or not value else "é"
    if isinstance(value, list):
        return [harmless(one) for one in value]
    fixed = (
        "role content type text name id function arguments parameters description properties "
        "reasoning_content tool_calls tool_call_id"
    ).split()
    return {k if k in fixed else f"é{i}": harmless(v, k) for i, (k, v) in enumerate(value.items())}


@pytest.mark.parametrize("where", WHERE, ids="-".join)
def test_marks_are_the_template_s_and_no_text_is_lost(where: tuple[str, str]) -> None:
    escaping, keeping = pair(*where)
    for seed in range(NUM_TALKS):
        messages, tools, flags = spoken(where[1], Client(seed).talk())
        ids = ids_of(escaping, (messages, tools, flags))
        style = {k: harmless(v) for k, v in flags.variables.items()}
        calm = (harmless(messages), harmless(list(tools)), TemplateFlags(style))
        own = marks_in(keeping, ids_of(keeping, calm), where[1])
        assert marks_in(keeping, ids, where[1]) == own, seed
        if where[0] != "spaces" and where[1] != "joins":  # which drops what it finds in texts
            shown = keeping.tokenizer.decode(ids, skip_special_tokens=False)
            assert shown == keeping.render(messages, tools, flags), seed


@pytest.mark.parametrize("where", WHERE, ids="-".join)
def test_other_texts_have_the_tokens_of_keep(where: tuple[str, str]) -> None:
    escaping, keeping = pair(*where)
    for seed in range(NUM_TALKS // 4):
        told = spoken(where[1], Client(seed, ("a", " ", "\n", "☃", "user", "im", "<")).talk())
        assert ids_of(escaping, told) == ids_of(keeping, told), seed


@pytest.mark.parametrize("vocabulary", ["bundled", *VOCABULARIES])
def test_text_around_a_mark_has_the_tokens_of_keep(vocabulary: str) -> None:
    """Only the mark itself is spelled."""
    escaping, keeping = pair(vocabulary, "bundled")
    talk: Any = ([{"role": "user", "content": "user im<|im_end|> user a"}], (), TemplateFlags())
    kept, ids = ids_of(keeping, talk), ids_of(escaping, talk)
    end = keeping.tokenizer.token_to_id("<|im_end|>")
    at = kept.index(end)
    assert ids[:at] == kept[:at] and ids[len(ids) - len(kept) + at + 1 :] == kept[at + 1 :]
    spelled = ids[at : len(ids) - len(kept) + at + 1]
    assert end not in spelled
    assert keeping.tokenizer.decode(ids[:at]) + "<|im_end|>" == keeping.tokenizer.decode(
        [*ids[:at], *spelled]
    )


async def test_a_placeholder_in_a_text_is_no_image_and_prompts_of_completions_are_raw() -> None:
    keep, escape = (
        Preparer(GatewayConfig(model_dir=str(CHECKPOINT), special_tokens_in_content=how))  # type: ignore[arg-type]
        for how in ("keep", "escape")
    )
    messages = user({"type": "text", "text": "<|image_pad|>?"}, part(png(64, 64)))
    with pytest.raises(ApiError, match="2 image placeholders for 1 images"):
        await keep.chat(messages)
    prompt = await escape.chat(messages)
    assert len(prompt.items) == 1 and prompt.token_ids.count(262) == prompt.items[0].num_rows
    assert "<|image_pad|>?" in await escape.text([i for i in prompt.token_ids if i != 262])
    raw = "hi<|im_end|>"
    assert (await escape.completion(raw)).token_ids == (await keep.completion(raw)).token_ids
    assert (await escape.completion(raw)).token_ids[-1] == 258
    for preparer in (keep, escape):
        await preparer.close()
