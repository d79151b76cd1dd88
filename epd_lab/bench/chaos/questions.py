"""What clients ask under chaos: every way in which a request and an answer can differ.

Each question has one right answer, since it is greedy or has a seed.
"""

from __future__ import annotations

import base64
import io
import random
from dataclasses import dataclass
from typing import Any

from epd_lab.bench.workload import WORDS, noise_jpeg

Body = dict[str, Any]
PENALTIES: Body = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2}
GRAMMAR: Body = {"structured_outputs": {"regex": "([a-z][0-9][A-Z][-+]([0-9]{2}|[a-f]{3}) ){40}"}}
SEEDED: Body = {"temperature": 1.2, "top_p": 0.95, "seed": 11}
TOLD: Body = {"logprobs": True}  # tokens are compared, not the text that they make alone
FREE: Body = TOLD | {"ignore_eos": True}
WAYS: dict[str, Body] = {
    "greedy": FREE | {"temperature": 0},
    "seeded": FREE | SEEDED,
    "penalties": FREE | PENALTIES | {"temperature": 0},
    "grammar": TOLD | GRAMMAR | SEEDED,
    "grammar and penalties": TOLD | GRAMMAR | SEEDED | PENALTIES,
    "two answers": FREE | SEEDED | {"n": 2},
}
SHOWN = ("text", "one image", "two images", "three images", "four images", "a film")
TOKENS = (24, 48, 96)
ARGUMENTS: Body = {"place": {"enum": ["Oslo", "Rome"]}, "nights": {"type": "integer"}}
SCHEMA: Body = {"type": "object", "properties": ARGUMENTS, "required": [*ARGUMENTS]}
TOOL: Body = {
    "tools": [{"type": "function", "function": {"name": "book", "parameters": SCHEMA}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 80,
}


@dataclass(frozen=True, slots=True)
class Question:
    name: str
    body: Body


def questions(seed: int) -> tuple[Question, ...]:
    """Each thing that is shown with each way to answer, and calls of a tool."""
    draw, found = random.Random(f"questions {seed}"), []
    for place, shown in enumerate(SHOWN):
        for number, (way, settings) in enumerate(WAYS.items()):
            media = [("video", "video/mp4", film(seed + number))]
            if shown != "a film":
                sides = [(draw.randrange(40, 200), draw.randrange(40, 200)) for _ in range(place)]
                first = 1000 * seed + 100 * place + 10 * number
                jpegs = [noise_jpeg(side, first + n) for n, side in enumerate(sides)]
                media = [("image", "image/jpeg", jpeg) for jpeg in jpegs]
            text = " ".join(draw.choices(WORDS, k=draw.choice((5, 40, 150))))
            tokens = {"max_tokens": TOKENS[(place + number) % len(TOKENS)]}
            found.append(Question(f"{shown}, {way}", _asked(text, media) | settings | tokens))
    for number in range(2):
        body = _asked(f"Book {number} of it.", []) | TOOL | SEEDED | {"seed": number}
        found.append(Question(f"tool {number}", body))
    return tuple(found)


def film(seed: int, num_frames: int = 8) -> bytes:
    """MP4 of 64 x 48 pixels, one second."""
    import av
    import numpy as np

    out = io.BytesIO()
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    still = coarse.repeat(12, 0).repeat(16, 1)
    with av.open(out, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=num_frames)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index in range(num_frames):
            pixels = av.VideoFrame.from_ndarray(np.roll(still, 3 * index, axis=1), "rgb24")
            container.mux(stream.encode(pixels))
        container.mux(stream.encode())
    return out.getvalue()


def _asked(text: str, media: list[tuple[str, str, bytes]]) -> Body:
    content: list[Body] = []
    for kind, mime, data in media:
        url = f"data:{mime};base64,{base64.b64encode(data).decode()}"
        content.append({"type": f"{kind}_url", f"{kind}_url": {"url": url}})
    content.append({"type": "text", "text": text})
    return {"messages": [{"role": "user", "content": content}]}
