"""The questions about the sample pictures."""

from __future__ import annotations

import json
from dataclasses import dataclass

from epd.tiny import SAMPLES

INDEX = "samples.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of samples.json: a question about one or more of the pictures."""

    name: str
    images: list[str]  # file names
    question: str
    answer: str
    demo: bool = False


def read_index() -> list[Entry]:
    """The entries of samples.json."""
    return [Entry(**entry) for entry in json.loads((SAMPLES / INDEX).read_text())]
