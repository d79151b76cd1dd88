"""docs/state_diagrams/engine.md: each module of the engine, in the words of its own docstring."""

from __future__ import annotations

import ast
from pathlib import Path

from epd_lab.diagrams.page import markdown_table

EPD = Path(__file__).resolve().parents[2] / "epd"
FOLDERS = ("engine", "families", "groups/device", "media_files", "model_files")

_HEAD = """\
<!-- Written by `python -m epd diagrams` from their docstrings; do not edit. -->

# Modules of the engine

*For developers: where to look; [engine.md](../engine.md) has how it works.*"""


def page() -> str:
    rows = [
        [f"`{path.relative_to(EPD).with_suffix('')}`", _headline(path)]
        for folder in FOLDERS
        for path in sorted((EPD / folder).rglob("*.py"))
        if path.name != "__init__.py"
    ]
    return f"{_HEAD}\n\n{markdown_table(['Module', 'In short'], rows)}\n"


def _headline(path: Path) -> str:
    """The first paragraph's first sentence."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0]
