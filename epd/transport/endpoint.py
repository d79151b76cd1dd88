"""Where a bus may listen and whom it may call: the checks behind every endpoint string.

`ipc://PATH` trusts the file system: the socket lies in a directory that is the user's alone.
`tcp://HOST:PORT` without a cluster key is for loopback only; anything further must be encrypted.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from pathlib import Path

from epd.transport.base import TransportError

WILDCARD_HOSTS = ("*", "0.0.0.0", "[::]")
MAX_IPC_PATH_NBYTES = 100  # the kernel's sockaddr_un holds 107


def is_tcp(endpoint: str) -> bool:
    return endpoint.startswith("tcp://")


def ipc_path(endpoint: str) -> str:
    """The socket file of an ipc endpoint, else an empty string."""
    return endpoint[len("ipc://") :] if endpoint.startswith("ipc://") else ""


def split_tcp(endpoint: str) -> tuple[str, str]:
    """Host and port.  Raises TransportError."""
    host, colon, port = endpoint[len("tcp://") :].rpartition(":")
    numeric = port.isascii() and port.isdigit() and int(port) < 65536
    if not is_tcp(endpoint) or not colon or not host or not (numeric or port == "*"):
        raise TransportError(
            f"endpoint {endpoint!r} cannot be used: write tcp://HOST:PORT or ipc:///PATH/NAME.sock"
        )
    return host, port


def split_own(endpoint: str) -> tuple[str, str]:
    """Of one to listen on: it names an address that peers can dial.  Raises TransportError."""
    host, port = split_tcp(endpoint)
    if host in WILDCARD_HOSTS:
        raise TransportError(
            f"{endpoint} listens everywhere, and peers are told one address: name that by "
            f"which other hosts reach this one, tcp://ADDRESS:{port}"
        )
    return host, port


def is_loopback(endpoint: str) -> bool:
    host = split_tcp(endpoint)[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_reach(endpoint: str, *, encrypted: bool) -> None:
    """Raises TransportError if messages to this endpoint could be read or forged by others."""
    path = ipc_path(endpoint)
    if path:
        if len(os.fsencode(path)) > MAX_IPC_PATH_NBYTES or not path.startswith("/"):
            raise TransportError(
                f"ipc path {path!r} cannot be used: it must be absolute and no longer than "
                f"{MAX_IPC_PATH_NBYTES} bytes; choose a shorter run directory"
            )
        return
    if not is_loopback(endpoint) and not encrypted:
        raise TransportError(
            f"{endpoint} is reachable from other hosts and needs encryption: pass the same "
            "--cluster-key FILE to every instance, or listen on 127.0.0.1"
        )


def prepare_ipc(path: str) -> None:
    """Make sure that a socket can be bound at `path`: private directory, no live owner.

    Makes the directory, and the one that it lies in: a run that ends as this one begins removes
    both when it leaves them empty.  Removes the socket of a dead process.  Raises TransportError.
    """
    directory = Path(path).parent
    try:
        directory.parent.mkdir(mode=0o700, exist_ok=True)
        if directory.parent.stat().st_uid in (0, os.geteuid()):  # who else has it could exchange it
            directory.mkdir(mode=0o700, exist_ok=True)
        info = directory.stat()
    except OSError as error:
        raise TransportError(
            f"directory {directory} of the ipc socket cannot be used ({error.strerror}): "
            "create it with mode 0700"
        ) from None
    if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise TransportError(
            f"directory {directory} is open to other users; ipc sockets need one of your own: "
            f"chmod 700 {directory}"
        )
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise TransportError(f"{path} exists and is not a socket: remove it or choose another path")
    if is_answered(path):
        raise TransportError(
            f"{path} is in use by a running process: stop it or choose another run directory"
        )
    os.unlink(path)


def is_answered(path: str, kind: int = socket.SOCK_STREAM) -> bool:
    """A process listens on this socket, or we may not ask."""
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # backlog full, or no permission: somebody is there
        return True
