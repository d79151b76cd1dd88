"""Clusters of tests on two hosts: patient, from the shared zygote, and with an orderly end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from epd_lab.bench.chaos.cluster import TwoHosts
from epd_lab.bench.chaos.cluster import cluster as made_of
from tests.e2e.server import Command, Server
from tests.e2e.streams import PATIENT

_SET = (f"{key.replace('__', '.')}={value}" for key, value in PATIENT.items())
FLAGS = tuple(word for setting in _SET for word in ("--set", setting))


@contextlib.contextmanager
def cluster(
    parts: tuple[str, str], directory: Path, *flags: str, **hosts: Any
) -> Iterator[TwoHosts]:
    """At the end nothing may be in use and nothing may be left of it."""
    kinds = (Server, Command)
    with made_of(parts, directory, *FLAGS, *flags, kinds=kinds, **hosts) as made:
        yield made
        made.stop()
