"""`Storage` in Mooncake Store: the memory of many hosts as one shared, lossy tier.

A master (`mooncake_master`) has the place of each value; every client gives a segment of its memory
to all and reads and writes those of the others.  Seen with 0.3.13 over TCP: a value lies in one
segment, at random, and is gone with its client.  A full store evicts, and refuses some writes
before.  The first write of a key stays; a second one is answered as if it had been kept.  To a
reader "not there" and "no master" are one.  Without a master a call takes 4 s, and 90 s at start.

So nothing is believed.  A value carries the header of a file of ours (`whole_file`): its note, its
length and a CRC-32, all compared on every read.  If one differs the value is removed, a miss, and
the image is encoded again.  The size is asked first, whose answer has the reason for a miss.  After
a failure that is not a miss the store is left alone for `REST_S`: misses, at once.  Keys are
content hashes, so two writers of one key write the same (fault F32).

Mooncake authenticates nobody: whoever reaches the master or a client can read and replace rows; a
checksum is no signature.  For networks that are the cluster's own.
"""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from epd.config import MooncakeConfig
from epd.transport.base import Buffer, StorageUsage, TransportError
from epd.transport.checksum import checksum_of
from epd.transport.files.whole_file import head_of, parse_whole
from epd.transport.mooncake.library import check_devices, load, set_up
from epd.transport.region import byte_views
from epd.transport.storage import check_key

PREFIX = "epd/"
REST_S = 5.0
CONNECT_TIMEOUT_S = 3.0
CLOSE_TIMEOUT_S = 1.5  # a master that is gone is waited for longer, by a thread that may be left
BUFFER_NBYTES = 128 << 20  # the client's own, between its segment and the caller


class MooncakeStore:
    """The client, for a `ThreadedStorage`; its methods never raise for what a store can do.

    `master`: HOST:PORT of `mooncake_master`; `host`: where other clients reach this one; `nbytes`:
    of this process's memory, given to all.  Raises TransportError when the library is missing or
    the master does not answer.
    """

    tier = "store"

    def __init__(self, master: str, host: str, nbytes: int, config: MooncakeConfig) -> None:
        _check_master(master)
        if config.protocol == "rdma":
            check_devices(config.devices)
        client_class = _client_class()
        set_up(config)
        self._client = client_class()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._client))  # destroying it may take long
        if self._client.setup(
            host, "P2PHANDSHAKE", nbytes, BUFFER_NBYTES, config.protocol, config.devices, master
        ):
            raise TransportError(
                f"Mooncake Store at {master} does not take {host} with {nbytes >> 20} MiB: give "
                "16 MiB or more and an address of this host, and leave ports 15000 to 17000 free"
            )
        self._rests_until_s = 0.0
        self._capacity_nbytes = nbytes
        self._put_nbytes = 0

    def find(self, key: str, note: bytes, nbytes: int) -> memoryview | None:
        """A value that is verified, in memory of its own.  None: a miss."""
        check_key(key)
        if self._rests():
            return None
        size = self._client.get_size(PREFIX + key)
        if size < 0:
            self._judge(size)
            return None
        whole = self._client.get(PREFIX + key) if size < nbytes + (1 << 20) else b""
        found = parse_whole(memoryview(whole), verify=True)
        if found is None or found.note != note or found.payload.nbytes != nbytes:
            self._client.remove(PREFIX + key, True)  # or it would stay in the way of the right one
            return None
        return found.payload

    def put(self, key: str, value: Sequence[Buffer], note: bytes) -> bool:
        """Keep a value, unless there is one; False: no room, or no master."""
        check_key(key)
        if self._rests():
            return False
        views = byte_views(value)
        head = head_of(note, sum(view.nbytes for view in views), checksum_of(views))
        code = self._client.put_parts(PREFIX + key, head, *views)
        self._judge(code)
        if code == 0:
            self._put_nbytes += sum(view.nbytes for view in views)
        return bool(code == 0)

    def listing(self) -> Sequence[str] | None:
        """The master has no list."""
        return None

    def usage(self) -> StorageUsage:
        """What this process has put, up to what it has given: the master reports no evictions."""
        return StorageUsage(min(self._put_nbytes, self._capacity_nbytes), self._capacity_nbytes, 0)

    def close(self) -> None:
        """Take the own segment out of the store, with what lies in it; wait a little for that."""
        closing = threading.Thread(target=self._client.close, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)

    def _rests(self) -> bool:
        return time.monotonic() < self._rests_until_s

    def _judge(self, code: int) -> None:
        """Codes of -800 and below: a message or its bytes did not arrive."""
        if code <= -800:
            self._rests_until_s = time.monotonic() + REST_S


def _check_master(master: str) -> None:
    """Somebody listens there: the library itself would try for 90 s.  Raises TransportError."""
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise TransportError(
            f"no mooncake_master answers at {master} ({error}): start one there, mooncake_master "
            "--rpc_port PORT, or name its HOST:PORT in encode.cache_store"
        ) from None


def _client_class() -> Any:
    load()  # a missing package or system library is told there
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise TransportError(
            f"this build of mooncake has no store ({error}): install a current "
            "mooncake-transfer-engine, or use --encoder-cache-dir"
        ) from None
    return MooncakeDistributedStore
