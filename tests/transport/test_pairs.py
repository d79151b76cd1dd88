"""One memory, several ways to it: what arrives by each is there, and none of them leaks."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace as replace_config

from epd.config import InstanceConfig, MooncakeConfig
from epd.messages import Address
from epd.runtime.loading import backends_of, lacks_of
from epd.transport.backend import BackendSettings
from epd.transport.backends import BACKENDS, chosen, lacked, named, table
from epd.transport.base import Reference, TransportError, WriteFailed, Written
from epd.transport.checksum import crc32
from epd.transport.cuda.backend import CudaTransferEngine
from epd.transport.files.backend import FileTransferEngine
from epd.transport.local import LocalMemory
from epd.transport.mooncake.library import missing
from epd.transport.routing import RoutingTransferEngine
from tests.contract.transfer_kit import heads_land_where_slots_are_cut_into_them
from tests.transport.fake_device import FakeDevice

OTHERS = ("tcp", "file", *(() if missing() else ("mooncake",)))
SLOT_NBYTES = 3000


def engine(name: str, directory: Path, *names: str) -> RoutingTransferEngine:
    """With a table of its own, as in a process of its own."""
    settings = BackendSettings(name, os.getpid(), directory=str(directory))
    return RoutingTransferEngine(settings, LocalMemory(), [*map(named, names)])


@pytest.mark.parametrize("by_reference", [True, False])
async def test_one_region_is_reached_over_shm_tcp_file_and_mooncake(
    tmp_path: Path, *, by_reference: bool
) -> None:
    prefill = engine("pairs-p", tmp_path, "shm", *OTHERS)
    producers = {n: engine(f"pairs-{n}", tmp_path, n) for n in ("shm", *OTHERS)}
    region = prefill.allocate("rows", 2 * len(producers), SLOT_NBYTES, by_reference=by_reference)
    try:
        for turn in range(3):  # slots are leased again and again, over other transports
            names = [*producers][turn:] + [*producers][:turn]
            slots = {name: (2 * i + 1, 2 * i) for i, name in enumerate(names)}
            content = {name: bytes([turn + 1, i]) * 2500 for i, name in enumerate(names)}
            outcomes = await asyncio.gather(
                *(
                    producers[name].write(
                        [content[name]], prefill.descriptor(region, name), slots[name]
                    )
                    for name in names
                )
            )
            assert [type(outcome) for outcome in outcomes] == [Written] * len(names)
            for name in names:
                assert b"".join(region.views(slots[name], 5000)) == content[name], (turn, name)
            whole = bytes(region.buffer)
            for name in names:
                content_at = b"".join(whole[s * SLOT_NBYTES :][:SLOT_NBYTES] for s in slots[name])
                assert by_reference or content_at[:5000] == content[name], (turn, name)
                region.forget(slots[name])
        for name in OTHERS:  # whatever becomes of that process, which is alive
            where = prefill.descriptor(region, name)
            assert where.backend == name
            await prefill.fence(Address(f"pairs-{name}", os.getpid(), ""), "elsewhere", 1)
            assert isinstance(await producers[name].write([b"x"], where, (0,)), WriteFailed)
        remotes = {name: prefill.descriptor(region, name) for name in producers}
        prefill.revoke(region)
        for name, producer in producers.items():
            assert isinstance(await producer.write([b"x"], remotes[name], (0,)), WriteFailed), name
    finally:
        for each in (*producers.values(), prefill):
            await each.close()
    assert [p.name for p in tmp_path.iterdir()] == [".epd-directory"]


async def test_offers_are_equal_exactly_where_bytes_can_go(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one = engine("pairs-1", tmp_path / "a", "shm", "tcp", "file")
    two = engine("pairs-2", tmp_path / "a", "shm", "file")
    other = engine("pairs-3", tmp_path / "b", "file")
    try:
        assert {o.name for o in one.offers if o in two.offers} == {"local", "shm", "file"}
        assert [o.name for o in one.offers if o in other.offers] == ["local"]  # one process
    finally:
        for each in (one, two, other):
            await each.close()


async def test_a_directory_is_known_by_what_lies_in_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    engines = [
        FileTransferEngine(BackendSettings(n, 1, directory=str(tmp_path / n)))
        for n in ("a", "link")
    ]
    token = engines[0].domain
    assert len(token) == 32 and engines[1].domain == token
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(TransportError, match="cannot be used"):
        _ = engines[0].domain
    for each in engines:
        await each.close()


@pytest.mark.parametrize(
    ("transport", "endpoint", "directory", "names"),
    [
        ("auto", "ipc:///run/e0.sock", "", ("shm",)),
        ("auto", "ipc:///run/e0.sock", "/mnt/rows", ("shm", "file")),
        ("auto", "tcp://127.0.0.1:*", "", ("shm", "tcp")),
        ("mooncake", "tcp://10.0.0.7:*", "", ("mooncake",)),
        ("file", "ipc:///run/e0.sock", "", ("file",)),
    ],
)
def test_what_is_offered(
    transport: str, endpoint: str, directory: str, names: tuple[str, ...]
) -> None:
    assert tuple(b.name for b in chosen(transport, endpoint, directory)) == names


@pytest.mark.parametrize("usable", [True, False])
def test_mooncake_is_offered_to_other_hosts_where_it_works(
    usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd.transport.mooncake.library.missing", lambda: "" if usable else "no")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    names = tuple(b.name for b in chosen("auto", "tcp://10.0.0.7:*", ""))
    assert names == (("shm", "mooncake", "tcp") if usable else ("shm", "tcp"))


@pytest.mark.parametrize("rdma", [True, False])
def test_what_is_missing_for_other_hosts_is_named(
    rdma: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And refused where it was asked for by hand, as by `--transport`."""
    monkeypatch.setattr("epd.transport.mooncake.library.missing", lambda: "no libnuma")
    far, near = "tcp://10.0.0.7:*", "tcp://127.0.0.1:*"
    assert [(one.name, one.reason) for one in lacked(far)] == [("mooncake", "no libnuma")]
    assert not list(lacked(near))
    mooncake = MooncakeConfig(protocol="rdma" if rdma else "tcp")
    config = InstanceConfig(instance_id="e0", roles=("encode",), endpoint=far, mooncake=mooncake)
    if rdma:
        with pytest.raises(TransportError, match=r"mooncake\.protocol is rdma, and no libnuma"):
            backends_of(config)
    else:
        assert [one.name for one in backends_of(config)] == ["shm", "tcp"]
        assert [one.name for one in lacks_of(config)] == ["mooncake"]
        assert not lacks_of(replace_config(config, transport="shm,tcp"))


def test_an_unknown_transport_is_refused_by_name() -> None:
    with pytest.raises(
        TransportError, match="'pigeon': it must be auto, or some of cuda, shm, moonc"
    ):
        chosen("pigeon", "ipc:///run/e0.sock", "")


def test_the_documents_have_the_table_of_backends() -> None:
    text = (Path(__file__).parents[2] / "docs" / "transports.md").read_text()
    assert table() in text, "put this there:\n" + table()


async def test_offers_are_told_best_first_whatever_allocates(tmp_path: Path) -> None:
    assert [b.name for b in sorted(BACKENDS.values(), key=lambda b: b.rank)] == [*BACKENDS]
    theirs = "tests.contract.example_backend:MappedFiles"
    options = {"directory": str(tmp_path)}
    settings = BackendSettings("pairs-o", os.getpid(), directory=str(tmp_path), options=options)
    made = RoutingTransferEngine(
        settings, LocalMemory(), [named(n) for n in ("file", "tcp", theirs, "shm")]
    )
    assert [o.name for o in made.offers] == ["local", theirs, "shm", "tcp", "file"]
    assert made.allocate("rows", 1, 64).remote.backend == "file"
    await made.close()


def _summed(
    name: str, directory: Path, *names: str, memory: LocalMemory | None = None
) -> RoutingTransferEngine:
    settings = BackendSettings(name, os.getpid(), directory=str(directory))
    backends = [*map(named, names)]
    return RoutingTransferEngine(settings, memory or LocalMemory(), backends, checksums="always")


def between_devices(
    name: str, directory: Path, *names: str, memory: LocalMemory | None = None
) -> RoutingTransferEngine:
    """Computes on a (fake) device."""

    def make(its: BackendSettings) -> CudaTransferEngine:
        return CudaTransferEngine(its, FakeDevice(), str(directory))

    settings = BackendSettings(name, os.getpid(), directory=str(directory), device="cuda")
    backends = [replace(named("cuda"), make=make), *map(named, names)]
    return RoutingTransferEngine(settings, memory or LocalMemory(), backends, checksums="always")


@pytest.mark.parametrize("others", [("shm",), ()])
async def test_a_slot_lies_in_host_memory_or_in_its_mirror_as_the_pair_says(
    private: Path, others: tuple[str, ...]
) -> None:
    decode = between_devices("pairs-d", private, *others)
    near, far = between_devices("pairs-n", private, *others), engine("pairs-f", private, "shm")
    region = decode.allocate("kv", 4, 64)
    assert region.remote.backend == (others or ("local",))[0]
    assert decode.landing(region, "cuda") is region, "there is no mirror yet"
    mirror = decode.mirror(region)
    try:
        assert mirror is not None and mirror.remote.backend == "cuda"
        assert decode.landing(region, "cuda") is mirror
        assert decode.landing(region, "shm") is region
        assert decode.descriptor(region, "cuda") == mirror.remote
        assert decode.descriptor(region, "shm") == region.remote
        assert near.takes_references(mirror.remote)
        assert not near.takes_references(region.remote)
        assert not far.takes_references(mirror.remote)
        rows = Reference(SimpleNamespace(raw=lambda: b"near" * 16), 64)
        written = await near.write([rows], decode.descriptor(region, "cuda"), (2,))
        assert written == Written(64, crc32(b"near" * 16))
        assert bytes(mirror.views((2,), 64)[0]) == b"near" * 16
        assert bytes(region.views((2,), 64)[0]) == bytes(64)
        if others:
            assert isinstance(
                await far.write([b"far!" * 16], decode.descriptor(region, "shm"), (2,)), Written
            )
            assert bytes(region.views((2,), 64)[0]) == b"far!" * 16
        assert isinstance(await far.write([b"x"], mirror.remote, (0,)), WriteFailed)
        remote = mirror.remote
        decode.revoke(region)
        assert isinstance(await near.write([b"x"], remote, (0,)), WriteFailed)
    finally:
        for each in (near, far, decode):
            await each.close()


async def test_only_who_computes_on_a_device_has_mirrors(private: Path) -> None:
    made = engine("pairs-m", private, "shm")
    region = made.allocate("kv", 1, 64)
    assert made.mirror(region) is None and made.landing(region, "shm") is region
    await made.close()


def test_on_a_gpu_the_device_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd.transport.cuda.driver.missing", lambda: "")
    names = [b.name for b in chosen("auto", "ipc:///run/e0.sock", "", "cuda:1")]
    assert names == ["cuda", "shm"]
    assert not list(lacked("ipc:///run/e0.sock", "cuda:1"))
    monkeypatch.setattr("epd.transport.cuda.driver.missing", lambda: "an old driver")
    (lack,) = lacked("ipc:///run/e0.sock", "cuda:1")
    assert (lack.name, lack.reason) == ("cuda", "an old driver")
    assert [b.name for b in chosen("auto", "ipc:///run/e0.sock", "")] == ["shm"]


class Planes:
    """The consumer's memory is made by the first of its backends, and reached over the last."""

    def __init__(self, directory: Path, names: tuple[str, ...]) -> None:
        self.transport = names[-1]
        self._names = names
        self._directory = directory
        self._memory = LocalMemory() if names == ("local",) else None
        self.planes: list[RoutingTransferEngine] = []

    def consumer(self) -> RoutingTransferEngine:
        return self._plane("consumer", *self._names)

    def producer(self, instance_id: str) -> RoutingTransferEngine:
        return self._plane(instance_id, self.transport)

    def _plane(self, name: str, *names: str) -> RoutingTransferEngine:
        make = between_devices if "cuda" in names else _summed
        hosts = (n for n in names if n not in ("cuda", "local"))
        self.planes.append(make(name, self._directory, *hosts, memory=self._memory))
        return self.planes[-1]


@pytest.mark.parametrize(
    "names",
    [
        ("local",), ("cuda",), ("cuda", "shm"), ("shm", "cuda"), ("shm",),
        *((name,) for name in OTHERS), *(("shm", name) for name in OTHERS),
    ],
    ids="+".join,
)  # fmt: skip
async def test_heads_land_over_every_transport(private: Path, names: tuple[str, ...]) -> None:
    """Also where the memory of one backend is registered with another, twice."""
    world = Planes(private, names)
    try:
        await heads_land_where_slots_are_cut_into_them(world)
    finally:
        for plane in world.planes:
            await plane.close()
