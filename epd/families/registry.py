"""From a checkpoint's `model_type` to the folder of its family.

Each folder names the adapters of its model types, and published checkpoints of these, with spaces
between them: those whose layout tests make, and others that declare it.  It names relatives that
are refused, too, with what they lack.  Its modules are imported when one of them is used:
`adapter.py` computes, with torch, and `sizes.py` is for all that needs none.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from epd.model_files.checkpoint import ModelError, Settings

if TYPE_CHECKING:
    from epd.model_files.family import Family

# Of each model type.
ADAPTERS: dict[str, str] = {}
CHECKPOINTS: dict[str, str] = {}
DECLARED: dict[str, str] = {}
REFUSED: dict[str, str] = {}
for _folder in pkgutil.iter_modules([str(Path(__file__).parent)], f"{__package__}."):
    if _folder.ispkg:
        _named = importlib.import_module(_folder.name)
        ADAPTERS |= _named.ADAPTERS
        CHECKPOINTS |= _named.CHECKPOINTS
        DECLARED |= getattr(_named, "DECLARED", {})
        REFUSED |= getattr(_named, "REFUSED", {})


@cache
def family_named(model_type: str) -> Family | None:
    """None where it is not supported."""
    if model_type not in ADAPTERS:
        return None
    folder = ADAPTERS[model_type].partition(".adapter:")[0]
    family: Family = importlib.import_module(f"{folder}.sizes").FAMILIES[model_type]
    return family


def family_of(directory: object, config: Settings) -> Family:
    """Raises ModelError where the family is not supported."""
    model_type = str(config["model_type"])
    if family := family_named(model_type):
        return family.told(config)
    lacks = f", which is not served: {REFUSED[model_type]}" if model_type in REFUSED else ""
    raise ModelError(
        f"{directory} is a {model_type!r} model{lacks}; supported are {', '.join(sorted(ADAPTERS))}"
    )
