"""What both sides are given: conversations, pictures of odd sizes, prompts."""

from __future__ import annotations

import io
from base64 import b64decode, b64encode
from collections.abc import Iterator
from typing import Any

Body = dict[str, Any]  # of a chat request, as OpenAI writes it
Foreign = Any  # of transformers or Pillow, which have no types
Asked = Body | Foreign  # a prompt or a picture
SIZES = (  # pixels, width and height
    *((64, 64), (37, 101), (101, 37), (33, 47), (90, 50), (55, 34)),
    *((224, 224), (255, 256), (320, 96), (61, 199), (28, 28), (301, 203)),
)
NUM_CONVERSATIONS, NUM_PROMPTS, NUM_ANSWERS, NUM_NEW_TOKENS = 20, 20, 10, 64
TOPICS = (
    *("the moon", "bread", "Zürich", "the year 1848", "東京", "prime numbers", "a  double space"),
    *("rain 🌧", "x = [1, 2,\n\t3]", "naïve café", "0.1 + 0.2"),
)
ASKED = (
    *("What is {}?", "Write one sentence about {}.", "Repeat this: {}.", "List three facts: {}"),
    "Translate into French: we have read a book about {}.",
)
SYSTEM = "Answer briefly, and never give an address."
_PLACE = {"place": {"type": "string"}, "in_kelvin": {"type": "boolean"}}
_PARAMETERS = {"type": "object", "properties": _PLACE, "required": ["place"]}
_ABOUT = {"name": "get_weather", "description": "The weather of a place now."}
TOOL: Body = {"type": "function", "function": _ABOUT | {"parameters": _PARAMETERS}}
_CALLED = {"name": "get_weather", "arguments": '{"place": "Zürich"}'}
CALL: Body = {"id": "call_1", "type": "function", "function": _CALLED}


def picture(number: int) -> Foreign:
    """A PIL image of the size of this number: noise with structure, so that neighbours differ."""
    import numpy as np
    from PIL import Image

    width, height = SIZES[number % len(SIZES)]
    shape = (height // 12 + 1, width // 12 + 1, 3)
    coarse = np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)


def png(image: Foreign) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def pictures_of(body: Body) -> list[Foreign]:
    """The images of a conversation, in order."""
    from PIL import Image

    contents = [message["content"] for message in body["messages"]]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(b64decode(url.partition(",")[2]))) for url in urls]


def user(text: str, *numbers: int) -> Body:
    if not numbers:
        return {"role": "user", "content": text}
    data = [b64encode(png(picture(number))).decode() for number in numbers]
    urls = [{"url": f"data:image/png;base64,{one}"} for one in data]
    parts = [{"type": "image_url", "image_url": url} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def question(number: int, *numbers: int) -> Body:
    """A chat request about these pictures."""
    text = ASKED[number % len(ASKED)].format(TOPICS[number % len(TOPICS)])
    system = [{"role": "system", "content": SYSTEM}] if number % 3 == 1 else []
    return {"messages": [*system, user(text, *numbers)]}


def prompts(*, sees: bool) -> list[Body]:
    """Half of them with pictures, where the model takes any."""
    return [
        question(n, *((n,) if n % 4 == 1 else (n, n + 1)) if sees and n % 2 else ())
        for n in range(NUM_PROMPTS)
    ]


def conversations(*, sees: bool) -> list[Body]:
    """Text, images, tools, system messages, several turns."""
    return list(_conversations(sees=sees))[:NUM_CONVERSATIONS]


def _conversations(*, sees: bool) -> Iterator[Body]:
    talk = [user("Hello"), {"role": "assistant", "content": "Hello! What can I do?"}]
    used = [
        user("What is the weather in Zürich?"),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees, rain"},
    ]
    system = {"role": "system", "content": SYSTEM}
    yield {"messages": [*talk, user("And now?")]}
    yield {"messages": [system, *talk, user("And now?")]}
    yield {"messages": used[:1], "tools": [TOOL]}
    yield {"messages": used, "tools": [TOOL]}
    yield {"messages": [system, *used], "tools": [TOOL]}
    if sees:
        yield {"messages": [user("Compare them.", 1, 2)]}
        yield {"messages": [system, user("What is it?", 3)]}
        yield {"messages": [user("What is it?", 4), *talk[1:], user("And this?", 5)]}
    for number in range(NUM_CONVERSATIONS):
        yield question(number)
