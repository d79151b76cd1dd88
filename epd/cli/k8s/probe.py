"""`epd k8s probe`: whether instances of a pod serve, by the heartbeats that their gateway gets."""

from __future__ import annotations

import contextlib
import http.client

import msgspec

TIMEOUT_S = 5.0
# Heartbeats come, or came a moment ago; who is STUCK for long ends by itself.
WELL = frozenset({"HEALTHY", "SUSPECT", "STUCK", "PROBING", "DRAINING", "SWITCHING"})


class _Member(msgspec.Struct):
    instance: str
    state: str


class _Ready(msgspec.Struct):
    instances: list[_Member]


def problem(gateway: str, pod: str, count: int, *, alive: bool) -> str:
    """Why fewer than `count` instances of the pod serve; empty if all do.

    `gateway` is HOST:PORT.  `alive`: whether they should go on running.  They should if the gateway
    does not answer.
    """
    try:
        members = _ready(gateway).instances
    except (OSError, msgspec.MsgspecError, http.client.HTTPException) as error:
        return "" if alive else f"{gateway} does not answer: {error}"
    own = [one for one in members if f"{one.instance}-".startswith(f"{pod}-")]
    num_well = sum(one.state in WELL for one in own)
    if num_well >= count:
        return ""
    states = ", ".join(f"{one.instance} {one.state}" for one in own)
    return f"{num_well} of {count} instances of {pod} serve; the gateway has {states or 'none'}"


def _ready(where: str) -> _Ready:
    with contextlib.closing(http.client.HTTPConnection(where, timeout=TIMEOUT_S)) as connection:
        connection.request("GET", "/ready")
        return msgspec.json.decode(connection.getresponse().read(), type=_Ready)
