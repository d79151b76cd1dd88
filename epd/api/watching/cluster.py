"""`GET /state`: the machines of a cluster, counted, and the oldest ones with their stories.

`GET /ui` is a page that asks it.  Both show what clients do (ids, sizes, when), so they are off
where strangers reach the gateway: beyond this host they take a key, or certificates, as the API
does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import parse_qs

from msgspec.structs import asdict, replace

from epd import __version__
from epd.api import web
from epd.api.http.access import warning
from epd.api.http.errors import ApiError, bad_request
from epd.api.http.exchange import Exchange
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
    WaitView,
)
from epd.config import GatewayConfig
from epd.frontend import Frontend, InstanceFacts, OutsideFacts, Refused
from epd.observed import EdgeCount, Observed, Query, StageLoad
from epd.topology import natural

PARAMETERS = ("machine", "state", "older_s", "late", "key", "instance", "limit", "over_s")
LIMIT = 20  # machines of each process, unless the request says how many
MAX_LIMIT = 200
MAX_OVER_S = 60.0
OFF = (
    "the state of the cluster is not shown to whoever comes: set an API key (--api-key), or listen "
    "on 127.0.0.1"
)


class ClusterWatch:
    """What can be seen of the machines behind one gateway."""

    def __init__(
        self, frontend: Frontend, config: GatewayConfig, model: str, started_s: float
    ) -> None:
        """`started_s`: when the gateway did, in monotonic time."""
        self._frontend = frontend
        self._model = model
        self._started_s = started_s
        self._is_off = bool(warning(config.host, config.access))

    async def state(self, exchange: Exchange) -> None:
        """Raises ApiError."""
        self._check()
        asked = read_query(exchange.query)
        earlier, since_s = None, 0.0
        if asked.over_s:
            earlier, since_s = await self._look(Query(), asked.instance), time.monotonic()
            await asyncio.sleep(asked.over_s)
        view = await self._look(asked.query, asked.instance)
        if earlier is not None:
            _add_rates(view.edges, earlier.edges, time.monotonic() - since_s)
        await exchange.respond_json(200, view)

    async def _look(self, query: Query, instance: str) -> ClusterView:
        """At that process, or at all.  Raises ApiError."""
        try:
            told, silent = await self._frontend.observe(query)
        except Refused as refusal:
            raise ApiError(refusal.status, refusal.message) from None
        loads = [load for one in told.values() for load in one.loads]
        ready = self._frontend.ready()
        facts = {one["instance"]: one for one in ready.instances}
        if instance:
            told = {name: one for name, one in told.items() if name == instance}
            facts = {name: one for name, one in facts.items() if name == instance}
        view = view_of(told, facts, silent, loads, ready.outside)
        view.model, view.version = self._model, __version__
        view.uptime_s = time.monotonic() - self._started_s
        return view

    async def page(self, exchange: Exchange) -> None:
        """It holds nothing of the cluster, and asks whoever opens it for a key if one is needed."""
        self._check()
        page, headers = web.cluster_page()
        await exchange.respond(200, page, web.CONTENT_TYPE, list(headers))

    def _check(self) -> None:
        """Raises ApiError 403."""
        if self._is_off:
            raise ApiError(403, OFF, code="state_is_off")


class ViewQuery(NamedTuple):
    """By the parameters of a request."""

    query: Query
    instance: str  # empty: all
    over_s: float  # between two looks, for rates; 0: one is enough


def read_query(text: str) -> ViewQuery:
    """Raises ApiError 400."""
    given = parse_qs(text, keep_blank_values=True)
    for name in given:
        if name not in PARAMETERS:
            message = f"{name[:40]!r} is no parameter of /state; there are {', '.join(PARAMETERS)}"
            raise bad_request(message, name[:40])
    query = Query(
        machines=_names(given, "machine"),
        states=_names(given, "state"),
        older_s=_number(given, "older_s", 0.0, sys.float_info.max, float),
        key=_last(given, "key"),
        late=bool(_number(given, "late", 0, 1, int)),
        limit=int(
            _number(given, "limit", LIMIT if given.keys() - {"over_s"} else 0, MAX_LIMIT, int)
        ),
    )
    over_s = _number(given, "over_s", 0.0, MAX_OVER_S, float)
    return ViewQuery(query, _last(given, "instance"), over_s)


def _last(given: Mapping[str, list[str]], name: str) -> str:
    return given.get(name, [""])[-1]


def _names(given: Mapping[str, list[str]], name: str) -> tuple[str, ...]:
    return tuple(word.upper() for text in given.get(name, ()) for word in text.split(",") if word)


def _number(
    given: Mapping[str, list[str]], name: str, default: float, most: float, kind: type[float]
) -> float:
    text = _last(given, name)
    if not text:
        return default
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= most:
        takes = f"a whole number from 0 to {most:g}"
        if kind is float:
            takes = "seconds, 0 or more" if most > MAX_OVER_S else f"seconds from 0 to {most:g}"
        raise bad_request(f"{name} is {text[:40]!r}; it takes {takes}", name)
    return value


def view_of(
    told: Mapping[str, Observed],
    facts: Mapping[str, InstanceFacts],
    silent: Iterable[str],
    loads: Sequence[StageLoad],
    outside: Iterable[OutsideFacts] = (),
) -> ClusterView:
    """Counts are sums over processes; machines are listed with theirs, oldest first.  Processes are
    listed by name, the gateway first: in which order they answer differs from time to time."""
    gateway, *_ = told or ("",)
    names = sorted({*told, *facts}, key=lambda name: (name != gateway, natural(name)))
    told = {name: told.get(name, Observed()) for name in names}
    states: dict[tuple[str, str], StateView] = {}
    edges: Counter[EdgeCount] = Counter()
    machines: list[MachineView] = []
    for name, observed in told.items():
        for one in observed.states:
            fresh = StateView(machine=one.machine, state=one.state)
            view = states.setdefault((one.machine, one.state), fresh)
            view.count += one.count
            view.oldest_s = max(view.oldest_s, one.oldest_s)
            view.late += one.num_late
            view.left_s = min((s for s in (view.left_s, one.left_s) if s is not None), default=None)
            view.instances[name] = one.count
        for edge in observed.edges:
            edges[replace(edge, count=0)] += edge.count
        for facts_of in observed.machines:
            story = [LineView(**asdict(line)) for line in facts_of.story]
            machines.append(MachineView(instance=name, **{**asdict(facts_of), "story": story}))
    return ClusterView(
        processes=[_process(name, one, facts.get(name), loads) for name, one in told.items()],
        no_answer=sorted(silent, key=natural),
        outside=[OutsideView(**dataclasses.asdict(one)) for one in outside],
        states=[states[key] for key in sorted(states)],
        edges=[
            EdgeView(**{**asdict(edge), "count": count})
            for edge, count in sorted(edges.items(), key=lambda pair: repr(pair[0]))
        ],
        links=[
            LinkView(instance=name, **asdict(link))
            for name, one in told.items()
            for link in sorted(one.links, key=lambda link: (natural(link.peer), link.transport))
        ],
        machines=sorted(machines, key=lambda one: -one.age_s),
    )


def _add_rates(edges: Iterable[EdgeView], earlier: Iterable[EdgeView], spent_s: float) -> None:
    """A process that has begun anew counts anew: no edge was taken less often than never."""
    before = {_edge_of(edge): edge.count for edge in earlier}
    for edge in edges:
        edge.per_s = max(0.0, (edge.count - before.get(_edge_of(edge), 0)) / spent_s)


def _edge_of(edge: EdgeView) -> tuple[str, ...]:
    return edge.machine, edge.source, edge.event, edge.target, edge.reason


def _process(
    name: str, one: Observed, facts: InstanceFacts | None, loads: Iterable[StageLoad]
) -> ProcessView:
    memory = [MemoryView(**asdict(kind)) for kind in one.memory]
    known = facts or {"instance": name, "roles": ["gateway"]}
    load_s = {load.stage: load.load_s for load in loads if load.instance == name}
    view = ProcessView(**known, in_use=dict(one.in_use), memory=memory, load_s=load_s)
    view.waits = [WaitView(**wait) for wait in facts["waits"]] if facts else []
    return view
