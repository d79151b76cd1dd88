r"""Kimi K2 and K2.5; the reasoning of Kimi-VL.

| Text | Read as |
|---|---|
| `<|tool_call_begin|>ID<|tool_call_argument_begin|>{...}<|tool_call_end|>` | a call, as it grows |
| `functions.f:0`, `f:0` or `f` for ID | its function is `f`; by ID its template shows the call |
| `<|tool_calls_section_begin|>`, `<|tool_calls_section_end|>` | nothing |
| `<think>...</think>` ahead of the answer | reasoning (`kimi_k2`) |
| `◁think▷...◁/think▷` ahead of the answer | reasoning (`kimi`) |
"""

from __future__ import annotations

import re

from epd.api.asked.calls.form import NAME, Form, JsonArguments

FORM = Form(
    open="<|tool_call_begin|>",
    close="<|tool_call_end|>",
    head=re.compile(
        rf"\s*(?P<id>(?:functions\.)?{NAME}(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*(?=\{{)"
    ),
    arguments=lambda _: JsonArguments(),
    around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
