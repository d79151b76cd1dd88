"""The table of families in docs/engine.md, from what their folders name."""

from __future__ import annotations

import re

from epd.families.registry import ADAPTERS, CHECKPOINTS, DECLARED, family_named
from epd_lab.diagrams.page import markdown_table

PLACE = re.compile(r"(<!-- table of families, by `epd diagrams` -->\n).*?(<!-- end -->)", re.DOTALL)
_HEADER = ["`model_type`", "made layout tested", "declared, untested", "videos"]


def with_table(document: str) -> str:
    """The document with its marked table written anew."""
    return PLACE.sub(lambda m: f"{m[1]}\n{table()}\n\n{m[2]}", document)


def takes_videos(kind: str) -> bool:
    family = family_named(kind)
    return bool(family and family.images and family.images.video)


def table() -> str:
    rows = [
        [
            f"`{kind}`",
            *(names.get(kind, "").replace(" ", ", ") for names in (CHECKPOINTS, DECLARED)),
            "yes" if takes_videos(kind) else "",
        ]
        for kind in ADAPTERS
    ]
    return markdown_table(_HEADER, rows)
