r"""Gemma 4, and FunctionGemma (Gemma 3's own template writes no calls).

| Text | Read as |
|---|---|
| `<|tool_call>call:f{k:<|"|>text<|"|>,n:2,o:{p:[true]}}<tool_call|>` | a call, as it grows |
| `<start_function_call>call:f{k:<escape>text<escape>}<end_function_call>` | likewise |
| a word without quotes that is no number, `true`, `false` or `null` | a text |
| `<|channel>thought\n...<channel|>` ahead of the answer | reasoning (`gemma4`) |
"""

from __future__ import annotations

import json
import re
from functools import partial

from epd.api.asked.calls.form import NAME, Form
from epd.api.asked.stop import overlap

_WORD = r'[^\s{}\[\],:<"][^{}\[\],:<]*'
_PART = re.compile(
    rf"\s*(?:(?P<mark>[{{}}\[\],:])|(?P<word>{_WORD})(?=(?P<colon>:)|[,}}\]])"
    r'|(?P<json>"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"))'
)
_LITERAL = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_GOES_ON = re.compile(rf'\s*(?:{_WORD}|"(?:[^"\\]|\\.)*\\?)?')


class BareArguments:
    """An object whose names have no quotes, and whose texts stand between marks of the family."""

    def __init__(self, quote: str, _: object) -> None:
        self.is_done = self.is_broken = False
        self._quote, self._begin = quote, re.compile(rf"\s*{re.escape(quote)}")
        self._is_quoted = False
        self._depth = 0

    def read(self, held: str) -> tuple[int, str]:
        at, told = 0, list[str]()
        while at < len(held) and not self.is_done:
            if self._is_quoted:
                text, ended, _ = held[at:].partition(self._quote)
                if not ended:
                    text = text[: len(text) - overlap(text, self._quote)]
                at += len(text) + len(ended)
                told.append(json.dumps(text, ensure_ascii=False)[1:-1] + '"' * bool(ended))
                self._is_quoted = not ended
                if not ended:
                    break
            elif begun := self._begin.match(held, at):
                at, self._is_quoted = begun.end(), True
                told.append('"')
            elif part := _PART.match(held, at):
                at = part.end()
                told.append(self._part(part))
            else:
                rest = held[at:]
                begins = self._quote.startswith(rest.lstrip())
                self.is_broken = not begins and _GOES_ON.fullmatch(rest) is None
                break
        return at, "".join(told)

    def closing(self) -> str:
        return ""

    def _part(self, part: re.Match[str]) -> str:
        if mark := part["mark"]:
            self._depth += (mark in "{[") - (mark in "}]")
            self.is_done = not self._depth
            return mark + " " * (mark in ",:")
        if text := part["json"]:
            return text
        word = part["word"].strip()
        is_value = not part["colon"] and _LITERAL.fullmatch(word)
        return word if is_value else json.dumps(word, ensure_ascii=False)


GEMMA4 = Form(
    open="<|tool_call>",
    close="<tool_call|>",
    head=re.compile(rf"\s*call:\s*{NAME}\s*(?=\{{)"),
    arguments=partial(BareArguments, '<|"|>'),
)
FUNCTION_GEMMA = Form(
    open="<start_function_call>",
    close="<end_function_call>",
    head=GEMMA4.head,
    arguments=partial(BareArguments, "<escape>"),
)
