"""Keys of an attempt and of its rooms: as they are on the wire, in tables of roles and in traces.

An attempt is REQUEST/ATTEMPT, and so are its REQUEST and OFFER machines.  A room is one transfer of
it: REQUEST/ATTEMPT/kv (P to D), or REQUEST/ATTEMPT/ITEM (E to P) for an image or video of the
prompt.  It is REQUEST/ATTEMPT/ITEM.N when N encoders were asked for that one before."""

from __future__ import annotations

from typing import NamedTuple

_KV = "kv"


def attempt_key(request_id: str, attempt: int) -> str:
    return f"{request_id}/{attempt}"


def request_of(key: str) -> str:
    return key.rpartition("/")[0]


class RoomKey(NamedTuple):
    """The text of it is the room's id."""

    request_id: str
    attempt: int
    item: int | None = None  # of the prompt; None: the room of its KV
    num_before: int = 0

    def __str__(self) -> str:
        item = _KV if self.item is None else self.item
        suffix = f".{self.num_before}" if self.num_before else ""
        return f"{attempt_key(self.request_id, self.attempt)}/{item}{suffix}"

    @classmethod
    def of(cls, room: str) -> RoomKey | None:
        """None: a peer made it up, since no room has such an id."""
        attempt, _, item = room.rpartition("/")
        request_id, _, number = attempt.rpartition("/")
        index, _, count = item.partition(".")
        try:
            key = cls(request_id, int(number), None if item == _KV else int(index), int(count or 0))
        except ValueError:
            return None
        return key if str(key) == room else None


def is_kv(room: str) -> bool:
    """Whether KV moves in it, and not rows."""
    return room.endswith(f"/{_KV}")
