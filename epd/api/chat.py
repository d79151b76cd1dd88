"""Messages to token ids, as transformers does it, without transformers.

The model's own chat template is rendered by a sandboxed jinja environment with the settings of
transformers; its own `tokenizer.json` turns the text into ids; each image placeholder becomes as
many as the picture has rows.  The number of placeholders must be the number of pictures: text that
spells a placeholder out is refused, not believed.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from epd.api.errors import bad_request
from epd.engine.checkpoint import ModelError, read_config, read_json

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class ChatRenderer:
    """Template and tokenizer of one model directory.  Raises ModelError when made."""

    def __init__(self, model_dir: Path | str) -> None:
        directory = Path(model_dir)
        path = directory / "tokenizer.json"
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise ModelError(f"{path} cannot be read ({error}); restore the file") from error
        self.config = read_config(directory)
        settings_path = directory / "tokenizer_config.json"
        self._settings = read_json(settings_path) if settings_path.is_file() else {}
        self.image_token_id = self.config.get("image_token_id", self.config.get("image_token_index"))
        source = _template_source(directory, self._settings)
        self.has_template = source is not None
        self._template = _compile(source or "")
        self._wants_lists = self.image_token_id is not None and "is string" not in (source or "")
        self._special = {
            name: token["content"] if isinstance(token, dict) else token
            for name in _SPECIAL_TOKENS
            if (token := self._settings.get(name)) is not None
        }

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt's text, with one placeholder per picture.  Raises ApiError."""
        if not self.has_template:
            raise bad_request(
                "this model has no chat template; use /v1/completions, or add chat_template.jinja "
                "to its directory",
                "messages",
            )
        import jinja2

        try:
            return self._template.render(
                messages=[self._adapt(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special,
            )
        except jinja2.TemplateError as error:
            raise bad_request(f"the model's chat template refuses it: {error}", "messages") from None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def expand(self, ids: Sequence[int], row_counts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Ids with each placeholder repeated for its rows, and the offsets of the first ones."""
        token = self.image_token_id
        found = sum(1 for i in ids if i == token) if token is not None else 0
        if found != len(row_counts):
            raise bad_request(
                f"the prompt has {found} image placeholders for {len(row_counts)} pictures; "
                "text must not contain the model's image placeholder",
                "messages",
            )
        if not row_counts:
            return list(ids), []
        expanded: list[int] = []
        offsets: list[int] = []
        counts = iter(row_counts)
        for i in ids:
            if i == token:
                offsets.append(len(expanded))
                expanded.extend([i] * next(counts))
            else:
                expanded.append(i)
        return expanded, offsets

    def _adapt(self, message: dict[str, Any]) -> dict[str, Any]:
        """OpenAI's message as templates expect it: pictures are `{"type": "image"}`."""
        content = message["content"]
        if isinstance(content, str):
            parts = [{"type": "text", "text": content}]
            return {**message, "content": parts} if self._wants_lists else message
        if self.image_token_id is None:
            return {**message, "content": "\n".join(part["text"] for part in content)}
        adapted = [
            {"type": "image"} if part["type"] == "image_url" else part for part in content
        ]
        return {**message, "content": adapted}


def _template_source(directory: Path, settings: dict[str, Any]) -> str | None:
    """From wherever checkpoints keep it."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    path = directory / "chat_template.json"
    if path.is_file():
        template = read_json(path).get("chat_template")
        return template if isinstance(template, str) else None
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _compile(source: str) -> Any:
    """With the settings of `transformers.utils.chat_template_utils`."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for training; here it is transparent."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **options)

    def now(pattern: str) -> str:
        return datetime.datetime.now().strftime(pattern)  # noqa: DTZ005 (the operator's local time)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ModelError(f"the chat template cannot be compiled: {error}") from error
