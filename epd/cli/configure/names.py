"""What instances are called that join a gateway elsewhere: unique in its cluster, and stable.

Theory of operation
-------------------
An address names one network namespace of the cluster's network, or others could not reach it. So
the host's name, the address that an instance listens on, and a number that is taken once in that
namespace are unique together (fault F78). Who joins over loopback is in the gateway's own
namespace, and needs no address. The number is an abstract socket of the kernel: containers that
share a network share it, no file is left, and it is free again when its process has ended. A
command that is started anew gets the number that it had, unless another has taken it meanwhile.
"""

from __future__ import annotations

import functools
import hashlib
import re
import socket

from epd.config import ConfigError
from epd.transport.endpoint import is_loopback, is_tcp, split_tcp

MAX_HOST = 40  # characters
MAX_COMMANDS = 256  # of one host that join

_taken: list[socket.socket] = []  # until this process ends


def default_prefix(join: str, listen: str) -> str:
    """Of what this command starts; empty if it has a gateway of its own.  Raises ConfigError."""
    if not join:
        return ""
    host = re.sub(r"[^A-Za-z0-9_]+", "-", socket.gethostname().partition(".")[0]).strip("-_")
    base = host[:MAX_HOST] or "host"
    if is_tcp(listen) and not is_loopback(listen):
        base += f"-{hashlib.sha256(split_tcp(listen)[0].encode()).hexdigest()[:6]}"
    return _take(base)


def gateway_name(listen: str) -> str:
    """Of a gateway: one of a kind among those of a cluster that others reach by address."""
    if not is_tcp(listen):
        return "gateway"
    return f"gateway-{re.sub(r'[^A-Za-z0-9]+', '-', ':'.join(split_tcp(listen))).strip('-')}"[:100]


@functools.cache
def _take(base: str) -> str:
    """With the first free number behind it, but for the first."""
    for number in range(1, MAX_COMMANDS + 1):
        name = base if number == 1 else f"{base}-{number}"
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            mark.bind(f"\0epd-names-{name}")
        except OSError:
            mark.close()
            continue
        _taken.append(mark)
        return name
    raise ConfigError(
        f"{MAX_COMMANDS} commands of this host have joined under the name {base}: give "
        "--id-prefix NAME"
    )
