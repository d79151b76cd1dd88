"""Transfer backends that are not of this project, by the name `package.module:factory`.

The factory gets `BackendSettings` and returns a `TransferEngine` (`epd.transport.base`) with one
attribute more, `domain`.  docs/transports.md has its promises, and `tests/contract` tests them.
Its module is imported when an instance starts that names it, and at no other time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

from epd.transport.backend import Backend, BackendEngine, BackendSettings
from epd.transport.base import TransportError

PROMISED = ("allocate", "write", "settle", "fence", "domain")


def backend(name: str) -> Backend:
    """It was asked for by name, so a pair uses it before any of ours that leaves the process."""
    return Backend(
        name, rank=5, leaves_host=True, make=partial(make, name),
        is_offered=lambda endpoint, directory: False,
        domain="what its engine says", offered="if it is named",
    )  # fmt: skip


def load_factory(name: str) -> Callable[[BackendSettings], BackendEngine]:
    """Raises TransportError if there is no such thing."""
    path, _, attribute = name.partition(":")
    if not attribute:
        raise TransportError(
            f"there is no transfer backend {name!r}: others are named package.module:factory"
        )
    try:
        module = importlib.import_module(path)
    except Exception as error:  # whatever a stranger's module does while it is imported
        raise TransportError(
            f"transport {name}: module {path} cannot be imported ({error!r}); install it, or name "
            "its directory in PYTHONPATH"
        ) from error
    factory: Callable[[BackendSettings], BackendEngine] | None = getattr(module, attribute, None)
    if not callable(factory):
        raise TransportError(f"transport {name}: module {path} has no factory {attribute}")
    return factory


def make(name: str, settings: BackendSettings) -> BackendEngine:
    """The backend of one instance.  Raises TransportError if it is none, or cannot be made."""
    try:
        engine = load_factory(name)(settings)
    except TransportError:
        raise
    except Exception as error:
        raise TransportError(f"transport {name} cannot be made: {error!r}") from error
    if lacks := [name for name in PROMISED if not hasattr(engine, name)]:
        raise TransportError(
            f"transport {name} has no {', '.join(lacks)}: see docs/transports.md, Connectors of "
            "others"
        )
    return engine
