"""Where the sockets of one cluster lie on this host.

Processes find each other by themselves: a cluster is named by the HTTP port of its gateway, and its
ipc sockets lie in a private directory of that name. So `epd run --role gateway` in one terminal and
`epd run --role prefill+decode` in another are one cluster."""

from __future__ import annotations

import os
from pathlib import Path

from epd.config import ConfigError


def base_dir() -> Path:
    """$XDG_RUNTIME_DIR/epd where a login session has one, else /tmp/epd-UID."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK):
        return Path(runtime) / "epd"
    return Path("/tmp") / f"epd-{os.getuid()}"


def cluster_dir(port: int, base: Path | None = None) -> Path:
    """The private directory of the cluster whose gateway serves HTTP on `port`; not yet made."""
    return (base or base_dir()) / str(port)


def make_private(directory: Path) -> Path:
    """Make the directory with mode 0700.  Raises ConfigError when somebody else could use it."""
    try:
        for part in (directory.parent, directory):
            part.mkdir(mode=0o700, exist_ok=True)
        info = directory.parent.stat()
    except OSError as error:
        raise ConfigError(
            f"{directory} for the sockets cannot be made ({error.strerror}); give a directory of "
            "your own with --run-dir"
        ) from error
    if info.st_uid != os.getuid():
        raise ConfigError(
            f"{directory.parent} belongs to another user; give one of your own with --run-dir"
        )
    return directory


def ipc_endpoint(directory: Path, instance_id: str) -> str:
    return f"ipc://{directory}/{instance_id}.sock"


def remove_if_empty(directory: Path) -> None:
    """Give the directory back after the last process of its cluster has left."""
    for part in (directory, directory.parent):
        try:
            part.rmdir()
        except OSError:  # not empty: another cluster, or a process that still lives
            return
