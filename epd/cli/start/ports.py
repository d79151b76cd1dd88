"""Is a TCP port free, and which one else?"""

from __future__ import annotations

import socket

import msgspec

from epd.config import ConfigError, Settings
from epd.transport.endpoint import is_tcp, split_own


def is_free(host: str, port: int) -> bool:
    """Somebody could listen there now.  Raises ConfigError when the address is not of this host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError:
            raise ConfigError(
                f"port {port} may not be used by this user; choose one above 1023"
            ) from None
        except socket.gaierror:
            raise ConfigError(f"host {host!r} is unknown; give an address of this host") from None
        except OSError as error:
            if error.errno == 99:  # EADDRNOTAVAIL
                raise ConfigError(f"{host} is no address of this host; give its own") from None
            return False
    return True


def any_free(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_free(host: str, port: int) -> None:
    """Raises ConfigError when a gateway could not listen on this port."""
    if not is_free(host, port):
        raise ConfigError(
            f"port {port} of {host} is in use; stop what listens there or choose another: --port "
            f"{any_free(host)}"
        )


def check_listen(endpoint: str, flag: str = "") -> None:
    """Raises ConfigError or TransportError when an endpoint of the control plane cannot be had."""
    if is_tcp(endpoint):
        name, port = split_own(endpoint)
        host = name.strip("[]")
        if not is_free(host, 0 if port == "*" else int(port)):
            raise ConfigError(
                f"{endpoint} is in use; stop what listens there or choose another: "
                f"{flag or f'--listen tcp://{name}:'}{any_free(host)}"
            )


def settle_port(settings: Settings, wanted: int | None) -> Settings:
    """Settings of a temporary server: the port that was asked for, by flag (`wanted`) or by a
    setting other than the default. Else any free one, since several such commands may run at once.

    Raises ConfigError when the port that was asked for is in use, or the host is not this one.
    """
    is_asked_for = wanted is not None or settings.port != Settings().port
    port = settings.port if is_asked_for else 0
    check_free(settings.host, port)
    return msgspec.structs.replace(settings, port=port or any_free(settings.host))
