"""What all data that travels is made of: frozen records, and messages, which have a tag."""

from __future__ import annotations

from typing import Self, dataclass_transform

import msgspec


@dataclass_transform(kw_only_default=True, frozen_default=True)
class KeywordOnly(msgspec.StructMeta):
    """Whoever makes a message or a record names its fields: two of one type cannot change places.
    On the wire they stand in the order of the class."""

    def __new__(mcs, *args: object, kw_only: bool = True, **options: object) -> Self:
        return super().__new__(mcs, *args, kw_only=kw_only, **options)  # type: ignore[arg-type]


class Record(msgspec.Struct, metaclass=KeywordOnly, frozen=True, array_like=True):
    """A value that travels inside messages."""

    def but(self, **fields: object) -> Self:
        """A copy with other values in these."""
        return msgspec.structs.replace(self, **fields)


class Message(Record, tag=True):
    """Base of everything on the bus; the tag is the class name, fields travel by position."""
