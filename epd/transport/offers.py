"""What one instance can offer its peers, and where each offer ends: names and domains.

See `epd.scheduling.pairing` for what a domain is.  Whatever is offered is set up before the
instance joins, so that an offer is never an empty promise.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets

from epd.config import TRANSPORTS, is_transport
from epd.messages import TransportOffer
from epd.transport.base import TransportError
from epd.transport.endpoint import is_loopback, is_tcp
from epd.transport.host import this_host_id
from epd.transport.shm_segment import DIRECTORY

NAME_OF_DIRECTORY = ".epd-directory"


def offered(transport: str, endpoint: str, directory: str) -> tuple[str, ...]:
    """Names of the backends that an instance sets up whose bus listens at `endpoint`.

    The first one allocates.  `auto`: shared memory; mooncake, if it is installed, and TCP where the
    bus itself is on TCP (beside ipc no port is opened for the data plane); files if a shared
    directory is configured.  Raises TransportError for a name that is none.
    """
    if transport != "auto":
        if not is_transport(transport):
            raise TransportError(
                f"there is no transport {transport!r}: choose one of {', '.join(TRANSPORTS)}"
            )
        return tuple(transport.split(","))
    names = ["shm"]
    if is_tcp(endpoint):
        if not is_loopback(endpoint) and is_mooncake_usable():
            names.append("mooncake")
        names.append("tcp")
    if directory:
        names.append("file")
    return tuple(names)


def is_mooncake_usable() -> bool:
    """Installed with all that it needs; imports it if it is there."""
    if importlib.util.find_spec("mooncake") is None:
        return False
    from epd.transport.mooncake_library import missing

    return not missing()


def offer(name: str, host: str, directory: str) -> TransportOffer:
    """A backend of this process and its domain; `host`: where its listeners are."""
    if name == "local":
        return TransportOffer(name, f"{this_host_id()}:{os.getpid()}")
    if name == "shm":
        return TransportOffer(name, shm_domain())
    if name == "file":
        return TransportOffer(name, directory_domain(directory))
    return TransportOffer(name, loopback_domain() if is_loopback(f"tcp://{host}:*") else "")


def shm_domain(directory: str = DIRECTORY) -> str:
    """This boot of this host, and its mount of /dev/shm: containers may have one of their own."""
    return f"{this_host_id()}:{os.stat(directory).st_dev}"


def loopback_domain() -> str:
    """This boot of this host, and the network namespace in which its loopback is."""
    try:
        return f"{this_host_id()}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return this_host_id()


def directory_domain(directory: str) -> str:
    """A token that lies in the directory: who reads the same one shares it.

    Raises TransportError when the directory cannot be used.
    """
    path = os.path.join(directory, NAME_OF_DIRECTORY)
    mine = f"{path}.{secrets.token_hex(8)}"
    try:
        if not os.path.exists(path):
            with open(mine, "x", encoding="ascii") as file:
                file.write(secrets.token_hex(16))
            with contextlib.suppress(FileExistsError):
                os.link(mine, path)  # appears whole, and once
            os.unlink(mine)
        with open(path, encoding="ascii") as file:
            return file.read(64)
    except OSError as error:
        raise TransportError(
            f"the shared directory {directory} cannot be used: {error.strerror}; name one that all "
            "instances may write to"
        ) from None
