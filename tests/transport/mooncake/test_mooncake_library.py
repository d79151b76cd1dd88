"""The edge to mooncake's library: what is missing is named, and no answer is asked for twice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from epd.config import MooncakeConfig
from epd.transport.base import TransportError
from epd.transport.linked.leave import End, FarRegion, WritePiece
from epd.transport.mooncake import library as mooncake_library
from epd.transport.mooncake.library import Library, check_devices, load, missing


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransportError, match="pip install mooncake-transfer-engine-non-cuda"):
        load()
    assert "pip install" in missing()


@pytest.mark.parametrize(
    ("library", "package"),
    [
        ("libibverbs.so.1", "libibverbs1"),
        ("libnuma.so.1", "libnuma1"),
        ("libcurl.so.4", "libcurl4"),
        ("libstrange.so", "libibverbs1 libnuma1 libcurl4"),
    ],
)
def test_a_missing_system_library_is_named(
    monkeypatch: pytest.MonkeyPatch, library: str, package: str
) -> None:
    class Broken(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise ImportError(f"{library}: cannot open shared object file: No such file")

    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", Broken("mooncake.engine"))
    with pytest.raises(TransportError, match=f"apt-get install {package}$"):
        load()


class FakeEngine:
    """Says what it is told to; an id asked for after its end is a test's failure."""

    def __init__(self, statuses: dict[int, list[int]]) -> None:
        self.statuses = statuses
        self.submitted: list[int] = []
        self.most_under_way = 0

    def transfer_submit_write(self, peer: str, source: int, target: int, nbytes: int) -> int:
        handle = source
        if handle > 0:
            self.submitted.append(handle)
        under_way = sum(bool(self.statuses[handle]) for handle in self.submitted)
        self.most_under_way = max(self.most_under_way, under_way)
        return handle

    def transfer_check_status(self, handle: int) -> int:
        assert self.statuses[handle], f"{handle} was asked for after its terminal answer"
        status = self.statuses[handle].pop(0)
        if status:
            assert not self.statuses[handle]
        return status


def library(engine: FakeEngine) -> Library:
    made = Library.__new__(Library)
    made._engine = engine
    return made


def transfer(engine: FakeEngine, handles: list[int]) -> End:
    pieces = [WritePiece(handle, 0, 1) for handle in handles]
    return library(engine).transfer(FarRegion("peer", 0, 1, 1), pieces).end


@pytest.mark.parametrize(
    ("statuses", "handles", "end"),
    [
        ({}, [], End.DONE),
        ({1: [0, 0, 1], 2: [1]}, [1, 2], End.DONE),
        ({1: [1]}, [1, -1, 2], End.REFUSED),
        ({1: [1]}, [1, 0], End.REFUSED),
        ({1: [0, -1], 2: [0, 0, 0, 1]}, [1, 2], End.BROKEN),
        ({1: [0, -2], 2: [-1]}, [1, 2], End.ENDLESS),
        ({1: [-1]}, [1, -1], End.BROKEN),
    ],
)
def test_the_worst_piece_decides(
    statuses: dict[int, list[int]], handles: list[int], end: End
) -> None:
    engine = FakeEngine(statuses)
    assert transfer(engine, handles) is end
    assert not any(statuses.values()), "a piece was left before its end"


def test_many_pieces_are_submitted_a_few_at_a_time() -> None:
    engine = FakeEngine({handle: [0, 1] for handle in range(1, 200)})
    assert transfer(engine, list(range(1, 200))) is End.DONE
    assert engine.most_under_way <= mooncake_library.MAX_SUBMITTED


def test_what_does_not_end_is_given_up_as_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_library, "GIVE_UP_S", 0.01)
    assert transfer(FakeEngine({1: [0] * 100_000}), [1]) is End.ENDLESS


def test_polling_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 us growing to 1 ms: a long transfer costs a thousand questions a second, not a core."""
    pauses: list[float] = []
    sleep: Callable[[float], None] = pauses.append
    monkeypatch.setattr(mooncake_library.time, "sleep", sleep)
    assert transfer(FakeEngine({1: [0] * 50 + [1]}), [1]) is End.DONE
    assert pauses[0] == 20e-6 and pauses[-1] == 1e-3 and pauses == sorted(pauses)


class Initialized(FakeEngine):
    """Notes what it is initialized with, and what the environment says then."""

    asked: tuple[object, ...] = ()
    ports: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__({})

    def initialize(self, *asked: str) -> int:
        type(self).asked = (*asked, os.environ.get("MC_FORCE_TCP"))
        type(self).ports = tuple(os.environ[f"MC_{end}_RPC_PORT"] for end in ("MIN", "MAX"))
        return 0

    def get_rpc_port(self) -> int:
        return 15000


def test_protocol_and_devices_reach_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mooncake_library, "load", lambda: Initialized)
    monkeypatch.setattr(mooncake_library, "INFINIBAND", str(tmp_path))
    monkeypatch.setenv("MC_FORCE_TCP", "0")
    (tmp_path / "mlx5_0").mkdir()
    (tmp_path / "mlx5_1").mkdir()
    Library("10.0.0.1")
    assert Initialized.asked == ("10.0.0.1", "P2PHANDSHAKE", "tcp", "", "1")
    assert Initialized.ports == ("15000", "17000")
    Library("10.0.0.1", MooncakeConfig("rdma", "mlx5_0,mlx5_1"))
    assert Initialized.asked == ("10.0.0.1", "P2PHANDSHAKE", "rdma", "mlx5_0,mlx5_1", None)


LISTEN = """
from epd.config import MooncakeConfig
from epd.transport.linked.leave import FarRegion, WritePiece
from epd.transport.mooncake.library import Library
import ctypes, os, sys
span = MooncakeConfig(min_port=int(os.environ["FROM"]), max_port=int(os.environ["TO"]))
library = Library("127.0.0.1", span)
print(library.port, flush=True)
print("listens", file=sys.stderr, flush=True)
memory = ctypes.create_string_buffer(64)
library.register(ctypes.addressof(memory), 64)
nowhere = FarRegion("127.0.0.1:9", 0, 64, 1)
print(library.transfer(nowhere, [WritePiece(ctypes.addressof(memory), 0, 64)]).end, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_the_library_listens_where_the_settings_say() -> None:
    """In a process of its own: it reads its ports once.  A start logs nothing, an error later is
    shown."""
    span = {"FROM": "23400", "TO": "23450"}
    child = [sys.executable, "-c", LISTEN]
    ended = subprocess.run(
        child, env={**os.environ, **span}, capture_output=True, text=True, timeout=60, check=True
    )
    port, end = ended.stdout.split()
    assert 23400 <= int(port) <= 23450 and end == "End.REFUSED"
    assert ended.stderr.startswith("listens\n") and "Connection refused" in ended.stderr


def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The library itself would take TCP and say nothing."""
    monkeypatch.setattr(mooncake_library, "INFINIBAND", str(tmp_path / "nothing"))
    with pytest.raises(TransportError, match=r"lists none: .*mooncake.protocol to tcp"):
        check_devices("")
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(mooncake_library, "INFINIBAND", str(tmp_path))
    check_devices("")
    check_devices("mlx5_0")
    with pytest.raises(TransportError, match=r"no RDMA device mlx5_7; .* lists mlx5_0"):
        check_devices("mlx5_0, mlx5_7")
