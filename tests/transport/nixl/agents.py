"""Two bare agents of NIXL in processes of their own, on one host or two, and one write."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S

CHILD = str(Path(__file__).with_name("agent_child.py"))
ROOT = str(Path(__file__).parents[3])
NBYTES = 64 << 20  # more than the buffers of two kernels hold
OLD, NEW = 7, 9  # bytes of the source when a write is posted, and later


class AgentProcess:
    """`enter`: what a command begins with that is to run elsewhere."""

    def __init__(self, enter: tuple[str, ...] = (), **environment: str) -> None:
        card = "card" if enter else "lo"  # other tests' cables come and go
        own = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": card}  # by CMA no write takes long
        own |= {"PYTHONPATH": ROOT, **environment}
        self._process = subprocess.Popen(
            [*enter, sys.executable, "-P", CHILD],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **own},
            process_group=0,  # else the kernel may hang up pytest: see `Remote`
        )  # fmt: skip

    def ask(self, name: str, *arguments: Any) -> Any:
        """Raises EOFError where it has ended."""
        self.begin(name, *arguments)
        return self.answer()

    def begin(self, name: str, *arguments: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise EOFError(f"it ended: {self._process.wait()}")
        return json.loads(line)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    @property
    def ended_by(self) -> int:
        """A signal; 0: it runs."""
        return -(self._process.poll() or 0)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Pair:
    """Its write of NBYTES is posted, and ends only as the test lets it."""

    def __init__(self, owner: AgentProcess, writer: AgentProcess) -> None:
        self.owner, self.writer = owner, writer
        writer.ask("own", NBYTES)
        writer.ask("fill", OLD)
        writer.ask("load", *owner.ask("own", NBYTES))
        writer.ask("post", 4096)
        assert writer.ask("wait", PATIENCE_S) == "DONE"
        writer.ask("release")

    def post_to_a_stopped_owner(self) -> None:
        self.owner.signal(signal.SIGSTOP)
        assert self.writer.ask("post", NBYTES) == "PROC"

    def stop_in_mid_write(self) -> None:
        """The writer; and the owner can be asked."""
        self.post_to_a_stopped_owner()
        self.writer.signal(signal.SIGSTOP)
        self.owner.signal(signal.SIGCONT)
        self.arrived_at_rest()

    def arrived_at_rest(self) -> int:
        """Bytes of the write at its owner, once no more come."""
        before = -1
        while (arrived := sum(self.owner.ask("count", byte) for byte in (OLD, NEW))) != before:
            before = arrived
            time.sleep(0.5)
        return arrived


@contextlib.contextmanager
def pair(*enter: tuple[str, ...], **environment: str) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        processes = [AgentProcess(prefix, **environment) for prefix in enter or ((), ())]
        for process in processes:
            stack.callback(process.close)
        yield Pair(*processes)
