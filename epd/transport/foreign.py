"""Transfer backends that are not of this project, by the name `package.module:factory`.

The factory gets `BackendSettings` and returns a `TransferEngine` (`epd.transport.base`) with one
attribute more, `domain`; docs/transports.md says what it must promise, and `tests/contract` holds
it to that.  Its module is imported when an instance starts that names it, and at no other time.
"""

from __future__ import annotations

import importlib
from typing import Protocol, runtime_checkable

from epd.config import is_foreign
from epd.transport.backend import BackendFactory, BackendSettings
from epd.transport.base import TransferEngine, TransportError


@runtime_checkable
class Reaches(Protocol):
    """How far a backend reaches: two instances can use it between them if `domain` is equal."""

    @property
    def domain(self) -> str: ...


def load_factory(name: str) -> BackendFactory:
    """Raises TransportError if there is no such thing."""
    if not is_foreign(name):
        raise TransportError(
            f"there is no transfer backend {name!r}: others are named package.module:factory"
        )
    path, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(path)
    except Exception as error:  # whatever a stranger's module does while it is imported
        raise TransportError(
            f"transport {name}: module {path} cannot be imported ({error!r}); install it, or name "
            "its directory in PYTHONPATH"
        ) from error
    factory: BackendFactory | None = getattr(module, attribute, None)
    if not callable(factory):
        raise TransportError(f"transport {name}: module {path} has no factory {attribute}")
    return factory


def make(name: str, settings: BackendSettings) -> TransferEngine:
    """The backend of one instance.  Raises TransportError if it is none, or cannot be made."""
    try:
        engine = load_factory(name)(settings)
    except TransportError:
        raise
    except Exception as error:
        raise TransportError(f"transport {name} cannot be made: {error!r}") from error
    lacks = [m for m in ("allocate", "write", "settle", "fence") if not hasattr(engine, m)]
    if lacks or not isinstance(engine, Reaches):
        raise TransportError(
            f"transport {name} has no {', '.join(lacks) or 'domain'}: see docs/transports.md, "
            "Connectors of others"
        )
    return engine
