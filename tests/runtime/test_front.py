"""What a gateway says to its supervisor of other processes."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from epd.runtime.front import _lost_here
from epd.transport.host import this_host_id


def test_the_lost_of_this_host_are_told_and_never_oneself() -> None:
    """Fault F79; a process id means nothing elsewhere, and one process for all lives."""

    def instance(pid: int, *, was_lost: bool = True, host_id: str = this_host_id()) -> Any:
        return SimpleNamespace(was_lost=was_lost, info=SimpleNamespace(pid=pid, host_id=host_id))

    instances = [
        instance(7),
        instance(8, was_lost=False),
        instance(9, host_id="elsewhere"),
        instance(os.getpid()),
    ]
    gateway: Any = SimpleNamespace(registry=SimpleNamespace(instances=instances))
    assert _lost_here(gateway) == {7}
