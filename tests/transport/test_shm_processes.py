"""Shared memory between real processes that die, freeze and come back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from epd.messages import Address, RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.base import TransportError, WriteFailed, Written
from epd.transport.host import is_process_dead, this_host_id
from epd.transport.shm.backend import ShmTransferEngine
from epd.transport.shm.segment import Segment, sweep

CHILD = str(Path(__file__).with_name("shm_child.py"))
ROOT = str(Path(__file__).parents[2])


class Family:
    """Child processes and this one, in a directory of their own."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._children: list[subprocess.Popen[str]] = []
        self.engines: list[ShmTransferEngine] = []

    def engine(self, instance_id: str, epoch: int = 1) -> ShmTransferEngine:
        self.engines.append(ShmTransferEngine(BackendSettings(instance_id, epoch), self.directory))
        return self.engines[-1]

    async def child(self, what: str, instance_id: str, *more: str) -> tuple[int, str]:
        """Its pid and its first line."""
        process = subprocess.Popen(
            # -P: a folder of tests beside it is called cuda.
            [sys.executable, "-P", "-W", "error", CHILD, self.directory, what, instance_id, *more],
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # else the kernel may hang up pytest: see `Remote`
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        )
        self._children.append(process)
        assert process.stdout is not None
        return process.pid, await asyncio.to_thread(process.stdout.readline)

    async def close(self) -> None:
        for process in self._children:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for engine in self.engines:
            await engine.close()

    def files(self) -> list[str]:
        return sorted(os.listdir(self.directory))


@pytest.fixture
async def family() -> AsyncIterator[Family]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="epd-test-") as directory:
        made = Family(directory)
        yield made
        await made.close()
        sweep(directory=directory)
        assert made.files() == []


async def fenced_within(
    engine: ShmTransferEngine, peer: Address, pid: int, timeout_s: float
) -> bool:
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        if await engine.fence(peer, this_host_id(), pid):
            return True
        await asyncio.sleep(0.01)
    return False


async def test_a_writer_killed_in_the_middle_of_writes_is_fenced(family: Family) -> None:
    consumer = family.engine("consumer")
    region = consumer.allocate("pool", 16, 1 << 20)
    descriptor = msgspec.json.encode(region.remote).decode()
    pid, line = await family.child("write", "producer", "4", descriptor)
    assert line == "writing\n"
    peer = Address("producer", 4, "")
    assert not await fenced_within(consumer, peer, pid, 0.1)
    os.kill(pid, signal.SIGKILL)  # not reaped: it stays a zombie
    assert await fenced_within(consumer, peer, pid, 2.0)
    region.buffer[:] = bytes([0xEE]) * region.buffer.nbytes
    await asyncio.sleep(0.1)
    assert region.buffer == bytes([0xEE]) * region.buffer.nbytes, "a byte landed after the fence"
    assert sweep(directory=family.directory) == [f"epd-producer-4-{pid}.alive"]
    assert await consumer.fence(peer, this_host_id(), pid)


async def test_a_frozen_writer_is_not_fenced(family: Family) -> None:
    """Fault F7: silence is no proof, however long; after thaw it really writes on."""
    consumer = family.engine("consumer")
    region = consumer.allocate("pool", 16, 1 << 20)
    descriptor = msgspec.json.encode(region.remote).decode()
    pid, _ = await family.child("write", "producer", "4", descriptor)
    os.kill(pid, signal.SIGSTOP)
    assert not await fenced_within(consumer, Address("producer", 4, ""), pid, 0.3)
    region.buffer[:] = bytes(region.buffer.nbytes)
    os.kill(pid, signal.SIGCONT)
    for _ in range(200):
        await asyncio.sleep(0.01)
        if 0x11 in bytes(region.buffer):
            break
    assert 0x11 in bytes(region.buffer)


async def test_the_lock_speaks_and_not_the_pid(family: Family) -> None:
    """A pid is recycled, or counted otherwise in another container; the lock is neither."""
    consumer = family.engine("consumer")
    peer = Address("producer", 4, "")
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    assert is_process_dead(ended.pid)
    pid, _ = await family.child("own", "producer", "4")
    assert not await consumer.fence(peer, this_host_id(), ended.pid)
    os.kill(pid, signal.SIGKILL)
    assert await fenced_within(consumer, peer, os.getpid(), 2.0)


async def test_a_dead_owner_fails_the_write_and_its_files_are_swept(family: Family) -> None:
    producer = family.engine("producer")
    pid, line = await family.child("own", "consumer", "1")
    target = msgspec.json.decode(line, type=RemoteRegion)
    assert isinstance(await producer.write([bytes(64)], target, (3,)), Written)
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    outcome = await producer.write([bytes(64)], target, (3,))
    assert isinstance(outcome, WriteFailed) and "its owner is dead" in outcome.reason
    newcomer = family.engine("newcomer")
    assert isinstance(await newcomer.write([bytes(64)], target, (3,)), WriteFailed)
    assert len([name for name in family.files() if "-consumer-" in name]) == 2
    _, line = await family.child("own", "consumer", "2")  # sweeps what its earlier life left
    assert not [name for name in family.files() if "-consumer-1" in name]
    target = msgspec.json.decode(line, type=RemoteRegion)
    assert isinstance(await producer.write([bytes(64)], target, (3,)), Written)


async def test_what_nobody_serves_any_more_is_let_go_of(family: Family) -> None:
    """With the next region that is mapped, or with the fence of its owner's life."""
    owner, producer = family.engine("consumer"), family.engine("producer")
    regions = [owner.allocate("pool", 1, 4096) for _ in range(2)]
    first, second = (region.remote for region in regions)

    def mapped() -> list[RemoteRegion]:
        maps = Path("/proc/self/maps").read_text()
        return [remote for remote in (first, second) if remote.locator in maps]

    assert isinstance(await producer.write([b"x"], first, (0,)), Written)
    owner.revoke(regions[0])
    assert mapped() == [first, second]
    assert isinstance(await producer.write([b"x"], second, (0,)), Written)
    assert mapped() == [second]
    await owner.close()
    assert mapped() == [second]
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    assert await producer.fence(Address("consumer", 1, ""), this_host_id(), ended.pid)
    assert mapped() == []


async def test_sweep_leaves_the_living_alone(family: Family) -> None:
    family.engine("here").allocate("pool", 1, 4096)
    await family.child("own", "there", "1")
    stranger = Path(family.directory, "somebody-elses")
    stranger.touch()
    before = family.files()
    assert sweep(directory=family.directory) == []
    assert family.files() == before
    stranger.unlink()


async def test_a_peer_on_another_host_cannot_reach_us(family: Family) -> None:
    consumer = family.engine("consumer")
    family.engine("producer")
    peer = Address("producer", 1, "")
    assert not await consumer.fence(peer, this_host_id(), os.getpid())
    assert await consumer.fence(peer, "another-boot-id", os.getpid())
    assert not await consumer.fence(Address("../x", 1, ""), this_host_id(), 1)


async def test_without_a_trace_only_a_dead_process_is_fenced(family: Family) -> None:
    consumer = family.engine("consumer")
    peer = Address("unseen", 1, "")
    assert not await consumer.fence(peer, this_host_id(), os.getpid())
    assert not await consumer.fence(peer, this_host_id(), 0)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_process_dead(process.pid), "a zombie is dead"
        assert await consumer.fence(peer, this_host_id(), process.pid)
    assert is_process_dead(process.pid)


async def test_a_process_that_goes_on_attests_the_end_of_a_life(family: Family) -> None:
    """F7, F44: the kernel shows that it lives; and what it wrote to is not its next life's."""
    consumer, producer = family.engine("consumer"), family.engine("producer")
    peer, region = Address("producer", 1, ""), consumer.allocate("pool", 1, 64)
    assert isinstance(await producer.write([bytes(64)], region.remote, (0,)), Written)
    assert await producer.close()
    assert not await consumer.fence(peer, this_host_id(), os.getpid())
    assert await consumer.fence(peer, this_host_id(), os.getpid(), has_ended=True)
    assert await consumer.close()
    later = family.engine("consumer", 2).allocate("pool", 1, 64)
    late = family.engine("producer", 2)
    assert isinstance(await late.write([b"x" * 64], region.remote, (0,)), WriteFailed)
    assert bytes(later.buffer) == bytes(64)


async def test_clusters_whose_instances_start_at_once_share_a_host(family: Family) -> None:
    """Names and epochs are equal, which come from one clock; each life ends for itself."""
    consumer, peer = family.engine("consumer"), Address("e0", 7, "")
    ours, line = await family.child("own", "e0", "7")
    theirs, other = await family.child("own", "e0", "7")
    assert line and other
    os.kill(theirs, signal.SIGKILL)
    assert await fenced_within(consumer, peer, theirs, 2.0)
    assert not await consumer.fence(peer, this_host_id(), ours)
    os.kill(ours, signal.SIGKILL)
    assert await fenced_within(consumer, peer, ours, 2.0)


async def test_an_epoch_is_used_once(family: Family) -> None:
    family.engine("a", 1)
    with pytest.raises(TransportError, match="an epoch of its own"):
        ShmTransferEngine(BackendSettings("a", 1), family.directory)


async def test_full_shared_memory_is_one_clear_error(family: Family) -> None:
    engine = family.engine("a")
    with pytest.raises(TransportError, match=r"kv needs .* MiB .* free .*: lower .*--shm-size"):
        engine.allocate("kv", 1 << 20, 1 << 30)
    assert family.files() == [f"epd-a-1-{os.getpid()}.alive"]


async def test_names_that_are_paths_are_refused(family: Family) -> None:
    engine = family.engine("a")
    with pytest.raises(TransportError, match="file name"):
        engine.allocate("../pool", 1, 64)
    with pytest.raises(TransportError, match="letters, digits"):
        ShmTransferEngine(BackendSettings("../a", 1), family.directory)
    with pytest.raises(TransportError, match="writable tmpfs"):
        ShmTransferEngine(BackendSettings("a", 2), "/proc")


async def test_a_link_is_not_followed(family: Family, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(bytes(64))
    os.symlink(precious, os.path.join(family.directory, "epd-b-1-pool-00"))
    target = RemoteRegion(
        backend="shm",
        instance_id="b",
        epoch=1,
        region_id="pool",
        locator="epd-b-1-pool-00",
        slot_nbytes=64,
        num_slots=1,
    )
    assert isinstance(await family.engine("a").write([b"x"], target, (0,)), WriteFailed)
    assert precious.read_bytes() == bytes(64)
    os.unlink(os.path.join(family.directory, "epd-b-1-pool-00"))


async def test_a_new_segment_that_a_sweep_caught_is_made_again(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gap between creation and lock: a sweep that falls into it removes the file."""
    import fcntl

    real_flock, caught = fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        if not caught:
            caught.extend(os.listdir(family.directory))
            for name in caught:
                os.unlink(os.path.join(family.directory, name))
        real_flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    segment = Segment.create("epd-a-1-pool", 4096, family.directory)
    assert len(caught) == 1 and family.files() == [os.path.basename(segment.path)]
    assert segment.path.rpartition("/")[2] not in caught
    segment.unlink()
    segment.close()
