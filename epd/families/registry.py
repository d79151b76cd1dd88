"""From a checkpoint's `model_type` to the folder of its family.

Each folder names the adapters of its model types.  Its modules are imported when one of them is
used: `adapter.py` computes, with torch, and `sizes.py` is for all that needs none.
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

ADAPTERS: dict[str, str] = {}  # of each model type
for _folder in pkgutil.iter_modules([str(Path(__file__).parent)], f"{__package__}."):
    if _folder.ispkg:
        ADAPTERS |= importlib.import_module(_folder.name).ADAPTERS


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
        return family
    raise ModelError(
        f"{directory} is a {model_type!r} model; supported are {', '.join(sorted(ADAPTERS))}"
    )
