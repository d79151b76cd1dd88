"""End tokens come from every file that may name one (F75): whoever disagrees, answers stop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from epd.api.openai.validation import read_chat
from epd.api.prompts.chat import ChatRenderer
from epd.config import Limits
from epd.model_files.checkpoint import read_eos_token_ids
from epd.tiny import CHECKPOINT
from tests.api.fakes import FakePreparer

LAST, TURN, OTHER = 256, 258, 261  # <|endoftext|>, <|im_end|>, <|vision_pad|>
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}END{% endfor %}"
SOURCES = ("generation", "config", "text", "settings", "older settings", "template")


def checkpoint(directory: Path, template: str, **ends: Any) -> Path:
    """The bundled model's files but for its weights; each source names what `ends` has for it."""
    model = directory / "model"
    shutil.copytree(CHECKPOINT, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    config["eos_token_id"] = ends.get("config")
    config["text_config"]["eos_token_id"] = ends.get("text")
    (model / "config.json").write_text(json.dumps(config))
    generation = {"eos_token_id": ends.get("generation")}
    (model / "generation_config.json").write_text(json.dumps(generation))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    if "settings" in ends:
        settings["eos_token"] = ends["settings"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    older = {"eos_token": ends["older"]} if "older" in ends else {}
    (model / "special_tokens_map.json").write_text(json.dumps(older))
    (model / "chat_template.jinja").write_text(template)
    return model


@pytest.mark.parametrize("source", SOURCES)
def test_one_source_alone_names_the_end_of_a_turn(source: str, tmp_path: Path) -> None:
    """All others name the end of a text, or none."""
    ends: dict[str, Any] = {"generation": [LAST], "config": LAST, "text": LAST}
    template = TEMPLATE.replace("END", "<|im_end|>\n" if source == "template" else "\n")
    if source in ends:
        ends[source] = [TURN] if source == "generation" else TURN
    elif source == "older settings":
        ends["older"] = {"content": "<|im_end|>"}
    ends["settings" if source == "settings" else "unused"] = "<|im_end|>"
    found = ChatRenderer(checkpoint(tmp_path, template, **ends)).end_token_ids
    assert sorted(found) == [LAST, TURN]


def test_every_end_is_in_effect_and_only_the_request_turns_them_off(tmp_path: Path) -> None:
    model = FakePreparer()
    directory = checkpoint(tmp_path, TEMPLATE.replace("END", "<|im_end|>"), generation=LAST)
    model.eos_token_ids = ChatRenderer(directory).end_token_ids
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stop_token_ids": [7]}
    asked = read_chat({**body, "min_tokens": 2}, model, Limits())
    assert asked.sampling(0, 0, 9, model).stop_token_ids == (LAST, TURN, 7)
    asked = read_chat({**body, "ignore_eos": True}, model, Limits())
    assert asked.sampling(0, 0, 9, model).stop_token_ids == (7,)


@pytest.mark.parametrize(
    ("behind", "ends"),
    [
        ("<|im_end|>", [TURN]),
        ("<|im_end|>\n<|im_start|>assistant\n", [TURN]),  # whether a new answer is asked for or not
        ("<|vision_pad|>", [OTHER]),
        ("\n<|im_end|>", []),  # not directly: the model says something else first
        ("[STOP]<|im_end|>", []),
        ("</s><|im_end|>", []),  # an added token like any word
        ("</s>\n", [264]),  # nothing else stands there
        ("<far>", []),  # no token of the model's
        ("{{ raise_exception('no') if m.role == 'assistant' }}<|im_end|>", []),
        ("{{ messages | tojson }}", []),
        ("", []),
    ],
)
def test_what_a_template_writes_behind_an_answer(
    behind: str, ends: list[int], tmp_path: Path
) -> None:
    directory = checkpoint(tmp_path, TEMPLATE.replace("END", behind))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    added = [("</s>", False), *((f"<{i}>", True) for i in range(7)), ("<far>", True)]
    for token_id, (content, special) in enumerate(added, 264):
        settings["added_tokens_decoder"][token_id] = {"content": content, "special": special}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ChatRenderer(directory).end_token_ids == tuple(ends)


def test_the_bundled_model_ends_as_under_generate() -> None:
    named = json.loads((CHECKPOINT / "generation_config.json").read_text())["eos_token_id"]
    assert ChatRenderer(CHECKPOINT).end_token_ids == tuple(named) == read_eos_token_ids(CHECKPOINT)
