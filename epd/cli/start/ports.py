"""Is a TCP port free, and which one else?"""

from __future__ import annotations

import socket

import msgspec

from epd.config import ConfigError, Settings


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
                raise ConfigError(f"{host} is no address of this host; try 127.0.0.1") from None
            return False
    return True


def any_free(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_free(host: str, port: int) -> None:
    """Raises ConfigError when a gateway could not listen on this port."""
    if port and not is_free(host, port):
        raise ConfigError(
            f"port {port} of {host} is in use; stop what listens there or choose another: --port "
            f"{any_free(host)}"
        )


def settle_port(settings: Settings, wanted: int | None) -> Settings:
    """Settings whose port is free now: the one asked for, or, if none was, the default or any.

    Raises ConfigError when the port that was asked for is in use.
    """
    if wanted:
        check_free(settings.host, wanted)
        return settings
    if settings.port and is_free(settings.host, settings.port):
        return settings
    return msgspec.structs.replace(settings, port=any_free(settings.host))
