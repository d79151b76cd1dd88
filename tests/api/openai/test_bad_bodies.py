"""What is said of bad bodies, in every API: a table that was written before their readers were."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.api.fakes import serving
from tests.api.wire import CHAT, HI, exchange, request

TABLE = json.loads((Path(__file__).parent / "bad_bodies.json").read_text())
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": HI["messages"]}),
    "completion": ("/v1/completions", {"prompt": "hi"}),
    "response": ("/v1/responses", {"input": "hi"}),
    "message": ("/v1/messages", {"messages": HI["messages"], "max_tokens": 9}),
    "count": ("/v1/messages/count_tokens", {"messages": HI["messages"]}),
    "tokenize": ("/tokenize", {}),
    "detokenize": ("/detokenize", {}),
}


async def test_a_bad_body_is_refused_as_ever() -> None:
    """Status, code and `param` of each; the message, too, where it gives a reason."""
    others: list[Any] = []
    async with serving() as (server, frontend, _):
        for api, fields, status, code, param, *message in TABLE:
            path, body = BODIES[api]
            raw = request({**body, **fields}, path=path)
            told_status, _, answer = await exchange(server, raw)
            told = json.loads(answer).get("error", {})
            got = [told_status, told.get("code"), told.get("param")]
            got += [told.get("message")] * len(message)
            if got != [status, code, param, *message]:
                others.append([api, fields, [status, code, param, *message], got])
            elif param and param not in told["message"]:
                others.append([api, fields, f"{param} is not in the message", told["message"]])
    assert not others, "\n".join(map(str, others))
    assert not frontend.generations


def test_the_table_is_of_every_api() -> None:
    counts = Counter(api for api, *_ in TABLE)
    assert counts.keys() == BODIES.keys()
    assert len(TABLE) >= 400 and min(counts[api] for api in list(BODIES)[:4]) >= 40, counts
