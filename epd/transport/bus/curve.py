"""Encryption and admission between hosts: CURVE with one key file per cluster.

The file holds two key pairs, a server's and a client's, and every member has it: who holds the file
is in.  A listener proves that it holds the server's secret key; it lets in only connections that
prove the client's.  Members are not protected from each other.

libzmq asks for admission over a socket inside the process (ZAP, RFC 27).  `PeerAdmission` answers
on the event loop; there is no thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import zmq
from zmq.utils import z85

from epd.transport.base import TransportError

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"epd"


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """Two CURVE key pairs, z85 text of 40 characters each."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    @classmethod
    def generate(cls) -> ClusterKey:
        pairs = (*zmq.curve_keypair(), *zmq.curve_keypair())
        return cls(*(key.decode() for key in pairs))

    @classmethod
    def load(cls, path: str) -> ClusterKey:
        """Read a key file.  Raises TransportError when it is unusable or open to other users."""
        try:
            with open(path, encoding="ascii") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                key = cls(**json.load(file))
            for text in asdict(key).values():
                if len(text) != 40 or len(z85.decode(text)) != 32:
                    raise ValueError("not a key")
        except OSError as error:
            raise TransportError(f"cluster key {path} cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, KeyError):
            raise TransportError(
                f"cluster key {path} is not a key file of epd: make a new one and give the same "
                "file to every instance"
            ) from None
        if mode & 0o077:
            raise TransportError(f"cluster key {path} is open to other users: chmod 600 {path}")
        return key

    def save(self, path: str) -> None:
        """Write a new key file, mode 0600.  Raises TransportError; never overwrites."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise TransportError(
                f"cluster key {path} cannot be written: {error.strerror}"
            ) from None
        with os.fdopen(fd, "w", encoding="ascii") as file:
            json.dump(asdict(self), file, indent=1)
            file.write("\n")

    def data_plane_secret(self) -> bytes:
        """What members prove to each other on the data plane; the keys do not follow from it."""
        return hashlib.sha256(
            f"epd data plane\n{self.server_secret}\n{self.client_secret}".encode()
        ).digest()

    def protect_listener(self, listener: zmq.Socket[Any]) -> None:
        listener.setsockopt(zmq.CURVE_SERVER, 1)
        listener.setsockopt(zmq.CURVE_SECRETKEY, self.server_secret.encode())
        listener.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        listener.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def protect_caller(self, caller: zmq.Socket[Any]) -> None:
        caller.setsockopt(zmq.CURVE_SERVERKEY, self.server_public.encode())
        caller.setsockopt(zmq.CURVE_PUBLICKEY, self.client_public.encode())
        caller.setsockopt(zmq.CURVE_SECRETKEY, self.client_secret.encode())


class PeerAdmission:
    """Answers libzmq's question "may this key connect?" for the listeners of one context."""

    def __init__(self, context: zmq.Context[Any], key: ClusterKey, refused: Counter[str]) -> None:
        self._allowed = z85.decode(key.client_public)
        self._refused = refused
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)

    def answer_pending(self) -> None:
        """Answer what has been asked; call it whenever the socket's FD is readable."""
        while True:
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
                self.socket.send_multipart(self._answer(question), zmq.NOBLOCK)
            except zmq.ZMQError:  # nothing more to read, or closed
                return

    def _answer(self, question: list[bytes]) -> list[bytes]:
        version, request_id, domain, _address, _identity, mechanism, *credentials = question
        allowed = (
            version == b"1.0"
            and domain == ZAP_DOMAIN
            and mechanism == b"CURVE"
            and credentials == [self._allowed]
        )
        if not allowed:
            self._refused["unauthorised"] += 1
        status = (b"200", b"OK") if allowed else (b"400", b"not a member")
        return [b"1.0", request_id, *status, b"", b""]
