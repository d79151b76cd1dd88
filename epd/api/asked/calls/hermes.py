"""Hermes, Qwen 2 to Qwen3-VL, and the form of a call that is enforced, between any family's marks.

| Text | Read as |
|---|---|
| `<tool_call>{"name": "f", "arguments": {...}}</tool_call>` | a call, as it grows |
| the same with other keys, or in another order | a call, when it is whole |
| `<think>...</think>` ahead of the answer | reasoning (`qwen3`) |
"""

from __future__ import annotations

import re

from epd.api.asked.calls.form import NAME, Form, JsonArguments

OBJECT = re.compile(rf'\s*\{{\s*"name"\s*:\s*"{NAME}"\s*,\s*"arguments"\s*:\s*(?=\{{)')

FORM = Form(
    open="<tool_call>",
    close="</tool_call>",
    head=OBJECT,
    arguments=lambda _: JsonArguments(depth=1),
)
