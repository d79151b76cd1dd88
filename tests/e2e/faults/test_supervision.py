"""Supervision that no line and no frozen process can turn off (faults F69, F79)."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.server import COLD, READY_S, Server, discarding, is_alive, wait_for

pytestmark = pytest.mark.timeout(300)
LONG = pytest.mark.long


@contextlib.contextmanager
def broken_pipe() -> Iterator[tuple[int, Callable[[], None]]]:
    """As of `epd run 2>&1 | tee log`, and the end of tee."""
    reader, writer = os.pipe()
    yield writer, lambda: os.close(reader)
    os.close(writer)


@contextlib.contextmanager
def pipe_that_nobody_reads() -> Iterator[tuple[int, Callable[[], None]]]:
    reader, writer = os.pipe()

    def fill() -> None:
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"." * 4096)
        os.set_blocking(writer, True)

    yield writer, fill
    os.close(reader)
    os.close(writer)


@contextlib.contextmanager
def full_disk() -> Iterator[tuple[int, Callable[[], None]]]:
    fd = os.open("/dev/full", os.O_WRONLY)
    yield fd, lambda: None
    os.close(fd)


@pytest.mark.parametrize(
    "stderr",
    [
        pipe_that_nobody_reads,
        pytest.param(broken_pipe, marks=LONG),
        pytest.param(full_disk, marks=LONG),
    ],
)
def test_with_a_stderr_that_takes_nothing_all_is_mended_and_ends(
    stderr: Callable[[], contextlib.AbstractContextManager[tuple[int, Callable[[], None]]]],
) -> None:
    """kill -9 of a worker and of the gateway; then a worker stands still when the supervisor is
    killed, and the next run names it, ends it, and serves in its place."""
    with stderr() as (fd, spoil), discarding(Server("1epd", stderr=fd)) as server:
        server.wait_ready()
        spoil()
        before = server.instances()["epd0"]
        os.kill(before["pid"], signal.SIGKILL)
        wait_for(lambda: is_back(server, before["epoch"]), READY_S, "epd0 is back")
        (gateway,) = [p for p in server.processes() if "epd.runtime.child" in p.cmdline()]
        gateway.kill()
        wait_for(lambda: is_back(server, before["epoch"]), READY_S, "a gateway is back")
        frozen = server.pid("epd0")
        os.kill(frozen, signal.SIGSTOP)
        server.send(signal.SIGKILL)
        server.wait()
        with discarding(Server("1epd", like=server)) as successor:
            successor.wait_ready()
            assert (
                f"epd0: process {frozen}, whose supervisor is gone, stands still" in successor.text
            )
            assert not is_alive(frozen)
            assert successor.stop() == 0, successor.text
        server.check_nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("stderr", [broken_pipe, pipe_that_nobody_reads, full_disk])
def test_with_a_stderr_that_takes_nothing_a_role_is_mended_and_ends(
    stderr: Callable[[], contextlib.AbstractContextManager[tuple[int, Callable[[], None]]]],
) -> None:
    """`--role` is supervised as `--topology` is."""
    with stderr() as (fd, spoil), discarding(Server("all", stderr=fd, program=COLD)) as server:
        server.wait_ready()
        spoil()
        before = server.instances()["all"]
        os.kill(before["pid"], signal.SIGKILL)
        wait_for(lambda: is_back(server, before["epoch"], "all"), READY_S, "it is back")
        assert server.stop(signal.SIGTERM) == 0


def is_back(server: Server, epoch: int, name: str = "epd0") -> bool:
    if server.get("/ready")[0] != 200:
        return False
    return bool(server.instances()[name]["epoch"] > epoch)
