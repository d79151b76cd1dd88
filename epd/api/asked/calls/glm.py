r"""GLM-4.5 and later, GLM-4.5V and 4.6V.

| Text | Read as |
|---|---|
| `<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>` | a call |
| the same without line breaks (GLM-4.7), or without arguments | likewise |
| `v` | a text, where its schema takes that alone, or it is no JSON; else JSON |
| `<think>...</think>` ahead of the answer | reasoning (`glm45`, `glm41v`) |
| `<answer>...</answer>` behind it (GLM-4.1V) | the text between them (`glm41v`) |
"""

from __future__ import annotations

import re
from functools import partial

from epd.api.asked.calls.form import NAME, Form
from epd.api.asked.calls.tagged import TaggedArguments, Tags

TAGS = Tags(
    key=re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>"),
    value_end="</arg_value>",
    next="<arg_key>",
    end="</tool_call>",
)
FORM = Form(
    open="<tool_call>",
    close="</tool_call>",
    head=re.compile(rf"\s*{NAME}\s*(?=<arg_key>|</tool_call>)"),
    arguments=partial(TaggedArguments, TAGS),
)
