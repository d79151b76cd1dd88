"""Answers of GET /state and GET /metrics, made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from epd.api.watching.cluster_view import (
    ClusterView,
    EdgeView,
    LineView,
    LinkView,
    MachineView,
    MemoryView,
    OutsideView,
    ProcessView,
    StateView,
)
from epd.fsm.tables import TABLES

ROOM = "gateway-1-7/1/0"
ILLEGAL = "illegal"


def line(at_s: float, source: str, event: str, target: str) -> LineView:
    return LineView(at_s=at_s, source=source, event=event, target=target)


def state(
    machine: str, name: str, count: int, oldest_s: float, instance: str, **more: Any
) -> StateView:
    return StateView(
        machine=machine,
        state=name,
        count=count,
        oldest_s=oldest_s,
        instances={instance: count},
        **more,
    )


def edge(source: str, event: str, target: str, count: int, reason: str = "") -> EdgeView:
    return EdgeView(
        machine="OUTGOING", source=source, event=event, target=target, count=count, reason=reason
    )


def link(instance: str, peer: str, transport: str, nbytes: int) -> LinkView:
    return LinkView(instance=instance, peer=peer, transport=transport, nbytes=nbytes)


def memory(kind: str, unit: str, used: int, capacity: int) -> MemoryView:
    return MemoryView(kind=kind, unit=unit, used=used, capacity=capacity)


def answer(number: int) -> ClusterView:
    """The `number`th one: a room is quarantined at both ends, for 7 s at first."""
    return ClusterView(
        model="tiny",
        version="1.2.3",
        uptime_s=7200.0 + number,
        processes=[
            ProcessView(instance="gateway", roles=["gateway"], in_use={"offers": 2}),
            ProcessView(
                instance="e0",
                roles=["encode"],
                state="HEALTHY",
                epoch=5,
                memory=[memory("host tier", "bytes", 300 << 20, 1 << 30)],
                load_s={"encode": 0.65},
                in_use={"outgoing": 4},
                transports={"p0": "shm"},
                fallbacks={"p0": "not cuda: e0 lacks it"},
            ),
            ProcessView(
                instance="p0",
                roles=["prefill", "decode"],
                state="HEALTHY",
                epoch=5,
                memory=[memory("kv", "blocks", 1200, 2048), memory("rows", "slots", 96, 128)],
                load_s={"prefill": 1.5, "decode": 0.011},
                in_use={"incoming": 3, "requests": 5},
            ),
        ],
        states=[
            state("GENERATION", "PLACED", 3, 0.4, "gateway", left_s=4.6),
            state("GENERATION", "STREAMING", 12, 31.0, "gateway"),
            state("ENCODING", "PREPARED", 7, 0.2, "e0"),
            state("ENCODING", "ENCODING", 4, 0.1, "e0"),
            state("ENCODING", "RESIDENT", 40, 500.0, "e0"),
            state("OUTGOING", "GRANTED", 2, 0.3, "e0"),
            state("OUTGOING", "WRITING", 3, 0.1, "e0"),
            state("OUTGOING", "QUARANTINED", 1, 7.0 + number, "e0", late=1),
            state("INCOMING", "RESERVED", 5, 40.0, "p0", left_s=80.0),
            state("INCOMING", "QUARANTINED", 1, 7.0 + number, "p0", late=1),
        ],
        edges=[
            edge("PENDING", "GrantReceived", "GRANTED", 90 + 9 * number),
            edge("GRANTED", "BytesReady", "STREAMING", 80 + 8 * number),
            edge("WRITING", "WriteSucceeded", "WRITTEN", 80 + 120 * number),
            edge("WRITING", "GrantReceived", "WRITING", 2, "a repeat of a grant that is used"),
            edge("WRITTEN", "WriteFailed", "WRITTEN", 1, ILLEGAL),
        ],
        links=[
            link("e0", "p0", "shm", (300 + 40 * number) << 20),
            link("p0", "p0", "local", 7 << 30),
        ],
        machines=[*open_requests(), *stories(number)],
    )


def with_the_gone(number: int) -> ClusterView:
    """An encoder was lost, a decoder has left, and somebody called p0 was refused."""
    made = answer(number)
    over = (
        ("e0", "encode", "LOST", "silent"),
        ("d0", "decode", "LEFT", "it was asked to end"),
    )
    del made.processes[1]
    made.processes += [
        ProcessView(
            instance=name, roles=[role], state=now, epoch=5, pid=41, silent_s=12.3, reason=reason
        )
        for name, role, now, reason in over
    ]
    made.states += [
        state("INSTANCE", "LOST", 1, 12.3, "gateway", late=1),
        state("INSTANCE", "LEFT", 1, 12.3, "gateway"),
    ]
    made.outside = [
        OutsideView(
            instance="p0",
            epoch=9,
            pid=77,
            endpoint="tcp://10.0.0.9:7001",
            roles=["prefill", "decode"],
            state="REFUSED",
            since_s=3.0,
            reason="its name is in use by a living instance, p0 (pid 42, tcp://10.0.0.2:7001); "
            "give this one another with --id, or --id-prefix with --topology",
        )
    ]
    return made


def open_requests() -> list[MachineView]:
    return [
        MachineView(
            instance="gateway",
            machine="GENERATION",
            key=f"gateway-{digit * 16}",
            state="STREAMING",
            age_s=31.0 - at,
            story=[line(5.0, "PLACED", "TokensArrived", "STREAMING")],
        )
        for at, digit in enumerate("abcd")
    ]


HOSTILE = "<img src=x onerror=document.title='taken'>"


def large(number: int) -> ClusterView:
    """Twelve instances with long names, one of them lost, and one that its peers do not hear."""
    names = {
        **{f"epd-encode-7d9f8c6b5-{HOSTILE if at == 3 else at}": ["encode"] for at in range(5)},
        **{f"epd-prefill-5c7b9d8f66-{at}": ["prefill"] for at in range(4)},
        **{f"epd-decode-6f5d4c7b88-{at}": ["decode"] for at in range(3)},
    }
    made = answer(number)
    gateway, encode, other = made.processes
    made.processes = [gateway]
    made.links = []
    for name, roles in names.items():
        like = encode if roles == ["encode"] else other
        load_s = {roles[0]: 0.65}
        made.processes.append(replace(like, instance=name, roles=roles, load_s=load_s))
        step = {"encode": "prefill", "prefill": "decode"}.get(roles[0])
        peers = [peer for peer, its in names.items() if its == [step]]
        made.links += [link(name, p, "tcp", (at + 1) * number << 21) for at, p in enumerate(peers)]
    made.processes[5] = replace(
        made.processes[5], state="LOST", silent_s=12.3, reason="no heartbeat for 5.0 s"
    )
    made.processes[7] = replace(made.processes[7], num_ranks=3)
    made.processes[-1].silent_peers = [made.processes[6].instance]
    return made


def shaped(*roles: str, links: tuple[tuple[int, int], ...] = ()) -> Callable[[int], ClusterView]:
    """Instances with these roles by letters, and bytes between them (by place)."""

    def made(number: int) -> ClusterView:
        told = answer(number)
        like = told.processes[-1]
        of = {"e": "encode", "p": "prefill", "d": "decode"}
        names = [f"{letters}{at}" for at, letters in enumerate(roles)]
        told.processes[1:] = [
            replace(
                like,
                instance=name,
                roles=[of[one] for one in letters],
                load_s={of[one]: 0.011 for one in letters},
            )
            for name, letters in zip(names, roles, strict=True)
        ]
        told.links = [link(names[a], names[b], "shm", 3 * number << 20) for a, b in links]
        return told

    return made


def stories(number: int) -> list[MachineView]:
    """Of both ends of the room."""
    return [
        MachineView(
            instance="e0",
            machine="OUTGOING",
            key=ROOM,
            state="QUARANTINED",
            age_s=7.0 + number,
            is_late=True,
            story=[
                line(10.0, "PENDING", "GrantReceived", "GRANTED"),
                line(10.2, "GRANTED", "BytesReady", "WRITING"),
                line(11.0, "WRITING", "PeerLost", "QUARANTINED"),
            ],
        ),
        MachineView(
            instance="p0",
            machine="INCOMING",
            key=ROOM,
            state="QUARANTINED",
            age_s=7.1 + number,
            is_late=True,
            story=[
                line(9.9, "PENDING", "SlotsLeased", "RESERVED"),
                line(10.9, "RESERVED", "PeerLost", "QUARANTINED"),
            ],
        ),
    ]


def metrics(number: int) -> str:
    """A hundred more requests at each of two gateways each time: of 200, 120 have their first token
    within 100 ms, 190 within 250 ms, all within 500 ms."""
    return "".join(
        f'epd_time_to_first_token_seconds_bucket{{instance="{instance}",le="{bound}"}} {count}\n'
        for instance in ("gateway", "other")
        for bound, count in (
            ("0.1", 60 * number),
            ("0.25", 95 * number),
            ("0.5", 100 * number),
            ("+Inf", 100 * number),
        )
    )


def crowd(number: int) -> ClusterView:
    """A thousand requests, as many rooms, and as many stories as one answer can hold."""
    made = answer(number)
    made.states = [
        state(table.name, one.name, 1000, 3.0, "p0")
        for table in TABLES
        for one in table.states
        if one not in table.terminal
    ]
    made.edges = [
        EdgeView(
            machine=table.name,
            source=source.name,
            event=row.events[0].__name__,
            target=(row.target or source).name,
            count=100 * number,
        )
        for table in TABLES
        for row in table.rows
        for source in row.sources
    ]
    first = stories(number)[0]
    made.machines = [
        replace(first, key=f"gateway-1-{at}/1/0", story=first.story * 5) for at in range(1000)
    ]
    return made
