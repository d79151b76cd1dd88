"""How ranks of other hosts get their places: who is refused, in which words, and how they count."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epd.config import EngineConfig, InstanceConfig
from epd.groups import elsewhere
from epd.groups.asks import RankPlace
from epd.groups.commands import frame, frame_of
from epd.groups.elsewhere import Begun, Gathering, PlaceRefused, ask_for_place, watched
from epd.groups.following import interface_of, listener
from epd.groups.meeting import Meeting, PlaceAsked, Refused
from epd.tiny import CHECKPOINT
from epd.transport.bus.curve import ClusterKey
from epd.transport.host import this_host_id
from tests.patience import PATIENCE_S

EPOCH = 7


def asked(**changes: Any) -> PlaceAsked:
    own = PlaceAsked(
        version="1", leader="pd0", epoch=EPOCH, host_id="b", pid=5, nonce=b"n", proof=b"p"
    )
    return msgspec.structs.replace(own, **changes)


def test_each_place_is_given_once_and_is_free_again() -> None:
    meeting = Meeting("pd0", EPOCH, "1", 2)
    assert meeting.take(asked()) is None and meeting.num_absent == 1
    assert meeting.take(asked(pid=6)) is None and meeting.num_absent == 0
    late = Refused(reason="pd0 has all of its ranks", is_final=False)
    assert meeting.take(asked(pid=7)) == late
    meeting.free(asked().place)
    assert meeting.take(asked(pid=7)) is None


@pytest.mark.parametrize(
    ("changes", "reason", "is_final"),
    [
        ({"epoch": 6}, "the life 6 of pd0 is over; 7 has followed", False),
        ({"leader": "pd1"}, "pd0 leads here, and not pd1: correct --rank-of or --join", True),
        ({"version": "2"}, "pd0 is of epd 1, and this is 2", True),
    ],
)
def test_who_means_another_leader_or_another_life_is_refused(
    changes: dict[str, Any], reason: str, *, is_final: bool
) -> None:
    meeting = Meeting("pd0", EPOCH, "1", 1)
    assert meeting.take(asked(**changes)) == Refused(reason=reason, is_final=is_final)
    assert meeting.num_absent == 1


# --- over sockets ---------------------------------------------------------------------------------


def configs(key: str = "") -> tuple[InstanceConfig, InstanceConfig]:
    """Of a leader at a free port, and of a follower."""
    with listener("127.0.0.1", 0) as probe:
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    engine = EngineConfig(block_size=8)
    leader = InstanceConfig(
        instance_id="pd0", roles=("prefill", "decode"), endpoint="tcp://127.0.0.1:*",
        model_dir=str(CHECKPOINT), cluster_key=key, engine=engine, ranks_elsewhere=1,
        ranks_endpoint=endpoint,
    )  # fmt: skip
    follower = InstanceConfig(
        instance_id="rank-of-pd0", roles=(), endpoint="tcp://127.0.0.1:*", cluster_key=key,
        model_dir=str(CHECKPOINT), rank_of="pd0", gateway_endpoint=endpoint,
    )  # fmt: skip
    return leader, follower


def new_key(path: Path) -> str:
    ClusterKey.generate().save(str(path))
    return str(path)


@contextlib.asynccontextmanager
async def leading(gathering: Gathering) -> AsyncIterator[asyncio.Task[dict[RankPlace, Any]]]:
    """It waits for its ranks; at the end no connection to it is left."""
    there = asyncio.create_task(gathering.all_there(Says()))
    try:
        yield there
    finally:
        there.cancel()
        gathering.close()
        for _, writer in gathering._there.values():
            writer.transport.abort()
        await asyncio.sleep(0)


class Says:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, state: str, detail: str) -> None:
        self.lines.append((state, detail))


async def test_a_follower_waits_for_its_leader_and_gets_its_configuration(tmp_path: Path) -> None:
    """One that goes again gives its place to the next one."""
    leader, own = configs(new_key(tmp_path / "key"))
    waits, gathering = Says(), Gathering(leader, EPOCH)
    async with asyncio.timeout(PATIENCE_S):
        asking = asyncio.create_task(ask_for_place(own, waits))
        while not waits.lines:
            await asyncio.sleep(0.01)
        async with leading(gathering) as there:
            taken, epoch, (_, writer) = await asking
            assert epoch == EPOCH and taken.config == leader
            writer.transport.abort()
            taken, _, (reader, writer) = await ask_for_place(own, waits)
            ((place, (_, theirs)),) = (await there).items()
            assert place[0] == this_host_id()
            theirs.write(frame(Begun(rank=1, port=3)))
            begun = msgspec.msgpack.decode(await frame_of(reader), type=Begun)
            assert begun == Begun(rank=1, port=3)
            writer.transport.abort()
    words = f"{own.gateway_endpoint}: does not answer yet (ConnectionRefusedError)"
    assert waits.lines[0] == ("joining", words)
    here = elsewhere._as_here(taken.config, own)
    assert (here.instance_id, here.engine.block_size, here.num_ranks) == ("pd0", 8, 2)


@pytest.mark.parametrize(
    ("of_leader", "of_follower", "name", "words"),
    [
        ("one", "two", "pd0", "not a member of this cluster: give it the same --cluster-key FILE"),
        ("one", "", "pd0", "not a member of this cluster"),
        ("one", "one", "pd3", "pd0 leads here, and not pd3"),
    ],
)
async def test_who_is_refused_for_good(
    of_leader: str, of_follower: str, name: str, words: str, tmp_path: Path
) -> None:
    keys = {"": ""} | {key: new_key(tmp_path / key) for key in ("one", "two")}
    leader, own = configs()
    leader = msgspec.structs.replace(leader, cluster_key=keys[of_leader])
    own = msgspec.structs.replace(own, cluster_key=keys[of_follower], rank_of=name)
    async with asyncio.timeout(PATIENCE_S), leading(Gathering(leader, EPOCH)):
        with pytest.raises(PlaceRefused, match=words):
            await ask_for_place(own, Says())


async def test_an_impostor_is_no_leader(tmp_path: Path) -> None:
    """It takes who proves the key, and cannot prove it."""
    leader, own = configs(new_key(tmp_path / "key"))
    impostor = Gathering(leader, EPOCH)
    impostor._proof_of = lambda asked: asked.proof  # type: ignore[method-assign]
    async with asyncio.timeout(PATIENCE_S), leading(impostor):
        with pytest.raises(PlaceRefused, match="did not prove that it has the cluster key"):
            await ask_for_place(own, Says())


async def test_an_old_epoch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits, and takes a place in the present life."""
    leader, own = configs()
    monkeypatch.setattr(elsewhere, "RETRY_S", 0.01)
    says, hailed, old = Says(), elsewhere._hailed, [EPOCH - 1]

    def of_an_earlier_life(data: bytes) -> Any:
        told = hailed(data)
        return msgspec.structs.replace(told, epoch=old.pop()) if old else told

    monkeypatch.setattr(elsewhere, "_hailed", of_an_earlier_life)
    async with asyncio.timeout(PATIENCE_S), leading(Gathering(leader, EPOCH)) as there:
        await asyncio.sleep(0)
        _, epoch, (_, writer) = await ask_for_place(own, says)
        assert epoch == EPOCH
        assert says.lines[-1][1].endswith("the life 6 of pd0 is over; 7 has followed")
        await there
        writer.transport.abort()


async def test_another_model_and_another_kind_of_device_are_refused(tmp_path: Path) -> None:
    leader, own = configs()
    other = tmp_path / "model"
    other.mkdir()
    for path in CHECKPOINT.iterdir():
        if path.is_file():
            (other / path.name).write_bytes(path.read_bytes())
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace("{", '{"_note": 1,', 1))
    on_gpu = msgspec.structs.replace(leader, engine=EngineConfig(device="cuda:1"))
    for its, given, words in (
        (leader, msgspec.structs.replace(own, model_dir=str(other)), "is another one than that"),
        (on_gpu, own, "pd0 computes on cuda: give --device cuda"),
    ):
        says = Says()
        async with asyncio.timeout(PATIENCE_S), leading(Gathering(its, EPOCH)):
            assert await elsewhere.be_rank(given, says) == 1
        state, sentence = says.lines[-1]
        assert state == "refused" and words in sentence


def test_a_connection_is_watched_by_the_kernel() -> None:
    """Also one that a listener accepts."""
    with watched(listener("127.0.0.1", 0), 5.0) as door, socket.socket() as caller:
        caller.connect(door.getsockname())
        accepted, _ = door.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            limit = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert limit == 5000
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1


def test_the_card_of_an_address() -> None:
    assert interface_of("127.0.0.1") == interface_of("localhost") == "lo"
    assert interface_of("192.0.2.1") == ""
