"""Members' messages with any value in every field, each a pure function of its type and a seed.

They are well-formed msgpack.  Wild ones have values from the edges of what msgpack can say, and
some of the wrong type; `mild` ones have values that their types admit, and their fields fit each
other, so that roles have to take them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Any, Self

import msgspec
import zmq
from msgspec import inspect

from epd.messages import MESSAGES, PROTOCOL_VERSION, Message
from epd.transport.bus.curve import ClusterKey
from epd.transport.endpoint import is_tcp

INTS = (0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (0.0, 1.5, -1.0, 1e-300, 1e12, 1e300, math.nan, math.inf, -math.inf)
TEXTS = ("", "r", "r/1/0", "e0", "p0", "d0", "gateway", "nobody", "../up", "\0", "x" * 5000)
OTHERS = (None, True, -1, 2.5, "text", b"bytes", [], [[]], {"a": 1})
TYPES = {kind.__name__: inspect.type_info(kind) for kind in MESSAGES}


def message(kind: type[Message], seed: int, *, mild: bool = False) -> list[Any]:
    """As msgpack would say it: the tag, then the fields."""
    rng = Random(f"{kind.__name__}/{seed}/{mild}")
    values, its = _Values(rng, mild), TYPES[kind.__name__]
    assert isinstance(its, inspect.StructType)
    said = {field.name: values.of(field.type) for field in its.fields}
    if mild:
        _mend(said, rng)
    return [its.tag, *said.values()]


def frames(
    kind: type[Message],
    seed: int,
    *,
    source: str = "stranger",
    epoch: int = 1,
    target_epoch: int = 0,
    mild: bool = False,
) -> list[bytes]:
    """Header and payloads, as they travel."""
    said = message(kind, seed, mild=mild)
    header = [PROTOCOL_VERSION, source, epoch, said, target_epoch]
    payloads = [b"no image"] * Random(seed).choice((0, 0, 1, 2))
    return [msgspec.msgpack.encode(header), *payloads]


def _mend(said: dict[str, Any], rng: Random) -> None:
    """What fields say of each other."""
    if "token_ids" in said:
        said["token_ids"] = [rng.choice((0, 11, 2**31 - 1)) for _ in range(8)]
        said["num_emitted"] = rng.choice((0, 1, 8))
        for item in said["items"]:
            item[2:4] = rng.choice(([0, 8], [1, 4], [7, 1]))  # offset, num_rows
            item[7] = []  # offsets
    if "num_prompt_tokens" in said:
        said["num_prompt_tokens"] = 8
    if isinstance(layout := said.get("layout"), list):
        layout[9:] = [[], [], 0, [], [], 0]  # tensors, ranks
    if "slots" in said:
        said["slots"], said["layout"] = [0][: rng.choice((0, 1))], None


class _Values:
    def __init__(self, rng: Random, mild: bool) -> None:
        self._rng, self._mild = rng, mild
        self._depth = 0  # of lists: those of log-probabilities have some of their own

    def of(self, kind: inspect.Type) -> Any:
        rng = self._rng
        if not self._mild and rng.random() < 0.03:
            return rng.choice(OTHERS)
        match kind:
            case inspect.IntType():
                return self._number(INTS, kind)
            case inspect.FloatType():
                return float(self._number(FLOATS, kind))
            case inspect.StrType(max_length=most, min_length=least):
                fits = (text for text in TEXTS if len(text) >= (least or 0))
                return rng.choice([t for t in fits if not self._mild or len(t) <= (most or 99)])
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.VarTupleType(item_type=item):
                self._depth += 1
                count = rng.choice((0, 0, 1, 2, 3)) if self._depth < 5 else 0
                found = [self.of(item) for _ in range(count)]
                self._depth -= 1
                return found
            case inspect.TupleType(item_types=items):
                return [self.of(item) for item in items]
            case inspect.UnionType(types=types):
                return self.of(rng.choice(types))
            case inspect.EnumType(cls=cls):
                return rng.choice([one.value for one in cls])
            case inspect.StructType(fields=fields, tag=tag):
                named = [] if tag is None else [tag]
                return [*named, *(self.of(field.type) for field in fields)]
        raise TypeError(f"messages have no {kind}")

    def _number(self, edges: tuple[float, ...], kind: Any) -> float:
        if not self._mild:
            return self._rng.choice(edges)
        low = -math.inf if kind.ge is None else kind.ge
        high = math.inf if kind.le is None else kind.le
        fits = [n for n in edges if low <= n <= high and math.isfinite(n)]
        return self._rng.choice([n for n in fits if kind.gt is None or n > kind.gt])


def walk(value: object) -> Iterator[object]:
    """All that a decoded message holds."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.astuple(value)
    if isinstance(value, tuple | list):
        for one in value:
            yield from walk(one)
    else:
        yield value


class Stranger:
    """A socket that never joined, towards the bus of a live process: `ipc://` or `tcp://`; the
    cluster's key, if it has one, lets it in."""

    def __init__(self, endpoint: str, key: ClusterKey | None = None) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 2000)
        self._dealer.setsockopt(zmq.SNDTIMEO, 10_000)  # as fast as they are taken
        if key is not None and is_tcp(endpoint):
            key.protect_caller(self._dealer)
        self._dealer.connect(endpoint)

    def send(self, kind: type[Message], seed: int, **as_whom: Any) -> None:
        self._dealer.send_multipart(frames(kind, seed, mild=seed % 2 == 0, **as_whom))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._dealer.close()
        self._context.term()
