r"""Qwen3-Coder and Qwen3.5: XML.

| Text | Read as |
|---|---|
| `<tool_call><function=f>...</function></tool_call>` | a call |
| `<parameter=k>\nv\n</parameter>` in it, also without these line breaks | an argument |
| `v` | a text, where its schema takes that alone, or it is no JSON; else JSON |
| `True`, `False`, `None` of an argument that is no text | as JSON has them |
"""

from __future__ import annotations

import re
from functools import partial

from epd.api.asked.calls.form import NAME, Form
from epd.api.asked.calls.tagged import TaggedArguments, Tags

TAGS = Tags(
    key=re.compile(r"\s*<parameter=([^<>]*)>"),
    value_end="</parameter>",
    next="<parameter=",
    end="</function>",
    is_broken_line=True,
)
FORM = Form(
    open="<tool_call>",
    close="</tool_call>",
    head=re.compile(rf"\s*<function={NAME}>\s*(?=<parameter=|</function>)"),
    arguments=partial(TaggedArguments, TAGS),
)
