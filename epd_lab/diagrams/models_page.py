"""docs/drills/models.md: the models for foreign checkers, their states, and what they promise.

How many states a model has is what the own search counted last: every search compares.
"""

from __future__ import annotations

from epd_lab.diagrams.page import markdown_table
from epd_lab.formal import models
from epd_lab.formal.form import Model

_HEAD = """\
<!-- Written by `python -m epd diagrams` from epd_lab/formal; do not edit. -->

# Models for SPIN and TLA+

*For developers: the models around each machine, their states and their promises.*

A model is a small world around one machine, or around both ends of a room.
[simulation.md](../simulation.md#two-foreign-checkers) has the way to check them."""

_PROMISES = """\
## Promises
Each comes true on every path that is fair to the kinds of happenings named. A state where a model
may rest for ever is a judgement, with its reason: without any one of them the promise fails."""


def page() -> str:
    rows = [[f"`{m.name}`", str(m.nodes[0]), _about(m)] for m in models()]
    told = {(_machines(m), p.name): p for m in models() for p in m.promises}
    promises = [
        [
            f"{machines}: `{promise.name}`",
            promise.words,
            ", ".join(promise.fair),
            "; ".join(f"`{rest}`: {why}" for rest, why in promise.rests.items()) or "-",
        ]
        for (machines, _), promise in told.items()
    ]
    parts = [
        _HEAD,
        markdown_table(["Model", "States", "What it is"], rows),
        _PROMISES,
        markdown_table(["Promise", "What comes true", "Fair", "It may rest where"], promises),
    ]
    return "\n\n".join(parts) + "\n"


def _machines(model: Model) -> str:
    return " and ".join(dict.fromkeys(part.table.name for part in model.parts))


def _about(model: Model) -> str:
    """With the constants that hold: what this world has that others of its machine have not."""
    on = [name.lower().replace("_", " ") for name, value in model.constants.items() if value]
    return f"{model.about} ({', '.join(on)})" if on else model.about
