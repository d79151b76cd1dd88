"""Conversations with videos: as a client sends them, and as transformers is given them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from tests.engine.conftest import drawn_image
from tests.engine.driver import png
from tests.engine.reference import ReferenceVideo
from tests.media_files.videos import film, frame, frames_of

# What a request may ask for of a film; other families take all.
TAKES = {"glm4v": ("fps",), "glm4v_moe": ("fps",), "glm46v": (), "glm_ocr": ()}
TAKES |= dict.fromkeys(("internvl", "internvl_moe"), ("fps", "num_frames"))
TAKES |= dict.fromkeys(("gemma4", "gemma4_moe"), ("num_frames",))
MIME = {
    "mp4": "video/mp4",
    "webm": "video/webm",
    "matroska": "video/x-matroska",
    "avi": "video/avi",
}


@dataclass
class Case:
    """A user's turn: `parts` for our API, `messages`, `images` and `videos` for transformers."""

    parts: list[dict[str, Any]] = field(default_factory=list)
    content: list[dict[str, Any]] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    videos: list[ReferenceVideo] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.content}]

    @property
    def asked(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.parts}]

    def text(self, text: str) -> Case:
        self.parts.append({"type": "text", "text": text})
        self.content.append({"type": "text", "text": text})
        return self

    def image(self, seed: int, width: int, height: int) -> Case:
        image = drawn_image(seed, width, height)
        self.parts.append({"type": "image_url", "image_url": {"url": url_of(png(image))}})
        self.content.append({"type": "image"})
        self.images.append(image)
        return self

    def film(
        self, seed: int, *shape: int, rate: int = 8, container: str = "mp4", **sampling: Any
    ) -> Case:
        """`shape`: number of frames, width, height; `sampling`: fields of the part."""
        data = film(seed, *shape, rate=rate, container=container)
        url = url_of(data, MIME[container])
        self.parts.append({"type": "video_url", "video_url": {"url": url}, **sampling})
        self.content.append({"type": "video"})
        frames = frames_of(data)
        self.videos.append(
            ReferenceVideo(frames, rate, {"fps": None if sampling else 2.0} | sampling)
        )
        return self

    def frames(self, seed: int, count: int, width: int, height: int, fps: float = 0) -> Case:
        """A video as images."""
        shown = [frame(seed, i, width, height) for i in range(count)]
        urls = [url_of(png(Image.fromarray(pixels))) for pixels in shown]
        part: dict[str, Any] = {"type": "video", "video": urls}
        self.parts.append(part | ({"fps": fps} if fps else {}))
        self.content.append({"type": "video"})
        self.videos.append(ReferenceVideo(np.stack(shown), fps or 2.0))
        return self


def url_of(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def cases(family: str = "") -> Sequence[Case]:
    """Alone, mixed with images, two, odd sizes and counts, rates, containers, images.

    Frames are asked for as the family takes it.
    """

    def asking(**sampling: Any) -> dict[str, Any]:
        takes = TAKES.get(family, sampling)
        return {name: value for name, value in sampling.items() if name in takes}

    few = asking(num_frames=6)
    return [
        Case().film(1).text("what happens?"),
        Case().text("look: ").film(2, 13, 100, 38, **asking(fps=4.0)).text("odd"),
        Case().image(3, 48, 48).film(4, 9, 90, 130, **few).image(5, 70, 33).text("mixed"),
        Case()
        .film(6, 30, 64, 64, rate=30, **asking(fps=12.0))
        .film(7, 8, 40, 40, container="webm")
        .text("?"),
        Case().frames(8, 5, 61, 47, fps=0.5).text("frames").film(1).text("again"),
    ]
