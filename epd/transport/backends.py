"""All transfer backends: those of `epd`, a line each, and those of others, by their names.

Order, choices, checks, what `auto` offers, what `epd doctor` looks at and the table in
docs/transports.md follow from what each says of itself.
"""

from __future__ import annotations

import difflib

from epd.transport import foreign, tcp
from epd.transport.backend import Backend
from epd.transport.base import TransportError
from epd.transport.cuda import backend as cuda
from epd.transport.files import backend as file
from epd.transport.mooncake import backend as mooncake
from epd.transport.shm import backend as shm

BACKENDS = {
    backend.name: backend
    for backend in (
        cuda.BACKEND,
        shm.BACKEND,
        mooncake.BACKEND,
        tcp.BACKEND,
        file.BACKEND,
    )
}
NAMES = ("auto", *BACKENDS)


def problem(transport: str) -> str:
    """What is wrong with `auto`, or some names with commas between them; empty if nothing."""
    names = transport.split(",")
    known = NAMES if len(names) == 1 else tuple(BACKENDS)
    wrong = [name for name in names if name not in known and not foreign.is_foreign(name)]
    if not wrong and len(set(names)) == len(names):
        return ""
    close = difflib.get_close_matches((wrong or [""])[0], NAMES, n=1)
    return (
        f"it must be auto, or some of {', '.join(BACKENDS)} and package.module:factory with commas "
        f"between them{f'; did you mean {close[0]}?' if close else ''}"
    )


def chosen(
    transport: str, endpoint: str, directory: str, device: str = "cpu"
) -> tuple[Backend, ...]:
    """The backends that an instance sets up whose bus listens at `endpoint`, and which computes on
    `device`.

    `auto` never opens a port for the data plane beside a bus on ipc.  Raises TransportError.
    """
    if transport == "auto":
        there = (b for b in BACKENDS.values() if device != "cpu" or not b.on_device)
        return tuple(b for b in there if b.is_offered(endpoint, directory))
    if wrong := problem(transport):
        raise TransportError(f"there is no transport {transport!r}: {wrong}")
    return tuple(map(named, transport.split(",")))


def named(name: str) -> Backend:
    """Raises TransportError if there is no such backend."""
    if name not in BACKENDS and not foreign.is_foreign(name):
        raise TransportError(f"there is no transport {name!r}: choose one of {', '.join(BACKENDS)}")
    return BACKENDS.get(name) or foreign.backend(name)


def table() -> str:
    """Markdown for docs/transports.md."""
    rows = [("Offer", "Domain", "Offered under `auto`"), ("---",) * 3]
    rows += [("`local`", "the process", "always")]
    rows += [(f"`{b.name}`", b.domain, b.offered) for b in BACKENDS.values()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
