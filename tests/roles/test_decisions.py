"""README: every decision stands in a validated state machine.

What decides over time and stands outside a table has four shapes: a flag that is set now and asked
later, the question whether a timer runs, a time that is compared with now, and a coroutine that
waits while a machine says something else.  Every one that is left in what serves has a reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

EPD = Path(__file__).parents[2] / "epd"
PARTS = ("groups", "roles", "runtime")
SERVES = [path for part in PARTS for path in sorted((EPD / part).rglob("*.py"))]
FLAGS = {
    "AdmissionControl._has_others": "once and for good: a second key has asked, so keys take turns",
    "Actor.closing": "the process ends: nothing is decided any more",
    "Member.is_wanted": "of a gateway: a name of who runs them has its address; LEFT is the rest",
    "Mailbox.has_item": "true within one call: an item is being taken",
    "Mailbox.may_fire": "true within one call: an item is at hand, and no effect of it",
    "Bell._rung": "a wait that has not begun: an asyncio primitive",
    "Requests.is_settling": "true within one call: outcomes of one step go out as one message",
    "StepLoop.is_awake": "one task at a time, over one call of its own",
    "Stream._closed": "the queue of one client's updates has an end: an iterator's own",
    "Supervisor._hurried": "what children that are stopped later are told with it (CHILD)",
    "Timers._closed": "the process ends: nothing goes off any more",
    "Zygote._has_answered": "it has imported: how long it may take from now on",
    "Zygote._closed": "the supervisor ends: no other one is started",
}
ASKS_A_TIMER = {
    "cache_events.py": "news of a moment are told together: the first one arms",
    "failures.py": "lines of a second are told together: the first one arms",
    "askers.py": "one look at all rooms: the first room arms",
    "signs_of_life.py": "one sign for all requests: the first request arms",
    "rooms.py": "one look at all rooms and tombstones: the first one arms",
}


COMPARES_TIMES = {
    "holds.py": "a lease that another process grants: who asks for it late places the prompt anew",
    "health.py": "one look at all waits: how long the device has done nothing",
    "links.py": "how long an echo is believed: a doubt (LINK) begins after that",
    "observation.py": "nothing is decided: machines that are in a state for long are told",
    "registry.py": "whether it is young is asked of it, and nothing follows when it is no more",
    "rooms.py": "a timer for many: which of those behind it are due",
    "signs_of_life.py": "a timer for all requests: whose turn it is",
    "speculation.py": "a speed is measured: the time since a count began",
    "timers.py": "what timers are",
    "child.py": "how often progress is told",
    "front.py": "the process ends: how long it waits for its last requests",
}
WAITS = {
    "StepLoop._launch": "a step on the device, which REQUEST calls in flight",
    "Bell.__await__": "what a bell is",
    "Mailbox._news": "a process to which nothing comes",
    "Stream._news": "a client that reads its updates",
    "_Asked.news": "an operator who waits for what instances say",
    "Adapters.load": "a client waits for what ADAPTER says",
    "Adapters.unload": "a client waits for what ADAPTER says",
    "Instance._idle": "the process ends when nothing is open",
    "Lines._begin": "a thread that writes, and a process that ends",
    "Child.ended": "who stops the supervisor waits for what CHILD says",
    "Child.served": "who starts the supervisor waits for what CHILD says",
    "Leader.ready": "who starts the process waits for what GROUP says",
    "Leader.lost": "who ends the process waits for what GROUP says",
    "Leader.closed": "who ends the process waits for what GROUP says",
    "Leader.execute": "a step of all ranks, which GROUP calls a command",
    "FanOuts.write": "who writes waits for what FAN_OUT says",
    "RankProcesses.ask": "another rank answers, or its end does",
    "Ending.drain": "the process is told by a signal",
    "Ending.now": "the process is told by a signal",
    "ForkedProcess._ended": "the operating system tells of its end",
    "Zygote._fork": "a process answers through a pipe",
}


def _is_bool(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Constant):
        return isinstance(value.value, bool)
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.op, ast.Not)
    if isinstance(value, ast.BoolOp):
        return all(map(_is_bool, value.values))
    return isinstance(value, ast.Compare)


def _set(node: ast.AST) -> Iterator[str]:
    """Attributes that a statement sets to true or false, or changes by that."""
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets, value = [node.target], node.value
        if isinstance(node, ast.AugAssign) and not isinstance(node.op, ast.BitAnd | ast.BitOr):
            return  # a count
    else:
        return
    if _is_bool(value):
        yield from (target.attr for target in targets if isinstance(target, ast.Attribute))


def flags(text: str) -> set[str]:
    """`Class.attribute` of every flag that is set after it was made."""
    return {
        f"{owner.name}.{name}"
        for owner in ast.walk(ast.parse(text))
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        if method.name != "__init__"
        for node in ast.walk(method)
        for name in _set(node)
    }


def asks_a_timer(text: str) -> bool:
    """Whether it decides by a timer that runs."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("runs", "will_call")
        and not node.keywords
        and len(node.args) > 0
        for node in ast.walk(ast.parse(text))
    )


def compares_times(text: str) -> bool:
    """Whether it compares something with the time that it is."""
    return any(
        isinstance(node, ast.Compare)
        and any(
            (isinstance(n, ast.Attribute) and n.attr == "now_s")
            or (isinstance(n, ast.Name) and n.id == "now_s")
            for n in ast.walk(node)
        )
        for node in ast.walk(ast.parse(text))
    )


def waits(text: str) -> set[str]:
    """`Class.attribute`, or `Class.method`, of what is made for a coroutine to wait for."""
    found = set()
    for owner in ast.walk(ast.parse(text)):
        for part in owner.body if isinstance(owner, ast.ClassDef) else ():
            for node in ast.walk(part):
                if isinstance(node, ast.Assign | ast.AnnAssign) and _makes_wait(node.value):
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    made = ast.unparse(target).removeprefix("self.")
                    own = part is node or getattr(part, "name", "") == "__init__"
                    found.add(f"{owner.name}.{made if own else getattr(part, 'name', '')}")
    return found


def _makes_wait(value: ast.expr | None) -> bool:
    named = {ast.unparse(n).rpartition(".")[2] for n in ast.walk(value)} if value else set()
    return bool(named & {"create_future", "Bell", "Event", "Condition", "Semaphore", "Queue"})


def test_no_time_is_compared_but_for_a_reason() -> None:
    found = {path.name for path in SERVES if compares_times(path.read_text(encoding="utf-8"))}
    assert found == COMPARES_TIMES.keys(), "a timer and a state say it; see docs/style.md"


def test_no_coroutine_waits_but_for_a_reason() -> None:
    found = set().union(*(waits(path.read_text(encoding="utf-8")) for path in SERVES))
    assert found == WAITS.keys(), "a state of a machine says it; see docs/style.md"


def test_a_time_that_is_compared_is_noticed() -> None:
    assert compares_times("if self.actor.clock.now_s() < kept.give_up_s:\n    self.wait()")
    assert compares_times("return now_s < due_s")
    assert not compares_times("due_s = self.clock.now_s() + delay_s")


def test_a_coroutine_that_waits_is_noticed() -> None:
    text = (
        "class Ahead:\n    async def begin(self):\n        turn: F[bool] = loop.create_future()\n"
    )
    assert waits(text) == {"Ahead.begin"}
    assert waits("class Ring:\n    def __init__(self):\n        self.free = asyncio.Event()\n") == {
        "Ring.free"
    }


def test_no_flag_decides_but_those_with_a_reason() -> None:
    found = set().union(*(flags(path.read_text(encoding="utf-8")) for path in SERVES))
    assert found == FLAGS.keys(), "a state of a machine says it; see docs/style.md"


def test_no_timer_is_asked_whether_it_runs_but_for_a_reason() -> None:
    found = {path.name for path in SERVES if asks_a_timer(path.read_text(encoding="utf-8"))}
    assert found == ASKS_A_TIMER.keys(), "a state of a machine says it; see docs/style.md"


@pytest.mark.parametrize(
    "line",
    [
        "self.draining = True",
        "role.draining = True",
        "self.is_late = now_s > self.due_s",
        "self.idle: bool = not self.open",
        "self.ok &= a == b",
    ],
)
def test_a_flag_put_back_is_noticed(line: str) -> None:
    text = "class Component:\n    def __init__(self):\n        {}\n    def {}(self):\n        {}\n"
    name = line.replace(":", " ").split()[0].partition(".")[2]
    assert flags(text.format("pass", "drain", line)) == {f"Component.{name}"}
    assert not flags(text.format(line, "drain", "pass"))


def test_a_timer_that_is_asked_is_noticed() -> None:
    assert asks_a_timer("if not self.actor.timers.will_call(self.join):\n    self.join()")
    assert asks_a_timer("self.actor.timers.runs(machine, PlacementTimedOut)")
    assert not asks_a_timer("self.actor.timers.call_later(1.0, self.join)")
