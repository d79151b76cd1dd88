"""What one version of the openai package makes of our answers; runs in that version's environment.

    python talk.py BASE_URL MODEL IMAGE_URL

Nothing but the package and the standard library is imported.  Prints one JSON object; what the
package itself raises ends it with a traceback.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name: str, parameters: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


def calls_of(message: Any) -> list[list[str]]:
    return [[call.function.name, call.function.arguments] for call in message.tool_calls or []]


def talk(base_url: str, model: str, image: str) -> dict[str, Any]:
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)
    completions = client.chat.completions
    stream = getattr(completions, "stream", None) or client.beta.chat.completions.stream
    calling: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "Is it cold?"}],
        "tools": [tool("weather", WEATHER), tool("now", NOTHING)],
        "tool_choice": "required",
        "max_tokens": 300,
        "temperature": 1.5,  # or the bundled model, which never learned tools, repeats itself
    }
    parts = [
        {"type": "image_url", "image_url": {"url": image, "detail": "low"}},
        {"type": "text", "text": "What is the total?"},
    ]
    seeing: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": parts}],
        "temperature": 0,
    }
    told: dict[str, Any] = {"version": openai.__version__, "calls": []}
    for seed in range(6):
        asked = {**calling, "seed": seed}
        whole = completions.create(**asked).choices[0]
        with stream(**asked) as events:
            kinds = [event.type for event in events]
            streamed = events.get_final_completion().choices[0]
        told["calls"].append(
            {
                "whole": [whole.finish_reason, calls_of(whole.message)],
                "streamed": [streamed.finish_reason, calls_of(streamed.message)],
                "num_done": kinds.count("tool_calls.function.arguments.done"),
            }
        )
    told["whole"] = completions.create(**seeing).choices[0].message.content
    with stream(**seeing) as events:
        told["streamed"] = events.get_final_completion().choices[0].message.content
    return told


if __name__ == "__main__":
    print(json.dumps(talk(*sys.argv[1:])))
