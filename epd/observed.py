"""The machines of one process, for `GET /state` and `epd top`; and what it waits for."""

from __future__ import annotations

from epd.ranges import Count, Name, Seconds, Total, Where
from epd.wire import Message, Record


class Query(Record):
    """Which machines to list one by one, oldest first; counts come in any case."""

    machines: tuple[Name, ...] = ()  # names of tables; empty: of any
    states: tuple[Name, ...] = ()  # empty: any
    older_s: Seconds = 0.0  # in their state for so long at least
    key: Where = ""  # of a request, a room or an image, and what begins with it and a slash
    late: bool = False  # only those whose time is over
    limit: Count = 0  # machines of one process; 0: only counts


class StateCount(Record):
    """How many machines are in a state."""

    machine: Name
    state: Name
    count: Total
    oldest_s: Seconds  # for how long the first of them has been there
    num_late: Count = 0  # their time is over: see `epd.roles.watching.observation`
    left_s: Seconds | None = None  # until a clock ends the first of them, if nothing else does


class EdgeCount(Record):
    """How often an event came in a state, since the process began."""

    machine: Name
    source: Name
    event: Name
    target: Name
    count: Total
    reason: str = ""  # why it changed nothing: the table's words, or "illegal"


class StoryLine(Record):
    """An event that moved a machine, in seconds of the gateway's time."""

    at_s: Seconds
    source: Name
    event: Name
    target: Name
    times: Total = 1


class MachineFacts(Record):
    """One machine of one process."""

    machine: Name
    key: Where
    state: Name
    age_s: Seconds  # in that state
    is_over: bool  # its state is terminal
    story: tuple[StoryLine, ...]
    is_late: bool = False
    left_s: Seconds | None = None


class Memory(Record):
    """A kind of memory of one instance."""

    kind: Name
    unit: Name
    used: Total
    capacity: Total


class StageLoad(Record):
    """What waits for a stage of an instance, in predicted seconds; of decode, what a step takes."""

    instance: Name
    stage: Name
    load_s: Seconds


class LinkCount(Record):
    """Bytes written to a peer since the process began."""

    peer: Name
    transport: Name
    nbytes: Total


class Observed(Record):
    """The answer to a `Query`."""

    in_use: tuple[tuple[Name, Total], ...] = ()  # what is owned now, by kind
    memory: tuple[Memory, ...] = ()
    states: tuple[StateCount, ...] = ()
    edges: tuple[EdgeCount, ...] = ()
    links: tuple[LinkCount, ...] = ()
    loads: tuple[StageLoad, ...] = ()  # of all instances, as the gateway predicts them
    machines: tuple[MachineFacts, ...] = ()


class ObserveRequest(Message):
    """From a gateway to each instance: list your machines."""

    serial: Total
    query: Query


class ObserveReport(Message):
    serial: Total  # of the message that it answers
    observed: Observed


class Wait(Record):
    """Works of one kind, of which none has ended for so long."""

    what: Name
    for_s: Seconds
    bound_s: Seconds  # beyond it the instance makes no progress


class SelfTest(Message):
    """Does your device work?  Answered by `SelfTestResult`; a repeat is no second test."""

    serial: Total


class SelfTestResult(Message):
    serial: Total
    reason: Where = ""  # why not; empty: its device has done a small work
