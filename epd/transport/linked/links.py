"""Who may connect to whom on the data plane: one listener, and connections by life of a peer.

A caller names its own life of its instance, and the life that it means to reach.  Both sides prove
with an HMAC over each other's nonce that they hold the cluster key.  The payload that follows is
neither encrypted nor signed.  Without a key nobody listens or calls beyond loopback.

Fencing.  `bar` severs every connection of one life of a peer and refuses it from then on: nothing
of it lands any more, be it alive, frozen or unreachable.  The other way round, a writer whose
connection broke cannot see what still lands at the peer.  A caller has one connection to a peer at
a time, and a new one succeeds the lost one: a peer that accepts it has severed the earlier ones
before.  So `succeed` and `settle` ask by connecting; a peer whose port is closed, or belongs to
somebody else, is gone with its memory.  A peer that answers nothing settles nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import re
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from epd.messages import Message
from epd.transport.base import Life, TransportError
from epd.transport.endpoint import is_loopback
from epd.transport.host import this_boot_id, this_host_id
from epd.transport.linked.frames import Accepted, Challenge, Declined, Done, Hello, Refused
from epd.transport.linked.wire import MAX_FRAME_NBYTES, Wire
from epd.transport.region import WriteRefused

VERSION = 2
HANDSHAKE_TIMEOUT_S = 5.0
SETTLE_TIMEOUT_S = 0.8
MAX_STRANGERS = 256  # connections that have not proved anything yet
LOCATOR = re.compile(r"(?P<host>[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\]):(?P<port>[0-9]{1,5})")


class LinkRefused(WriteRefused):
    """The peer does not take this connection, or is not there; nothing was sent."""


class PeerGone(LinkRefused):
    """The life that was meant does not listen there any more: its memory is gone too."""


class FencedByPeer(LinkRefused):
    """The peer has barred this life."""


class PeerLinks:
    """The connections of one instance.  `on_frame(wire, frame)`: frames of proved peers."""

    def __init__(
        self, life: Life, host: str, secret: bytes, on_frame: Callable[[Wire, Any], None]
    ) -> None:
        if not secret and not is_loopback(f"tcp://{host}:*"):
            raise TransportError(
                f"the data plane at {host} is reachable from other hosts and needs a key: pass "
                "the same --cluster-key FILE to every instance, or listen on 127.0.0.1"
            )
        if host in {"0.0.0.0", "*", "::", "[::]"}:
            raise TransportError(
                f"the data plane cannot be reached at {host}: name the address by which other "
                "hosts reach this one, --listen tcp://ADDRESS:*"
            )
        self._life = life
        self._host = host
        self._secret = secret
        self._on_frame = on_frame
        self._closed = False
        self._listener: socket.socket | None = None
        self._server: asyncio.Task[asyncio.Server] | None = None
        self._barred: set[Life] = set()
        self.refused = Counter[str]()  # connections that were severed, by what they said
        self._strangers: set[Wire] = set()
        self._inbound: dict[Life, set[Wire]] = {}
        self._outbound: dict[tuple[Life, str], asyncio.Task[Wire]] = {}

    # --- listening --------------------------------------------------------------------------------

    @property
    def domain(self) -> str:
        """Empty where other hosts reach the listener; on loopback the boot and the namespace."""
        if not is_loopback(f"tcp://{self._host}:*"):
            return ""
        with contextlib.suppress(OSError):
            return f"{this_boot_id()}:{os.stat('/proc/self/ns/net').st_ino}"
        return this_boot_id()

    def listen(self) -> str:
        """`host:port`, bound now; connections are answered from the loop's next turn on."""
        if self._listener is None:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            self._listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                self._listener.bind((self._host.strip("[]"), 0))
            except OSError as error:
                self._listener.close()
                self._listener = None
                raise TransportError(
                    f"the data plane cannot listen on {self._host}: {error.strerror}; give an "
                    "address of this host"
                ) from None
            self._listener.listen(128)
            loop = asyncio.get_running_loop()
            self._server = loop.create_task(
                loop.create_server(self._inbound_wire, sock=self._listener)
            )
        return f"{self._host}:{self._listener.getsockname()[1]}"

    def _inbound_wire(self) -> Wire:
        wire = Wire(self._hear_stranger, self._forget, self._challenge)
        wire.refused = self.refused
        return wire

    def _challenge(self, wire: Wire) -> None:
        if self._closed or len(self._strangers) >= MAX_STRANGERS:
            wire.sever()
            return
        self._strangers.add(wire)
        wire.nonce = secrets.token_bytes(32)
        wire.post(Challenge(nonce=wire.nonce))
        asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, self._give_up, wire)

    def _give_up(self, wire: Wire) -> None:
        if wire in self._strangers:
            wire.sever()

    def _hear_stranger(self, wire: Wire, frame: Any) -> None:
        if not isinstance(frame, Hello) or not hmac.compare_digest(
            frame.proof, self._proof(b"caller", wire.nonce, frame)
        ):
            wire.hang_up(
                Refused(
                    kind="",
                    reason="not a member of this cluster: give it the same --cluster-key FILE",
                )
            )
            return
        refused = self._objection(frame)
        if refused is not None:
            wire.hang_up(refused)
            return
        life = (frame.instance_id, frame.epoch)
        if frame.succeeds:
            self._sever_all(life)
        self._strangers.discard(wire)
        self._inbound.setdefault(life, set()).add(wire)
        wire.peer, wire.host_id, wire.max_frame_nbytes = life, frame.host_id, MAX_FRAME_NBYTES
        wire.on_frame = self._on_frame
        here = this_host_id()
        proof = self._proof(f"owner {here}".encode(), frame.nonce, frame)
        wire.post(Accepted(host_id=here, proof=proof))

    def _objection(self, hello: Hello) -> Refused | None:
        if hello.version != VERSION:
            return Refused(
                kind="", reason=f"this instance speaks version {VERSION}, you {hello.version}"
            )
        if (hello.to_instance_id, hello.to_epoch) != self._life:
            return Refused(kind="gone", reason="the life that is meant has ended")
        if (hello.instance_id, hello.epoch) in self._barred:
            return Refused(kind="fenced", reason=f"{self._life[0]} has fenced this instance")
        return None

    def _forget(self, wire: Wire) -> None:
        self._strangers.discard(wire)
        wires = self._inbound.get(wire.peer, set())
        wires.discard(wire)
        if not wires:
            self._inbound.pop(wire.peer, None)

    # --- calling ----------------------------------------------------------------------------------

    async def to(self, life: Life, locator: str) -> Wire:
        """The connection to a peer, made now or earlier.  Raises LinkRefused: nothing was sent."""
        if life in self._barred:
            raise LinkRefused(f"{life[0]} is fenced; its next life can be written to")
        key = (life, locator)
        known = self._outbound.get(key)
        if known is not None and known.done() and known.exception() is None:
            await known.result().look()
        self._drop_lost()
        task = self._outbound.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._call(life, locator, True))
            self._outbound[key] = task
            task.add_done_callback(lambda done: self._drop_failed(key, done))
        return await asyncio.shield(task)

    def _drop_failed(self, key: tuple[Life, str], task: asyncio.Task[Wire]) -> None:
        is_failed = task.cancelled() or task.exception() is not None
        if is_failed and self._outbound.get(key) is task:
            del self._outbound[key]

    def _drop_lost(self) -> None:
        for key, task in list(self._outbound.items()):
            if task.done() and (task.exception() is not None or task.result().severed):
                del self._outbound[key]

    async def _call(self, life: Life, locator: str, succeeds: bool) -> Wire:
        host, port = self._address(locator)
        words: asyncio.Queue[Any] = asyncio.Queue(4)
        wire = Wire(lambda _, frame: words.put_nowait(frame), lambda _: words.put_nowait(None))
        wire.refused = self.refused
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await loop.create_connection(lambda: wire, host, port)
                await self._introduce(wire, words, life, succeeds)
        except ConnectionRefusedError:
            raise PeerGone(f"{life[0]}:{life[1]} does not listen at {locator} any more") from None
        except (OSError, TimeoutError, asyncio.QueueFull) as error:
            wire.sever()
            raise LinkRefused(f"{life[0]} at {locator} does not answer: {error!r}") from None
        except LinkRefused:
            wire.sever()
            raise
        if self._closed:
            wire.sever()
            raise LinkRefused("the engine is closed")
        wire.on_frame, wire.max_frame_nbytes = self._on_frame, MAX_FRAME_NBYTES
        wire.on_lost = lambda _: None
        return wire

    async def _introduce(
        self, wire: Wire, words: asyncio.Queue[Any], life: Life, succeeds: bool
    ) -> None:
        challenge = await words.get()
        if not isinstance(challenge, Challenge):
            raise LinkRefused(f"{life[0]} did not answer as an instance does")
        nonce = secrets.token_bytes(32)
        unproved = Hello(
            version=VERSION,
            instance_id=self._life[0],
            epoch=self._life[1],
            to_instance_id=life[0],
            to_epoch=life[1],
            succeeds=succeeds,
            host_id=this_host_id(),
            nonce=nonce,
            proof=b"",
        )
        proof = self._proof(b"caller", challenge.nonce, unproved)
        wire.post(msgspec.structs.replace(unproved, proof=proof))
        answer = await words.get()
        if isinstance(answer, Refused):
            reason = f"{life[0]}:{life[1]} refused: {answer.reason}"
            kinds = {"gone": PeerGone, "fenced": FencedByPeer}
            raise kinds.get(answer.kind, LinkRefused)(reason)
        if not isinstance(answer, Accepted) or not hmac.compare_digest(
            answer.proof, self._proof(f"owner {answer.host_id}".encode(), nonce, unproved)
        ):
            raise LinkRefused(f"{life[0]} did not prove that it holds the cluster key")
        wire.peer, wire.host_id = life, answer.host_id

    def _address(self, locator: str) -> tuple[str, int]:
        """Host and port of a descriptor.  Raises LinkRefused."""
        found = LOCATOR.fullmatch(locator)
        if found is None or not 0 < int(found["port"]) < 65536:
            raise LinkRefused(f"{locator!r} is not the address of a data plane")
        if not self._secret and not is_loopback(f"tcp://{locator}"):
            raise LinkRefused(f"{locator} is on another host and needs --cluster-key FILE")
        return found["host"].strip("[]"), int(found["port"])

    def _proof(self, side: bytes, nonce: bytes, hello: Hello) -> bytes:
        """Of the key's holder, over the other side's nonce and all that the caller sends."""
        said = "\n".join(
            map(str, (hello.version, hello.instance_id, hello.epoch, hello.to_instance_id,
                      hello.to_epoch, hello.succeeds, hello.host_id,
                      hello.nonce.hex()))
        ).encode()  # fmt: skip
        return hmac.digest(self._secret, side + b"\n" + nonce + said, hashlib.sha256)

    # --- fencing ----------------------------------------------------------------------------------

    def bar(self, life: Life) -> None:
        """No byte of this life of a peer lands from now on."""
        self._barred.add(life)
        self._sever_all(life)

    async def succeed(self, life: Life, locator: str) -> bool:
        """The same, disturbing nothing: our present connection there, or a new one, has made the
        peer sever the lost ones before it."""
        return await _is_severed(self.to(life, locator))

    async def settle(self, life: Life, locator: str) -> bool:
        """Nothing of our lost connections to that life can land any more; False: not sure."""

        async def call_anew() -> None:
            (await self._call(life, locator, succeeds=True)).sever()

        return await _is_severed(call_anew())

    async def ask_apart(self, life: Life, locator: str, frame_of: Callable[[int], Message]) -> bool:
        """Ask a question on a connection of its own; True: agreed, or gone; False: no answer."""
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                wire = await self._call(life, locator, succeeds=False)
        except PeerGone:
            return True
        except (LinkRefused, TimeoutError):
            return False
        number, answer = wire.ask()
        wire.post(frame_of(number))
        await asyncio.wait((answer,), timeout=SETTLE_TIMEOUT_S)
        wire.sever()
        return answer.done() and not answer.exception() and isinstance(answer.result(), Done)

    async def attested(self, life: Life, host_id: str, frame_of: Callable[[int], Message]) -> bool:
        """Whether another life of that host, with which we are connected, agrees."""
        calls = [call for call in self._outbound.values() if call.done() and not call.exception()]
        wires = {call.result() for call in calls}.union(*self._inbound.values())
        asked = []
        for wire in wires:
            if wire.host_id == host_id and wire.peer != life and not wire.severed:
                number, answer = wire.ask()
                wire.post(frame_of(number))
                asked.append((wire, number, answer))
        if asked:
            await asyncio.wait([answer for *_, answer in asked], timeout=SETTLE_TIMEOUT_S)
        for wire, number, _ in asked:
            wire.answer(Declined(number=number, reason="no answer in time"))
        return any(not a.exception() and isinstance(a.result(), Done) for *_, a in asked)

    def _sever_all(self, life: Life) -> None:
        for wire in list(self._inbound.get(life, ())):
            wire.sever()

    async def close(self) -> None:
        """Sever everything, stop listening.  Idempotent."""
        self._closed = True
        for wires in [self._strangers, *self._inbound.values()]:
            for wire in list(wires):
                wire.sever()
        for task in list(self._outbound.values()):
            if task.done() and task.exception() is None:
                task.result().sever()
        if self._server is not None:
            server = await self._server
            server.close()
            self._server = None
        self._listener = None
        await asyncio.sleep(0)  # severed transports close their sockets


async def _is_severed(call: Awaitable[object]) -> bool:
    """The peer has severed our lost connections: it took a new one, or it is gone, or it has fenced
    us.  False: no answer."""
    try:
        async with asyncio.timeout(SETTLE_TIMEOUT_S):
            await call
    except (PeerGone, FencedByPeer):
        return True
    except (LinkRefused, TimeoutError):
        return False
    return True
