"""What `GET /state` answers, as lines of text for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from epd.api.watching.cluster_view import ClusterView, MachineView, MemoryView, ProcessView

KINDS = {
    "requests": ("GENERATION", "REQUEST"),
    "transfers": ("OUTGOING", "INCOMING"),
    "images": ("OFFER", "ENCODING", "EMBEDDING"),
    "instances": ("INSTANCE", "MEMBERSHIP"),
    "links": ("LINK",),
}
NBYTES = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))

NO_RATES: Mapping[tuple[str, str], float] = {}


def age(seconds: float) -> str:
    """12 ms, 3.4 s, 5.0 m, 2.1 h: the next unit from two of it on."""
    if seconds < 1.0:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120.0:
        return f"{seconds:.1f} s"
    minutes = seconds / 60.0
    return f"{minutes:.1f} m" if minutes < 120.0 else f"{minutes / 60.0:.1f} h"


def _left(left_s: float | None) -> str:
    return "" if left_s is None else age(left_s)


def nbytes(count: int) -> str:
    for unit, size in NBYTES:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def columns(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    table = [list(head), *map(list, rows)]
    widths = [max(len(row[at]) for row in table) for at in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def machine_lines(told: ClusterView) -> list[str]:
    """The machines that were asked for, oldest first."""
    rows = [
        (
            age(one.age_s),
            "late" if one.is_late else _left(one.left_s),
            one.instance,
            one.machine,
            one.state,
            one.story[-1].event if one.story else "",
            one.key,
        )
        for one in told.machines
    ]
    return columns(("AGE", "LEFT", "PROCESS", "MACHINE", "STATE", "LAST EVENT", "KEY"), rows)


def process_lines(told: ClusterView) -> list[str]:
    """Every process with its roles, life and memory, also those that are gone; then those without a
    place."""
    rows = [
        (
            one.instance,
            "+".join(one.roles),
            _state(one),
            ", ".join(f"{wait.what} {age(wait.for_s)}" for wait in one.waits),
            ", ".join(f"{stage} {age(load_s)}" for stage, load_s in one.load_s.items()),
            ", ".join(map(_memory, one.memory)),
            ", ".join(f"{kind} {count}" for kind, count in one.in_use.items() if count),
            str(one.epoch or ""),
        )
        for one in told.processes
    ]
    lines = columns(
        ("PROCESS", "ROLES", "STATE", "WAITS", "LOAD", "MEMORY", "IN USE", "EPOCH"), rows
    )
    lines += [f"{name} did not answer" for name in told.no_answer]
    return lines + [
        f"{one.instance} (pid {one.pid}, {one.endpoint}): {one.state} {age(one.since_s)} ago: "
        f"{one.reason}"
        for one in told.outside
    ]


def _state(one: ProcessView) -> str:
    """Of who is gone since when, and why."""
    if not one.reason:
        return one.state
    return f"{one.state}, last heard {age(one.silent_s)} ago: {one.reason}"


def _memory(one: MemoryView) -> str:
    used, capacity = one.used, one.capacity
    if one.unit == "bytes":
        return f"{one.kind} {nbytes(used)}/{nbytes(capacity)}"
    return f"{one.kind} {used}/{capacity} {one.unit}"


def state_lines(told: ClusterView, rates: Mapping[tuple[str, str], float] = NO_RATES) -> list[str]:
    """How many machines are in each state, and where; `rates`: entered per second."""
    rows = [
        (
            one.machine,
            one.state,
            str(one.count),
            age(one.oldest_s),
            f"{one.late} late" if one.late else _left(one.left_s),
            f"{rates.get((one.machine, one.state), 0.0):.1f}",
            ", ".join(f"{name} {count}" for name, count in one.instances.items()),
        )
        for one in told.states
    ]
    return columns(("MACHINE", "STATE", "COUNT", "OLDEST", "LEFT", "IN/S", "WHERE"), rows)


def story_lines(machines: Sequence[MachineView]) -> list[str]:
    """Their stories merged by time, in milliseconds from the first line; then where each is."""
    told = sorted(
        ((line.at_s, one, line) for one in machines for line in one.story), key=lambda item: item[0]
    )
    start_s = told[0][0] if told else 0.0
    rows = [
        (
            f"{(at_s - start_s) * 1000:.1f} ms",
            one.instance,
            one.machine,
            line.event + (f" x{line.times}" if line.times > 1 else ""),
            line.target if line.source == line.target
            else f"{line.source} -> {line.target}",
            one.key,
        )
        for at_s, one, line in told
    ]  # fmt: skip
    now = [
        (
            one.instance,
            one.machine,
            f"{one.state} for {age(one.age_s)}{', over' if one.is_over else ''}",
            one.key,
        )
        for one in machines
    ]
    return [
        *columns(("TIME", "PROCESS", "MACHINE", "EVENT", "STATE", "KEY"), rows),
        "",
        *columns(("PROCESS", "MACHINE", "NOW", "KEY"), now),
    ]
