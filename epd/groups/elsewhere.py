"""Ranks of other hosts: how they come to their leader, and how each notices the other's end.

Theory of operation
-------------------
A leader listens for them (`Gathering`).  A process that is to be a rank calls until the leader is
there (`ask_for_place`).  Both prove with an HMAC over each other's nonce that they hold the cluster
key.  The follower gets the leader's configuration, and keeps what belongs to its host.  When all
ranks are there, each gets its number and loads; from then on frames are those of one host's ranks.

A host that is gone, or behind a cable that is cut, closes no socket.  So kernels exchange probes
while nothing else is sent.  After `timing.lost_after_s` without an answer each ends the connection,
and no thread or loop of ours has to run for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
import socket

import msgspec
from msgspec.structs import replace

from epd import __version__
from epd.config import InstanceConfig
from epd.errors import Told
from epd.groups.asks import RankPlace
from epd.groups.commands import frame, frame_of
from epd.groups.following import Rendezvous, follow, listener
from epd.groups.meeting import Meeting, PlaceAsked, Refused
from epd.model_files.fingerprint import model_fingerprint
from epd.ranges import Count, Name, Positive, Total
from epd.runtime.worker import EXIT_EXPELLED, MEETING, Status, load_cluster_key
from epd.transport.endpoint import split_tcp
from epd.transport.host import this_host_id
from epd.wire import Record

ANSWER_LIMIT_S = 5.0  # of a handshake
RETRY_S = 0.5
LOOK_S = 0.1
MAX_STRANGERS = 64  # connections that have not proved anything yet
MAX_GREETING_NBYTES = 4 << 10
STRANGER = "not a member of this cluster: give it the same --cluster-key FILE"

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Hailed(Record, tag=True):
    """First frame of a leader."""

    epoch: Total
    nonce: bytes


class PlaceGiven(Record, tag=True):
    """It has a place.  `fingerprint`: of the leader's model."""

    proof: bytes
    fingerprint: Name
    config: InstanceConfig


class Begun(Record, tag=True):
    """All are there.  `port`: of the store by which they meet, at the leader's host."""

    rank: Count
    port: Positive


class PlaceRefused(Told):
    """By a leader, for good."""


_hailed = msgspec.msgpack.Decoder(Hailed).decode
_asked = msgspec.msgpack.Decoder(PlaceAsked).decode
_answer = msgspec.msgpack.Decoder(PlaceGiven | Refused).decode
_begun = msgspec.msgpack.Decoder(Begun).decode


def watched(sock: socket.socket, lost_after_s: float) -> socket.socket:
    """With a kernel that ends the connection when the other host has not answered for so long;
    connections that a listener accepts inherit it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_USER_TIMEOUT, round(1000 * lost_after_s)),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return sock


def _proof(secret: bytes, side: bytes, nonce: bytes, asked: PlaceAsked) -> bytes:
    said = msgspec.msgpack.encode(replace(asked, proof=b""))
    return hmac.digest(secret, b"rank, " + side + nonce + said, hashlib.sha256)


def _secret(config: InstanceConfig) -> bytes:
    key = load_cluster_key(config.cluster_key)
    return key.data_plane_secret() if key is not None else b""


# --- the leader -----------------------------------------------------------------------------------


class Gathering:
    """The leader's side; it answers as long as its life lasts."""

    def __init__(self, config: InstanceConfig, epoch: int) -> None:
        self._config = config
        self._secret = _secret(config)
        self._fingerprint = model_fingerprint(config.model_dir, config.engine.quantization)
        self._meeting = Meeting(config.instance_id, epoch, __version__, config.ranks_elsewhere)
        self._there: dict[RankPlace, Stream] = {}
        self._num_strangers = 0
        self._server: asyncio.Server | None = None

    async def all_there(self, status: Status) -> dict[RankPlace, Stream]:
        """In the order of ranks, host by host; waits for them without a limit."""
        host, port = split_tcp(self._config.ranks_endpoint)
        own = watched(listener(host, int(port)), self._config.timing.lost_after_s)
        self._server = await asyncio.start_server(self._hear, sock=own)
        shown = 0
        while absent := self._num_absent():
            if absent != shown:
                many = f"{absent} ranks of other hosts" if absent > 1 else "a rank of another host"
                name, endpoint = self._config.instance_id, self._config.ranks_endpoint
                status(MEETING, f"waits for {many}: epd run --rank-of {name} --join {endpoint}")
                shown = absent
            await asyncio.sleep(LOOK_S)
        return {place: self._there[place] for place in sorted(self._there)}

    def close(self) -> None:
        """Take nobody any more."""
        if self._server is not None:
            self._server.close()

    def _num_absent(self) -> int:
        for place, (reader, writer) in list(self._there.items()):
            if reader.at_eof() or reader.exception() is not None:  # it has gone again
                writer.transport.abort()
                del self._there[place]
                self._meeting.free(place)
        return self._meeting.num_absent

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._num_strangers == MAX_STRANGERS:
            writer.transport.abort()
            return
        self._num_strangers += 1
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                refused = await self._answer(reader, writer)
        except (OSError, EOFError, TimeoutError, ValueError):
            writer.transport.abort()
            return
        finally:
            self._num_strangers -= 1
        if refused is not None:
            writer.write(frame(refused))
            writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Refused | None:
        nonce = secrets.token_bytes(32)
        writer.write(frame(Hailed(epoch=self._meeting.epoch, nonce=nonce)))
        asked = _asked(await frame_of(reader, MAX_GREETING_NBYTES))
        if not hmac.compare_digest(asked.proof, _proof(self._secret, b"caller ", nonce, asked)):
            return Refused(reason=STRANGER, is_final=True)
        if (refused := self._meeting.take(asked)) is None:
            proof = self._proof_of(asked)
            taken = PlaceGiven(proof=proof, fingerprint=self._fingerprint, config=self._config)
            writer.write(frame(taken))
            self._there[asked.place] = reader, writer
        return refused

    def _proof_of(self, asked: PlaceAsked) -> bytes:
        return _proof(self._secret, b"leader ", asked.nonce, asked)


# --- a follower -----------------------------------------------------------------------------------


async def be_rank(own: InstanceConfig, status: Status) -> int:
    """Of a leader on another host, for one of its lives; the exit status.  `own`: of the command,
    whose host it describes."""
    try:
        taken, epoch, (reader, writer) = await ask_for_place(own, status)
    except PlaceRefused as refused:
        status("refused", str(refused))
        return 1
    config = _as_here(taken.config, own)
    if sentence := await asyncio.to_thread(_objection, taken, own):
        status("refused", sentence)
        writer.transport.abort()
        return 1
    status(MEETING, f"waits for the other ranks of {own.rank_of}")
    with contextlib.suppress(OSError, EOFError):
        begun = _begun(await frame_of(reader, MAX_GREETING_NBYTES))
        name = f"rank {begun.rank} of {own.rank_of}"
        status("loading", name)
        meets = Rendezvous(epoch, address=(split_tcp(own.gateway_endpoint)[0], begun.port))
        serving = lambda: status("serving", name)  # noqa: E731
        await follow(config, begun.rank, meets, reader, writer, on_present=serving)
    status("ended", f"this life of {own.rank_of} is over")
    return EXIT_EXPELLED


async def ask_for_place(own: InstanceConfig, status: Status) -> tuple[PlaceGiven, int, Stream]:
    """In the present life of the leader, or in its next one, for which it waits without a limit;
    also the epoch.  Raises PlaceRefused."""
    secret, shown = _secret(own), ""
    while True:
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                stream = await _call(own)
                try:
                    answer, epoch = await _ask(own.rank_of, secret, stream)
                    if isinstance(answer, PlaceGiven):
                        return answer, epoch, stream
                except BaseException:
                    stream[1].transport.abort()
                    raise
            stream[1].transport.abort()
            if answer.is_final:
                raise PlaceRefused(answer.reason)
            why = answer.reason
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            why = f"does not answer yet ({type(error).__name__})"
        if why != shown:
            status("joining", f"{own.gateway_endpoint}: {why}")
            shown = why
        await asyncio.sleep(RETRY_S)


async def _call(own: InstanceConfig) -> Stream:
    host, port = split_tcp(own.gateway_endpoint)
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as copy:
        watched(copy, own.timing.lost_after_s)
    return reader, writer


async def _ask(leader: str, secret: bytes, stream: Stream) -> tuple[PlaceGiven | Refused, int]:
    """The answer, and the epoch."""
    reader, writer = stream
    hailed = _hailed(await frame_of(reader, MAX_GREETING_NBYTES))
    asked = PlaceAsked(
        version=__version__,
        leader=leader,
        epoch=hailed.epoch,
        host_id=this_host_id(),
        pid=os.getpid(),
        nonce=secrets.token_bytes(32),
        proof=b"",
    )
    asked = replace(asked, proof=_proof(secret, b"caller ", hailed.nonce, asked))
    writer.write(frame(asked))
    answer = _answer(await frame_of(reader))
    if isinstance(answer, PlaceGiven):
        expected = _proof(secret, b"leader ", asked.nonce, asked)
        if not hmac.compare_digest(answer.proof, expected):
            reason = f"{leader} did not prove that it has the cluster key"
            answer = Refused(reason=reason, is_final=True)
    return answer, hailed.epoch


def _objection(taken: PlaceGiven, own: InstanceConfig) -> str:
    """Why this process cannot compute with that leader; empty if it can.  Reads files."""
    engine = taken.config.engine
    kinds = [each.device.partition(":")[0] for each in (engine, own.engine)]
    if kinds[0] != kinds[1]:
        return f"{own.rank_of} computes on {kinds[0]}: give --device {kinds[0]}"
    if model_fingerprint(own.model_dir, engine.quantization) != taken.fingerprint:
        return (
            f"the model in {own.model_dir} is another one than that of {own.rank_of}: give --model "
            "the same files"
        )
    return ""


def _as_here(leaders: InstanceConfig, own: InstanceConfig) -> InstanceConfig:
    """The leader's configuration, with what a host has of its own."""
    host = ("device", "cpu_affinity", "threads", "gpu_memory_utilization")
    engine = replace(leaders.engine, **{name: getattr(own.engine, name) for name in host})
    return replace(
        leaders,
        engine=engine,
        model_dir=own.model_dir,
        cluster_key=own.cluster_key,
        endpoint=own.endpoint,
        mooncake=own.mooncake,
        transport_directory=own.transport_directory,
        rank_devices=own.rank_devices,
        ranks_elsewhere=leaders.num_ranks - 1 - len(own.rank_devices),
    )
