"""Functions of modules that are imported when they are first called.

What a small cluster never asks for, it does not load.  The place is data, which a table can hold:
`epd.transport.tcp:TcpTransferEngine`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any


def later(place: str) -> Callable[..., Any]:
    """The function or class at `module:name`, whose module its first call imports."""

    def call(*args: object, **kwargs: object) -> object:
        return pkgutil.resolve_name(place)(*args, **kwargs)

    return call
