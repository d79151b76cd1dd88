r"""Mistral 7B 0.3 to Mistral Small 3.2, Ministral 3, Magistral, Devstral.

| Text | Read as |
|---|---|
| `[TOOL_CALLS]f[ARGS]{...}`, `[TOOL_CALLS]f{...}` | a call, as it grows; its JSON ends it |
| `[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{...}` | likewise, with its id |
| `[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]` | calls, when the array is whole |
| `[THINK]...[/THINK]` ahead of the answer | reasoning (`mistral`) |

Its templates take ids of 9 letters and digits only.
"""

from __future__ import annotations

import re
import uuid

from epd.api.asked.calls.form import NAME, Form, JsonArguments

FORM = Form(
    open="[TOOL_CALLS]",
    close="",
    head=re.compile(rf"\s*{NAME}(?:\[CALL_ID\](?P<id>[A-Za-z0-9]{{9}}))?(?:\[ARGS\])?\s*(?=\{{)"),
    arguments=lambda _: JsonArguments(),
    new_id=lambda: uuid.uuid4().hex[:9],
)
