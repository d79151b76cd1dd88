"""What `GET /state` answers; `epd top` and its like read it by the same types."""

from __future__ import annotations

import msgspec


class View(msgspec.Struct, kw_only=True):
    """A part of the answer."""


class MemoryView(View):
    """A kind of memory of one instance; what is cached counts as used."""

    kind: str
    unit: str
    used: int
    capacity: int


class WaitView(View):
    """Works of one kind, of which none has ended for so long."""

    what: str
    for_s: float
    bound_s: float


class ProcessView(View):
    """The gateway, which has a name only, or an instance as in `/ready`, also one that did not
    answer or is gone."""

    instance: str
    roles: list[str]
    state: str = ""
    epoch: int = 0
    pid: int = 0
    num_ranks: int = 1
    assigned: int = 0
    cached_images: int = 0
    transports: dict[str, str] = {}
    fallbacks: dict[str, str] = {}
    silent_peers: list[str] = []
    in_use: dict[str, int] = {}
    memory: list[MemoryView] = []
    load_s: dict[str, float] = {}
    silent_s: float = 0.0  # since its last heartbeat
    drain_left_s: float | None = None  # of one that drains: until its open work moves
    waits: list[WaitView] = []  # as of that heartbeat
    reason: str = ""  # why it is over, gets no work, or has not the roles that it was asked to have


class OutsideView(View):
    """A life that asked for a place: it waits for its name, or was refused."""

    instance: str
    epoch: int
    pid: int
    endpoint: str
    roles: list[str]
    state: str
    since_s: float
    reason: str


class StateView(View):
    """How many machines of a table are in a state, and where."""

    machine: str
    state: str
    count: int = 0
    oldest_s: float = 0.0
    late: int = 0  # so many of them stay though their time is over, or were lost
    left_s: float | None = None  # until a clock ends the first of them, if nothing else does
    instances: dict[str, int] = {}


class EdgeView(View):
    """How often an event came; `reason`: why it moved nothing."""

    machine: str
    source: str
    event: str
    target: str
    count: int
    reason: str = ""
    per_s: float | None = None  # of an answer that was asked for rates


class LinkView(View):
    """Bytes that were written over a link since its process began."""

    instance: str
    peer: str
    transport: str
    nbytes: int


class LineView(View):
    """An event in a machine's story."""

    at_s: float
    source: str
    event: str
    target: str
    times: int = 1


class MachineView(View):
    """One machine at one process."""

    instance: str
    machine: str
    key: str
    state: str
    age_s: float
    is_over: bool = False
    is_late: bool = False
    left_s: float | None = None
    story: list[LineView] = []


class ClusterView(View):
    """The whole answer; rows keep their order from one answer to the next."""

    model: str = ""
    version: str = ""
    uptime_s: float = 0.0  # of the gateway
    processes: list[ProcessView] = []
    no_answer: list[str] = []
    outside: list[OutsideView] = []
    states: list[StateView] = []
    edges: list[EdgeView] = []
    links: list[LinkView] = []
    machines: list[MachineView] = []


class KeptAnswer(View):
    """An answer with its time, in milliseconds; `note`: an explanation of it."""

    at_ms: float
    told: ClusterView
    note: str = ""


class KeptAnswers(View):
    """What a page holds that asks nobody."""

    title: str
    answers: list[KeptAnswer]
