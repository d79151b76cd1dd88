"""Mooncake's engine, from the package to one finished transfer.

The library reads its settings from the environment when it is imported, so they are set here, in
the process, before that.  It is imported where it is used: most instances never need it.

Measured: the synchronous calls and `get_batch_transfer_status` spin on a core; submitting, and
asking `transfer_check_status` with growing pauses, does not and is faster.  An id is not asked for
again after its terminal answer, for the library reuses ids.  Destroying an engine takes a
second, and a minute if a peer is frozen, with the interpreter lock held: so an engine is never
destroyed.  One that is given back with nothing in doubt serves the next who asks in this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from epd.config import MOONCAKE_OVER_TCP, MooncakeConfig
from epd.transport.base import TransportError
from epd.transport.host import TcpSocket
from epd.transport.linked.leave import End, FarRegion, Moved, WritePiece

ENVIRONMENT = {
    # a restarted peer that got its predecessor's port is found again; the dead are asked as well
    "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS": "10",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_TRANSFER_TIMEOUT": "30",
    "MC_LOG_LEVEL": "ERROR",
}
THRESHOLD = "_ZN3fLI17FLAGS_minloglevelE"  # of glog, in the libraries that the package links
FATAL = 3
FORCE_TCP = "MC_FORCE_TCP"  # else it takes RDMA where it finds a device, asked or not
INFINIBAND = "/sys/class/infiniband"
FIRST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 1e-3
MAX_SUBMITTED = 64  # pieces of one write under way at once
FAILED = -1  # a status; -2 is the library's time-out, 0 means under way, 1 done
GIVE_UP_S = 60.0  # the library's own limits are below; after this the outcome is unknown
PACKAGE = "mooncake-transfer-engine-non-cuda"
SYSTEM_PACKAGES = {"libibverbs": "libibverbs1", "libnuma": "libnuma1", "libcurl": "libcurl4"}


def load() -> Any:
    """The library's engine class.  Raises TransportError that names what to install."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake.engine import TransferEngine
    except ModuleNotFoundError:
        raise TransportError(
            f"the mooncake transport needs the package {PACKAGE}: pip install {PACKAGE} "
            "(mooncake-transfer-engine-cuda13 on a GPU machine)"
        ) from None
    except ImportError as error:
        missing = str(error).partition(":")[0]
        package = SYSTEM_PACKAGES.get(missing.partition(".so")[0], "")
        remedy = f"apt-get install {package or ' '.join(SYSTEM_PACKAGES.values())}"
        raise TransportError(
            f"the mooncake transport needs the system library {missing}: {remedy}"
        ) from None
    return TransferEngine


def check_devices(devices: str) -> None:
    """Raises TransportError unless this host has them: the library would silently take TCP."""
    try:
        here = sorted(os.listdir(INFINIBAND))
    except FileNotFoundError:
        here = []
    wanted = [name.strip() for name in devices.split(",") if name.strip()] or here[:1]
    missing = [name for name in wanted if name not in here]
    if not wanted or missing:
        raise TransportError(
            f"this host has no RDMA device {', '.join(missing)}".rstrip() + f"; {INFINIBAND} lists "
            f"{', '.join(here) or 'none'}: name those in mooncake.devices, or set "
            "mooncake.protocol to tcp"
        )


def set_up(config: MooncakeConfig) -> None:
    """The library's environment, for engines that are made in this process from now on; ports are
    those of the first one, for it reads them once."""
    for end, port in (("MIN", config.min_port), ("MAX", config.max_port)):
        os.environ[f"MC_{end}_RPC_PORT"] = str(port)
    if config.protocol == "rdma":
        os.environ.pop(FORCE_TCP, None)
    else:
        os.environ[FORCE_TCP] = "1"


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Around the start of an engine, which logs an error when all is well: it looks for the
    descriptor that it is about to make.  Failures of a start are returned, and not only logged."""
    module = sys.modules.get("mooncake.engine")
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(module.__file__), THRESHOLD) if module else None
    except ValueError:  # a build of the package without glog's symbols
        level = None
    if level is None:
        yield
        return
    before, level.value = level.value, FATAL
    try:
        yield
    finally:
        level.value = before


class Library:
    """One engine of the library, reachable at `host`:`port`; unauthenticated and unencrypted."""

    def __init__(self, host: str, config: MooncakeConfig = MOONCAKE_OVER_TCP) -> None:
        if config.protocol == "rdma":
            check_devices(config.devices)
        set_up(config)
        engine_class = load()
        self._engine = engine_class()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._engine))  # never destroyed
        with without_log():
            failed = self._engine.initialize(host, "P2PHANDSHAKE", config.protocol, config.devices)
        if failed:
            raise TransportError(
                f"mooncake cannot listen on {host}: give an address of this host, and leave ports "
                f"of {config.min_port} to {config.max_port} free (mooncake.min_port, max_port)"
            )
        self.host = host
        self.config = config
        self.port: int = self._engine.get_rpc_port()
        self._regions_at: Counter[int] = Counter()  # by address: one memory may be two of them

    @classmethod
    def acquire(cls, host: str, config: MooncakeConfig = MOONCAKE_OVER_TCP) -> Library:
        """One that was given back, or a new one.  Raises TransportError."""
        for library in _idle:
            if (library.host, library.config) == (host, config):
                _idle.remove(library)
                return library
        return cls(host, config)

    def give_back(self) -> None:
        """Nothing is registered or under way any more."""
        _idle.append(self)

    def carries(self, one: TcpSocket) -> bool:
        """A peer writes over connections that it opened.  Ours to a peer that died stay open."""
        return one.is_at_listener

    def register(self, address: int, nbytes: int) -> str:
        """See `Mover`."""
        if not self._regions_at[address] and self._engine.register_memory(address, nbytes):
            raise TransportError(
                f"mooncake cannot register {nbytes} bytes: raise the limit of locked memory "
                "(ulimit -l unlimited), or lower pool_nbytes or kv_nbytes"
            )
        self._regions_at[address] += 1
        return f"{self.host}:{self.port}"

    def unregister(self, address: int) -> None:
        self._regions_at[address] -= 1
        if not self._regions_at[address]:
            self._engine.unregister_memory(address)

    def transfer(self, to: FarRegion, pieces: Sequence[WritePiece]) -> Moved:
        """See `Mover`.  It has no means to ask again for a write without an end."""
        under_way: list[int] = []
        ends: set[End] = set()
        for piece in pieces:
            if len(under_way) >= MAX_SUBMITTED:
                under_way = self._wait(under_way, ends, limit=MAX_SUBMITTED - 1)
            if ends:
                break
            handle = self._engine.transfer_submit_write(
                to.word, piece.source, piece.target, piece.nbytes
            )
            if handle <= 0:
                ends.add(End.REFUSED)
                break
            under_way.append(handle)
        self._wait(under_way, ends, limit=0)
        worst_first = (End.ENDLESS, End.BROKEN, End.REFUSED)
        return Moved(next((end for end in worst_first if end in ends), End.DONE))

    def _wait(self, handles: list[int], ends: set[End], limit: int) -> list[int]:
        """Until at most `limit` are under way; returns those and notes bad ends."""
        pause_s, until_s = FIRST_PAUSE_S, time.monotonic() + GIVE_UP_S
        while True:
            waiting = []
            for handle in handles:
                status = self._engine.transfer_check_status(handle)
                if status == 0:
                    waiting.append(handle)
                elif status < 0:
                    ends.add(End.BROKEN if status == FAILED else End.ENDLESS)
            handles = waiting
            if len(handles) <= limit:
                return handles
            if time.monotonic() > until_s:
                ends.add(End.ENDLESS)
                return []
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)


_idle: list[Library] = []


def missing() -> str:
    """Why the library cannot be used here; empty if it can.  Imports it."""
    try:
        load()
    except TransportError as error:
        return str(error)
    return ""
