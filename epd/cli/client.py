"""A small OpenAI client for the command line: standard library only, one request at a time."""

from __future__ import annotations

import base64
import json
import mimetypes
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd.cli.boundary import CommandFailed
from epd.cli.question import Question

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; `timeline`: machine, state, milliseconds since admission."""

    text: str
    finish_reason: str
    usage: dict[str, int]
    timeline: list[dict[str, Any]]

    def as_json(self) -> str:
        return json.dumps(
            {
                "answer": self.text,
                "finish_reason": self.finish_reason,
                "usage": self.usage,
                "timeline": self.timeline,
            }
        )


def ask(base_url: str, question: Question) -> Answer:
    """Ask the server's chat API.  Raises CommandFailed with the server's own sentence."""
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": _as_url(image)}} for image in question.images
    ]
    content += [
        {"type": "video_url", "video_url": {"url": _as_url(video)}} for video in question.videos
    ]
    content.append({"type": "text", "text": question.text})
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": question.max_tokens,
        "temperature": question.temperature,
    }
    if question.seed is not None:
        body["seed"] = question.seed
    response = _post(f"{base_url}/v1/chat/completions", body)
    choice = response["choices"][0]
    return Answer(
        choice["message"]["content"],
        choice["finish_reason"],
        response["usage"],
        response.get("epd", {}).get("timeline", []),
    )


def _as_url(medium: str) -> str:
    if medium.startswith(("http://", "https://", "data:")):
        return medium
    kind = mimetypes.guess_type(medium)[0] or "application/octet-stream"
    return f"data:{kind};base64," + base64.b64encode(Path(medium).read_bytes()).decode()


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(  # noqa: S310 (the verb has checked the scheme)
        url,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-EPD-Timeline": "1"},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
            found: dict[str, Any] = json.load(response)
            return found
    except urllib.error.HTTPError as error:
        raise CommandFailed(f"the server answered {error.code}: {_sentence(error)}") from None
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise CommandFailed(f"{url} does not answer ({reason}); is the server up?") from None


def _sentence(error: urllib.error.HTTPError) -> str:
    text = error.read().decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
