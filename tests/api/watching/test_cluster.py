"""`GET /state`: what may be asked, what is answered, and who may ask."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import permutations, product
from typing import Any

import pytest

from epd import __version__
from epd.api.watching.cluster import view_of
from epd.config import AccessConfig
from epd.frontend import InstanceFacts, OutsideFacts, Readiness
from epd.observed import (
    EdgeCount,
    LinkCount,
    MachineFacts,
    Memory,
    Observed,
    Query,
    StageLoad,
    StateCount,
    StoryLine,
)
from tests.api.fakes import serving
from tests.api.wire import exchange, request

LINE = StoryLine(at_s=12.5, source="PARKED", event="GrantReceived", target="WRITING")


def waiting(
    count: int, oldest_s: float, num_late: int = 0, left_s: float | None = None
) -> StateCount:
    return StateCount(
        machine="OUTGOING",
        state="WRITING",
        count=count,
        oldest_s=oldest_s,
        num_late=num_late,
        left_s=left_s,
    )


def edge(count: int, reason: str = "") -> EdgeCount:
    return EdgeCount(
        machine="OUTGOING",
        source="PARKED",
        event="GrantReceived",
        target="WRITING",
        count=count,
        reason=reason,
    )


def facts(key: str, age_s: float) -> MachineFacts:
    return MachineFacts(
        machine="OUTGOING", key=key, state="WRITING", age_s=age_s, is_over=False, story=(LINE,)
    )


TOLD = {
    "gateway": Observed(
        loads=(
            StageLoad(instance="e0", stage="encode", load_s=1.5),
            StageLoad(instance="e1", stage="encode", load_s=0.0),
        )
    ),
    "e0": Observed(
        in_use=(("encodings", 2),),
        memory=(Memory(kind="host tier", unit="bytes", used=5, capacity=9),),
        states=(waiting(2, 3.0, 1, 0.5),),
        edges=(edge(4), edge(1, "illegal")),
        links=(LinkCount(peer="p0", transport="shm", nbytes=77),),
        machines=(facts("r1/1/0", 3.0),),
    ),
    "e1": Observed(
        states=(waiting(1, 7.0, 1, 2.5),), edges=(edge(3),), machines=(facts("r2/1/0", 7.0),)
    ),
}


async def ask(path: str, **given: Any) -> tuple[int, Any, list[Query]]:
    observed = given.pop("observed", TOLD)
    readiness = given.pop("readiness", None)
    async with serving(**given) as (server, frontend, _):
        frontend.observed = observed
        frontend.readiness = readiness or frontend.readiness
        status, _, body = await exchange(server, request(method="GET", path=path))
        return status, json.loads(body), frontend.queries


async def test_counts_are_summed_and_machines_are_listed_oldest_first() -> None:
    status, told, _ = await ask("/state?machine=outgoing&state=WRITING")
    assert status == 200
    assert told["states"] == [
        {
            "machine": "OUTGOING",
            "state": "WRITING",
            "count": 3,
            "oldest_s": 7.0,
            "late": 2,
            "left_s": 0.5,
            "instances": {"e0": 2, "e1": 1},
        }
    ]
    assert [(one["count"], one["reason"]) for one in told["edges"]] == [(7, ""), (1, "illegal")]
    assert [(one["instance"], one["key"]) for one in told["machines"]] == [
        ("e1", "r2/1/0"),
        ("e0", "r1/1/0"),
    ]
    assert told["machines"][0]["story"] == [
        {
            "at_s": 12.5,
            "source": "PARKED",
            "event": "GrantReceived",
            "target": "WRITING",
            "times": 1,
        }
    ]
    assert told["no_answer"] == ["d0"]
    assert [one["load_s"] for one in told["processes"]] == [{}, {"encode": 1.5}, {"encode": 0.0}]
    assert told["links"] == [{"instance": "e0", "peer": "p0", "transport": "shm", "nbytes": 77}]
    assert told["processes"][1]["in_use"] == {"encodings": 2}
    assert told["processes"][1]["memory"] == [
        {"kind": "host tier", "unit": "bytes", "used": 5, "capacity": 9}
    ]


def lost(name: str) -> InstanceFacts:
    return {
        "instance": name,
        "epoch": 3,
        "pid": 41,
        "num_ranks": 1,
        "roles": ["encode"],
        "state": "LOST",
        "assigned": 0,
        "transports": {},
        "fallbacks": {},
        "cached_images": 0,
        "silent_peers": [],
        "silent_s": 12.5,
        "waits": [{"what": "step", "for_s": 4.5, "bound_s": 4.0}],
        "reason": "silent",
    }


@pytest.mark.parametrize("order", [*permutations(("e10", "d0", "e2"))])
def test_rows_keep_their_order_whoever_answers_first(order: Sequence[str]) -> None:
    """By name, e2 before e10; who is mute has its place among them."""
    count = StateCount(machine="OUTGOING", state="WRITING", count=1, oldest_s=1.0)
    links = tuple(LinkCount(peer=name, transport="shm", nbytes=1) for name in order)
    told = {name: Observed(states=(count,), links=links) for name in order}
    view = view_of({"gateway": Observed(), **told}, {"e9": lost("e9")}, order, ())
    assert [one.instance for one in view.processes] == ["gateway", "d0", "e2", "e9", "e10"]
    assert list(view.states[0].instances) == view.no_answer == ["d0", "e2", "e10"]
    pairs = [(one.instance, one.peer) for one in view.links]
    assert pairs == list(product(("d0", "e2", "e10"), repeat=2))


async def test_what_runs_here() -> None:
    _, told, _ = await ask("/state")
    assert (told["model"], told["version"]) == ("tiny", __version__)
    assert 0.0 <= told["uptime_s"] < 60.0


async def test_one_process_alone() -> None:
    _, told, _ = await ask("/state?instance=e0")
    assert [(one["instance"], one["load_s"]) for one in told["processes"]] == [
        ("e0", {"encode": 1.5})
    ]
    assert [one["count"] for one in told["states"]] == [2]


async def test_who_is_gone_and_who_was_refused_are_told() -> None:
    """F78, F79: also to whoever asks afterwards."""
    refused = OutsideFacts("e0", 9, 77, "tcp://b:1", ["encode"], "REFUSED", 3.0, "in use")
    ready = Readiness(True, "", [lost("e7")], [refused])
    _, told, _ = await ask("/state", readiness=ready)
    (shown,) = (one for one in told["processes"] if one["instance"] == "e7")
    assert (shown["state"], shown["silent_s"], shown["reason"]) == ("LOST", 12.5, "silent")
    assert told["outside"] == [asdict(refused)]
    _, told, _ = await ask("/state?instance=e0", readiness=ready)
    assert [one["instance"] for one in told["processes"]] == ["e0"]


async def test_rates_are_those_of_the_time_between_two_looks() -> None:
    async with serving() as (server, frontend, _):
        looks = iter([{"e0": Observed(edges=(edge(4),))}, TOLD])

        async def observe(query: Query) -> Any:
            frontend.queries.append(query)
            return next(looks), []

        frontend.observe = observe
        asked = request(method="GET", path="/state?over_s=0.05&limit=3")
        _, _, body = await exchange(server, asked)
        edges = {one["reason"]: one for one in json.loads(body)["edges"]}
    assert frontend.queries == [Query(), Query(limit=3)]
    rates = (edges[""]["per_s"], edges["illegal"]["per_s"])
    assert rates[0] == pytest.approx(3 * rates[1])  # from 4 to 7, and from none to 1
    assert 0.0 < rates[1] < 2 / 0.05
    assert (await ask("/state"))[1]["edges"][0]["per_s"] is None


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("", Query()),
        ("?limit=3", Query(limit=3)),
        ("?over_s=0", Query()),
        ("?key=gw-1-2%2F1", Query(key="gw-1-2/1", limit=20)),
        (
            "?machine=outgoing,INCOMING&state=quarantined&older_s=5",
            Query(
                machines=("OUTGOING", "INCOMING"), states=("QUARANTINED",), older_s=5.0, limit=20
            ),
        ),
        ("?late=1", Query(late=True, limit=20)),
    ],
)
async def test_what_is_asked_for(text: str, query: Query) -> None:
    assert (await ask(f"/state{text}"))[2] == [query]


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("older_s=soon", "older_s"),
        ("older_s=-1", "older_s"),
        ("older_s=nan", "older_s"),
        ("older_s=inf", "older_s"),
        ("late=2", "late"),
        ("over_s=61", "over_s"),
        ("limit=201", "limit"),
        ("limit=1.5", "limit"),
        ("mashine=OUTGOING", "mashine"),
    ],
)
async def test_what_cannot_be_asked_for(text: str, param: str) -> None:
    status, told, queries = await ask(f"/state?{text}")
    assert (status, told["error"]["param"], queries) == (400, param, [])


async def test_too_many_who_look() -> None:
    status, told, _ = await ask("/state", observed=None)
    assert status == 429 and told["error"]["message"] == "too many look"


async def test_strangers_see_nothing() -> None:
    """It is off where they reach the gateway, unless a key says who may."""
    status, told, queries = await ask("/state", host="0.0.0.0")
    assert (status, told["error"]["code"], queries) == (403, "state_is_off", [])
    keys = AccessConfig(api_keys=("secret",))
    for host in ("127.0.0.1", "0.0.0.0"):
        assert (await ask("/state", host=host, access=keys))[0] == 401


async def test_the_page_is_shown_where_the_state_is_and_asks_for_the_key_itself() -> None:
    keys = AccessConfig(api_keys=("secret",))
    open_to_all = {"host": "0.0.0.0"}
    for status, given in ((200, {}), (403, open_to_all), (200, open_to_all | {"access": keys})):
        async with serving(**given) as (server, _, _):
            assert (await exchange(server, request(method="GET", path="/ui")))[0] == status
