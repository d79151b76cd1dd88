"""What `epd top`, `epd list` and `epd story` show of an answer of `GET /state`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from epd.api.watching.cluster_view import (
    ClusterView,
    EdgeView,
    LineView,
    MachineView,
    MemoryView,
    OutsideView,
    ProcessView,
    StateView,
    WaitView,
)
from epd.cli.boundary import CommandFailed
from epd.cli.look import machines
from epd.cli.look.screen import show
from epd.cli.look.top import TopView
from epd.cli.main import main

ROOM = "gateway-1-7/1/0"


def line(at_s: float, source: str, event: str, target: str, times: int = 1) -> LineView:
    return LineView(at_s=at_s, source=source, event=event, target=target, times=times)


def machine(instance: str, name: str, state: str, age_s: float, *story: LineView) -> MachineView:
    return MachineView(
        instance=instance, machine=name, key=ROOM, state=state, age_s=age_s, story=list(story)
    )


def state(name: str, count: int, oldest_s: float, late: int = 0) -> StateView:
    return StateView(
        machine="INCOMING",
        state=name,
        count=count,
        oldest_s=oldest_s,
        late=late,
        left_s=0.5,
        instances={"p0": count},
    )


def edge(source: str, target: str, count: int) -> EdgeView:
    return EdgeView(machine="INCOMING", source=source, event="X", target=target, count=count)


def told(**changed: Any) -> ClusterView:
    """An answer."""
    return replace(
        ClusterView(
            processes=[
                ProcessView(instance="gateway", roles=["gateway"], in_use={"offers": 0}),
                ProcessView(
                    instance="p0",
                    roles=["prefill", "decode"],
                    state="HEALTHY",
                    epoch=5,
                    memory=[
                        MemoryView(kind="kv", unit="blocks", used=3, capacity=9),
                        MemoryView(kind="host tier", unit="bytes", used=3 << 20, capacity=1 << 30),
                    ],
                    in_use={"incoming": 2, "requests": 0},
                    load_s={"prefill": 1.5},
                    waits=[WaitView(what="step", for_s=0.25, bound_s=4.0)],
                ),
            ],
            no_answer=["d0"],
            states=[state("GRANTED", 2, 0.25), state("QUARANTINED", 1, 130.0, late=1)],
            edges=[edge("OFFERED", "GRANTED", 10), edge("GRANTED", "GRANTED", 500)],
            machines=[
                machine(
                    "p0",
                    "INCOMING",
                    "QUARANTINED",
                    7.0,
                    line(11.0, "GRANTED", "PeerLost", "QUARANTINED"),
                ),
                machine(
                    "e0",
                    "OUTGOING",
                    "WRITING",
                    9.0,
                    line(10.0, "PARKED", "GrantReceived", "WRITING"),
                    line(10.5, "WRITING", "RetryDue", "WRITING", 3),
                ),
            ],
        ),
        **changed,
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12 ms"), (1.0, "1.0 s"), (119.0, "119.0 s"), (150.0, "2.5 m"), (9000.0, "2.5 h")],
)
def test_ages(seconds: float, text: str) -> None:
    assert machines.age(seconds) == text


def test_processes_and_who_did_not_answer() -> None:
    head, gateway, p0, silent = machines.process_lines(told())
    assert head.split() == [
        "PROCESS",
        "ROLES",
        "STATE",
        *("WAITS LOAD MEMORY IN USE EPOCH".split()),
    ]
    assert gateway.split() == ["gateway", "gateway"]
    assert (
        "prefill+decode" in p0
        and "step 250 ms  prefill 1.5 s  kv 3/9 blocks, host tier 3.0 MiB/1.0 GiB" in p0
    )
    assert p0.split()[-3:] == ["incoming", "2", "5"] and silent == "d0 did not answer"


def test_who_is_gone_and_who_has_no_place() -> None:
    gone = ProcessView(
        instance="e0", roles=["encode"], state="LOST", epoch=4, silent_s=12.34, reason="silent"
    )
    refused = OutsideView(
        instance="p0",
        epoch=9,
        pid=77,
        endpoint="tcp://b:1",
        roles=["prefill"],
        state="REFUSED",
        since_s=3.0,
        reason="its name is in use",
    )
    lines = machines.process_lines(told(processes=[gone], outside=[refused]))
    assert "LOST, last heard 12.3 s ago: silent" in lines[1]
    assert lines[-1] == "p0 (pid 77, tcp://b:1): REFUSED 3.0 s ago: its name is in use"


def test_a_story_is_merged_by_time() -> None:
    lines = machines.story_lines(told().machines)
    assert [one.split()[:5] for one in lines[1:4]] == [
        ["0.0", "ms", "e0", "OUTGOING", "GrantReceived"],
        ["500.0", "ms", "e0", "OUTGOING", "RetryDue"],
        ["1000.0", "ms", "p0", "INCOMING", "PeerLost"],
    ]
    assert "RetryDue x3" in lines[2] and "GRANTED -> QUARANTINED" in lines[3]
    assert lines[-2].split() == ["p0", "INCOMING", "QUARANTINED", "for", "7.0", "s", ROOM]


def test_rates_are_those_between_two_looks() -> None:
    view = TopView("here")
    view.update(told(), 100.0)
    later = told(edges=[edge("OFFERED", "GRANTED", 30), edge("GRANTED", "GRANTED", 900)])
    view.update(later, 104.0)
    (granted,) = [text for _, text in view.lines(40) if "GRANTED" in text and "QUAR" not in text]
    assert granted.split() == ["INCOMING", "GRANTED", "2", *"250 ms 500 ms 5.0 p0 2".split()]


def chosen(view: TopView, height: int = 40) -> list[str]:
    return [text.split()[1] for style, text in view.lines(height) if style == "reverse"]


def test_from_a_state_to_its_machines_to_a_story_and_back() -> None:
    view = TopView("here")
    view.update(told(), 100.0)
    assert chosen(view) == ["GRANTED"]
    view.move(5)
    assert chosen(view) == ["QUARANTINED"] and view.query == {}
    view.enter()
    assert view.query == {"machine": "INCOMING", "state": "QUARANTINED", "limit": "100"}
    assert chosen(view) == []  # nobody has answered yet
    view.enter()  # nothing to look into
    view.update(told(), 101.0)
    view.enter()
    assert view.query == {"key": ROOM, "limit": "200"}
    view.update(told(), 102.0)
    view.enter()
    assert any("PeerLost" in text for _, text in view.lines(40))
    view.back()
    view.back()
    view.back()
    assert view.query == {} and chosen(view) == ["QUARANTINED"]


def test_what_is_late_is_red() -> None:
    view = TopView("here")
    view.update(told(), 100.0)
    red = [text.split() for style, text in view.lines(40) if style == "red"]
    assert [line[1:7] for line in red] == [["QUARANTINED", "1", "2.2", "m", "1", "late"]]
    assert "500 ms" in machines.state_lines(told())[1]
    view.enter()
    view.update(told(machines=[replace(told().machines[0], is_late=True), *told().machines]), 1.0)
    view.move(1)
    assert [text.split()[2] for style, text in view.lines(40) if style == "red"] == ["late"]


def test_what_is_chosen_stays_in_sight() -> None:
    view = TopView("here")
    many = [state(f"S{number}", 1, 1.0) for number in range(50)]
    view.update(told(states=many), 1.0)
    for _ in range(30):
        view.move(1)
    assert chosen(view, 20) == ["S30"] and len(view.lines(20)) <= 20


def test_what_is_chosen_stays_chosen_while_rows_come_and_go() -> None:
    view = TopView("here")
    view.update(told(states=[state("GRANTED", 2, 0.25), state("QUARANTINED", 1, 7.0)]), 1.0)
    view.move(1)
    more = [state("FAILED", 1, 1.0), state("GRANTED", 2, 0.25), state("QUARANTINED", 1, 8.0)]
    view.update(told(states=more), 2.0)
    assert chosen(view) == ["QUARANTINED"]
    view.enter()
    view.update(told(states=more[2:]), 3.0)
    view.back()
    assert chosen(view) == ["QUARANTINED"]


class Server:
    """Answers, and then does not."""

    def __init__(self) -> None:
        self.queries: list[Any] = []
        self.is_down = False

    async def state(self, query: Any) -> Any:
        self.queries.append(dict(query))
        if self.is_down:
            raise CommandFailed("nobody there")
        return told()


async def test_keys_ask_at_once_and_q_ends_it() -> None:
    server: Any = Server()
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        shown = asyncio.create_task(show(server, "here", 60.0))
        async with asyncio.timeout(10):
            while not server.queries:
                await asyncio.sleep(0.01)
            keys.send_text("\x1b[B\r")  # down, enter
            while len(server.queries) < 2:
                await asyncio.sleep(0.01)
            server.is_down = True
            keys.send_text("\x1b[D")  # left
            while len(server.queries) < 3:
                await asyncio.sleep(0.01)
            keys.send_text("q")
            await shown
    assert server.queries == [
        {},
        {"machine": "INCOMING", "state": "QUARANTINED", "limit": "100"},
        {},
    ]


def test_top_wants_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 2
    assert "needs a terminal" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["5x", "", "-1s"])
def test_a_time_that_cannot_be_read(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "transfers", f"--older={text}"]) == 2
    assert "write 500ms, 5s, 2m, 1h or 90d" in capsys.readouterr().err
