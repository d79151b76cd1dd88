"""The model's own chat template: messages to the text of a prompt, as transformers renders it.

Templates are jinja programs from whoever published the model; they run in a sandbox, with the
settings and helpers that transformers gives them.  They also disagree on what `content` is: a
string, a list of parts, or either.  A template that is given the other kind often drops it without
a word, so what this one takes is found out once, by rendering a probe of each.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from epd.api.asked.calls.registry import FORMS, form_of
from epd.api.asked.chat_message import ChatMessage
from epd.api.asked.template_flags import NO_FLAGS, TemplateFlags
from epd.api.asked.tools import Tool
from epd.api.http.errors import bad_request
from epd.api.prompts.continued import cut, marked
from epd.model_files.checkpoint import ModelError, is_there, read_json, read_text, reason

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser

_PROBE = "epd probes this template"
_MEDIA = {"image_url": {"type": "image"}, "video": {"type": "video"}}


class TemplateFault(ModelError):
    """A template is of no use; the text has the reason, without its name."""


class ChatTemplate:
    """A compiled template with the model's special tokens.  Raises TemplateFault when made."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template, self._names = _compile(source)
        self._special_tokens = dict(special_tokens)
        self.call_form = form_of(source)  # a name of `FORMS`; empty: calls are not found
        self._tool_fault = _tool_fault(source, self.call_form)
        self._takes_parts = self._shows([{"type": "text", "text": _PROBE}])
        self._takes_strings = not self._takes_parts or self._shows(_PROBE)
        if not self._takes_parts:
            self._check_rendering()

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        flags: TemplateFlags = NO_FLAGS,
    ) -> str:
        """The prompt's text, one image placeholder for each image.  Raises ApiError 400.

        `messages`: `{"role", "content"}` with OpenAI's content, validated; answers with
        `tool_calls`, whose arguments are objects here, and messages of role `tool`.
        """
        if tools and self._tool_fault:
            raise bad_request(f"this model takes no tools: {self._tool_fault}", "tools")
        variables = flags.for_template(self._names)
        adapted = [self._adapt(message, i) for i, message in enumerate(messages)]
        ahead = ""
        if flags.is_continued:
            adapted[-1], ahead = marked(adapted[-1])
        try:
            text = self._render(adapted, tools, variables, is_answered=flags.is_answered)
        except Exception as error:  # its own refusals, and types that it did not expect
            refused = "the model's chat template does not take these messages"
            said = f"{refused}: {error}" if isinstance(error, TemplateRaised) else refused
            raise bad_request(said, "messages") from error
        return cut(text, ahead) if flags.is_continued else text

    def behind_answer(self) -> str:
        """What stands directly behind an assistant's answer; empty where that is not shown."""
        talk: list[ChatMessage] = [{"role": "user", "content": "?"}]
        talk.append({"role": "assistant", "content": _PROBE})
        adapted = [self._adapt(message, i) for i, message in enumerate(talk)]
        try:
            return self._render(adapted, is_answered=False).partition(_PROBE)[2]
        except Exception:  # a template that wants it otherwise; says nothing about requests
            return ""

    def _render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, object] = MappingProxyType({}),
        *,
        is_answered: bool = True,
    ) -> str:
        rendered: str = self._template.render(
            {
                **variables,
                **self._special_tokens,
                "messages": messages,
                "tools": list(tools) or None,
                "documents": None,
                "add_generation_prompt": is_answered,
            }
        )
        return rendered

    def _shows(self, content: object) -> bool:
        """Whether a message with this content is rendered as its text, not dropped or quoted."""
        try:
            text = self._render([{"role": "user", "content": content}])
        except Exception:  # a template that wants it otherwise; says nothing about requests
            return False
        return _PROBE in text and "'text'" not in text and '"text"' not in text

    def _check_rendering(self) -> None:
        """Raises TemplateFault where not even a text of a user is rendered; its own refusal is one
        for requests."""
        try:
            self._render([{"role": "user", "content": _PROBE}])
        except TemplateRaised:
            return
        except Exception as error:
            why = reason(error)
            raise TemplateFault(f"renders no message of a user ({why}); restore it") from error

    def _adapt(self, message: ChatMessage, index: int) -> Mapping[str, object]:
        """In the form that the template takes; to it an image is `{"type": "image"}`, a video
        `{"type": "video"}`."""
        content = message["content"]
        if isinstance(content, str):
            if self._takes_strings:
                return message
            return {**message, "content": [{"type": "text", "text": content}]}
        if self._takes_parts:
            parts = [_MEDIA.get(part["type"], part) for part in content]
            return {**message, "content": parts}
        if any(part["type"] != "text" for part in content):
            raise bad_request(
                "the model's chat template takes text only", f"messages[{index}].content"
            )
        return {**message, "content": "\n".join(part["text"] for part in content)}


def _tool_fault(source: str, form: str) -> str:
    """Why calls cannot be made through this template; empty if they can."""
    if "tools" not in source:
        return "its chat template does not show them to it"
    if not form:
        return f"its chat template writes calls in none of these forms: {', '.join(sorted(FORMS))}"
    return ""


def find_template(directory: Path, tokenizer_config: Mapping[str, object]) -> str | None:
    """The template's source, from wherever checkpoints keep it.  Raises ModelError."""
    path = directory / "chat_template.jinja"
    if is_there(path):
        return read_text(path)
    path = directory / "chat_template.json"
    settings = read_json(path) if is_there(path) else tokenizer_config
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {t.get("name"): t for t in template if isinstance(t, dict)}
        template = named.get("default", {}).get("template")
    if template is None or isinstance(template, str):
        return template
    raise ModelError(
        f"{directory}: chat_template of {path.name} or tokenizer_config.json is no text; restore it"
    )


def _compile(source: str) -> tuple[Template, frozenset[str]]:
    """With the settings of `transformers.utils.chat_template_utils`; and the names it reads."""
    from jinja2 import TemplateError, meta
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for training; here it is transparent."""

        tags = {"generation"}  # noqa: RUF012 (as jinja declares it)

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    try:
        names = meta.find_undeclared_variables(environment.parse(source))
        return environment.from_string(source), frozenset(names)
    except (TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
        raise TemplateFault(f"cannot be compiled ({reason(error)}); restore it") from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class TemplateRaised(Exception):
    """A template's own refusal, written for who sent the messages."""


def _raise(message: str) -> None:
    raise TemplateRaised(message)


def _now(pattern: str) -> str:
    return dt.datetime.now().strftime(pattern)  # noqa: DTZ005 (the operator's local time)
