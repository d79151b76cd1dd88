"""Text of special tokens in what clients send, as ordinary tokens (`--special-tokens-in-content`).

Theory of operation
-------------------
A tokenizer finds special tokens by their text, whoever wrote it: a message ends at `<|im_end|>`,
and what follows may take any role.  To escape it, each such text becomes a stand-in before the
template is rendered: a name that no client can guess.  A copy of the tokenizer has a token for each
stand-in, so the text around it is cut as around the special token.  In the ids that token gives way
to ordinary tokens which spell the text.  So the template's own marks stay what they are, and
nothing is lost.

Two texts may also become a mark together, or one with the template's text.  So the prompt is
rendered again, with an empty stand-in behind each character that begins a mark, and ahead of each
text that may go on with one.  If this takes marks away, that rendering is the prompt.

Marks are all special tokens, those that config.json names, and added tokens that the template
writes, such as `<tool_call>`.  Other added tokens are text, like runs of spaces.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import cast

from tokenizers import AddedToken, Tokenizer

from epd.api.asked.chat_message import ChatMessage
from epd.api.asked.template_flags import TemplateFlags
from epd.api.asked.tools import Tool
from epd.api.http.errors import bad_request
from epd.model_files.checkpoint import ModelError

# What templates look at in tools and calls.
_WORDS = frozenset(
    "arguments array boolean description enum function id integer items name null number object "
    "parameters properties required strict string type".split()
)
_GUARDS = ("x", "\n", ".", "")  # text ahead of a mark, for tokenizers that treat a first word apart
Render = Callable[[Sequence[ChatMessage], Sequence[Tool], TemplateFlags], str]


class Escaper:
    """Of one tokenizer and template.  Raises ModelError where a mark cannot be spelled."""

    def __init__(self, tokenizer: Tokenizer, template: str, named: Collection[int]) -> None:
        """`template`: its source.  `named`: ids of tokens that are marks in any case."""
        added = tokenizer.get_added_tokens_decoder()
        marks = {
            token.content
            for i, token in added.items()
            if token.content
            and (token.special or i in named or _is_written(token.content, template))
        }
        nonce = secrets.token_hex(8)
        names = ["", *sorted(marks, key=len, reverse=True)]
        self._stand_ins = {mark: f"z{nonce}{i:04x}z" for i, mark in enumerate(names)}
        self._marks = re.compile("|".join(map(re.escape, names[1:])) or r"(?!)")
        begins = {mark[0] for mark in marks}
        self._begins = re.compile("|".join(map(re.escape, [*names[1:], *begins])) or r"(?!)")
        self._rests = {mark[at:] for mark in marks for at in range(1, len(mark))}
        self._inner = "\0".join(mark[1:] for mark in marks)
        self.tokenizer: Tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self.tokenizer.add_special_tokens(
            [AddedToken(name, normalized=False) for name in self._stand_ins.values()]
        )
        bare = json.loads(tokenizer.to_str()) | {"added_tokens": []}
        plain: Tokenizer = Tokenizer.from_str(json.dumps(bare))
        self._spelled = {
            self.tokenizer.token_to_id(name): _spelled(mark, plain, tokenizer, added.keys())
            for mark, name in self._stand_ins.items()
        }

    def render(
        self,
        render: Render,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        flags: TemplateFlags,
    ) -> str:
        """The prompt's text, with stand-ins.  Raises ApiError 400."""
        text = self._render(render, messages, tools, flags, self._escaped)
        apart = self._render(render, messages, tools, flags, self._apart)
        return text if self._marks.findall(text) == self._marks.findall(apart) else apart

    def spell(self, ids: Sequence[int]) -> list[int]:
        """The ids of such a text, with ordinary tokens for stand-ins."""
        return [token for i in ids for token in self._spelled.get(i, (i,))]

    def _render(
        self,
        render: Render,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        flags: TemplateFlags,
        change: Callable[[str], str],
    ) -> str:
        try:
            changed = [_message(message, change) for message in messages]
            variables = {name: _mapped(v, change) for name, v in flags.variables.items()}
            shown = cast("list[Tool]", _mapped(list(tools), change))
        except RecursionError:
            raise bad_request("messages or tools nest too deeply", "messages") from None
        return render(changed, shown, replace(flags, variables=variables))

    def _escaped(self, text: str) -> str:
        return self._marks.sub(lambda found: self._stand_ins[found[0]], text)

    def _apart(self, text: str) -> str:
        if text in _WORDS:
            return text
        between = self._stand_ins[""]
        told = self._begins.sub(
            lambda found: self._stand_ins.get(found[0], found[0] + between), text
        )
        longest = max(map(len, self._rests), default=0)
        goes_on = text in self._inner or any(text[:n] in self._rests for n in range(1, longest + 1))
        return between + told if text and goes_on else told


def _is_written(text: str, template: str) -> bool:
    return bool(text.strip()) and text in template


def _message(message: ChatMessage, change: Callable[[str], str]) -> ChatMessage:
    """Its role, and the kinds and data of its parts, are no text of a client."""
    content = message["content"]
    if isinstance(content, str):
        said: object = change(content)
    else:
        said = [{**p, "text": change(p["text"])} if p["type"] == "text" else p for p in content]
    others = {k: _mapped(v, change) for k, v in message.items() if k not in ("role", "content")}
    return cast("ChatMessage", {"role": message["role"], "content": said, **others})


def _mapped(value: object, change: Callable[[str], str]) -> object:
    """With every string in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(one, change) for one in value]
    if isinstance(value, Mapping):
        return {change(key): _mapped(one, change) for key, one in value.items()}
    return value


def _spelled(
    mark: str, plain: Tokenizer, tokenizer: Tokenizer, added: AbstractSet[int]
) -> tuple[int, ...]:
    """Ordinary tokens of the mark's text.  Raises ModelError."""

    def encode(text: str) -> list[int]:
        return list(plain.encode(text, add_special_tokens=False).ids)

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    for whole in (True, False):
        for guard in _GUARDS:
            head = encode(guard)
            tails = [encode(guard + piece) for piece in ([mark] if whole else mark)]
            ids = [i for tail in tails for i in tail[len(head) :]]
            is_ahead = all(tail[: len(head)] == head for tail in tails)
            if is_ahead and added.isdisjoint(ids) and decode([*head, *ids]) == decode(head) + mark:
                return tuple(ids)
    raise ModelError(
        f"special_tokens_in_content escape: the tokenizer has no ordinary tokens for the text of "
        f"{mark}; use keep"
    )
