"""All transfer backends: those of `epd`, an entry each, and those of others, by their names.

Order, choices, checks, what `auto` offers, what `epd doctor` looks at and the table in
docs/transports.md follow from the entries.  A backend's modules are imported when one is made.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import replace

from epd.later import later
from epd.records import TransportLack
from epd.transport.backend import Backend
from epd.transport.base import TransportError
from epd.transport.endpoint import is_loopback, is_tcp

_FOREIGN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_cuda_lacks = later("epd.transport.cuda.driver:missing")
_mooncake_lacks = later("epd.transport.mooncake.library:missing")
_nixl_lacks = later("epd.transport.nixl.library:missing")


def _can_use_mooncake(endpoint: str, directory: str) -> bool:
    """The package is imported only where it is there and would be of use."""
    if not is_tcp(endpoint) or is_loopback(endpoint):
        return False
    return importlib.util.find_spec("mooncake") is not None and not _mooncake_lacks()


BY_ADDRESS = "none, beyond loopback; on loopback the network namespace"
_ALL = (
    Backend(
        "cuda", rank=8, leaves_host=False,
        make=later("epd.transport.cuda.backend:make"),
        memory=later("epd.transport.cuda.backend:memory"),
        is_offered=lambda endpoint, directory: not _cuda_lacks(),
        domain="this boot of the host, its user's sockets, and the GPUs that reach each other",
        offered="if the instance computes on a GPU that can export memory",
        lacks=_cuda_lacks,
        is_expected=True,
    ),
    Backend(
        "shm", rank=10, leaves_host=False,
        make=later("epd.transport.shm.backend:ShmTransferEngine"),
        is_offered=lambda endpoint, directory: True,
        domain="this boot of the host, its pid namespace and its mount of /dev/shm",
        offered="always",
    ),
    Backend(
        "mooncake", rank=20, leaves_host=True,
        make=later("epd.transport.mooncake.backend:MooncakeTransferEngine"),
        is_offered=_can_use_mooncake,
        domain=BY_ADDRESS,
        offered="if the bus listens where other hosts reach it, and the package works",
        lacks=_mooncake_lacks,
        is_expected=True,
    ),
    Backend(
        "nixl", rank=25, leaves_host=True,
        make=later("epd.transport.nixl.backend:NixlTransferEngine"),
        is_offered=lambda endpoint, directory: False,
        domain=BY_ADDRESS,
        offered="never: it must be named",
        lacks=_nixl_lacks,
    ),
    Backend(
        "tcp", rank=30, leaves_host=True, make=later("epd.transport.tcp:TcpTransferEngine"),
        is_offered=lambda endpoint, directory: is_tcp(endpoint),
        domain=BY_ADDRESS,
        offered="if the bus is on tcp",
    ),
    Backend(
        "file", rank=40, leaves_host=True,
        make=later("epd.transport.files.backend:FileTransferEngine"),
        is_offered=lambda endpoint, directory: bool(directory),
        domain="a token that lies in the directory",
        offered="if `--transport-dir` is given",
    ),
)  # fmt: skip
BACKENDS = {backend.name: backend for backend in _ALL}
_ON_GPU = {  # of an instance that computes there, and has no other backend there
    "nixl": replace(
        BACKENDS["nixl"], leaves_host=False,
        make=later("epd.transport.nixl.on_device:make"),
        memory=later("epd.transport.nixl.on_device:memory"),
    )
}  # fmt: skip
_foreign = later("epd.transport.foreign:backend")
MAX_REASON = 500
NAMES = ("auto", *BACKENDS)


def is_foreign(name: str) -> bool:
    """Whether a transport's name is `package.module:factory`, code of others."""
    return _FOREIGN.fullmatch(name) is not None


def problem(transport: str) -> str:
    """What is wrong with `auto`, or some names with commas between them; empty if nothing."""
    names = transport.split(",")
    known = NAMES if len(names) == 1 else tuple(BACKENDS)
    wrong = [name for name in names if name not in known and not is_foreign(name)]
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
    """The backends of an instance whose bus listens at `endpoint`, and which computes on `device`.

    `auto` never opens a port for the data plane beside a bus on ipc.  Raises TransportError.
    """
    if transport == "auto":
        there = (b for b in BACKENDS.values() if device != "cpu" or not b.on_device)
        return tuple(b for b in there if b.is_offered(endpoint, directory))
    if wrong := problem(transport):
        raise TransportError(f"there is no transport {transport!r}: {wrong}")
    backends = tuple(map(named, transport.split(",")))
    if device == "cpu" or any(one.on_device for one in backends):
        return backends
    return tuple(_ON_GPU.get(one.name, one) for one in backends)


def lacked(endpoint: str, device: str = "cpu") -> Iterator[TransportLack]:
    """What `auto` would offer there, and why it does not: of what takes bytes between GPUs, or to
    other hosts."""
    leads_away = is_tcp(endpoint) and not is_loopback(endpoint)
    for backend in (one for one in BACKENDS.values() if one.is_expected):
        wanted = device != "cpu" if backend.on_device else leads_away
        if wanted and not backend.is_offered(endpoint, "") and (reason := backend.lacks()):
            yield TransportLack(name=backend.name, reason=reason[:MAX_REASON])


def named(name: str) -> Backend:
    """Raises TransportError if there is no such backend."""
    if name not in BACKENDS and not is_foreign(name):
        raise TransportError(f"there is no transport {name!r}: choose one of {', '.join(BACKENDS)}")
    return BACKENDS.get(name) or _foreign(name)


def table() -> str:
    """Markdown for docs/transports.md."""
    rows = [("Offer", "Domain", "Offered under `auto`"), ("---",) * 3]
    rows += [("`local`", "the process", "always")]
    rows += [(f"`{b.name}`", b.domain, b.offered) for b in BACKENDS.values()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
