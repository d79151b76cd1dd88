"""README: every decision stands in a validated state machine.

What decides over time and stands outside a table has two shapes: a flag that is set now and asked
later, and the question whether a timer runs.  Every one that is left in what serves has a reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

EPD = Path(__file__).parents[2] / "epd"
SERVES = [path for part in ("roles", "runtime") for path in sorted((EPD / part).glob("*.py"))]
FLAGS = {
    "Actor.closing": "the process ends: nothing is decided any more",
    "DecodeRole.decode_here": "as the request is made: its context, which guards read",
    "Dispatcher.is_absent": "a fact of where rows are: placement, which is pure, reads it",
    "Mailbox._is_taking": "true within one call: an item is being taken",
    "Mailbox._is_finishing": "true within one call: what an item has caused is being done",
    "Component.performs": "of the mailbox, true within one call: what is caused now comes after it",
    "Bell._rung": "a wait that has not begun: an asyncio primitive",
    "Requests._settling": "true within one call: outcomes of one step go out as one message",
    "StepLoop._awake": "one task at a time, over one call of its own",
    "Stream._closed": "the queue of one client's updates has an end: an iterator's own",
    "Supervisor._hurried": "what children that are stopped later are told with it (CHILD)",
    "Timers._closed": "the process ends: nothing goes off any more",
    "Zygote._closed": "the supervisor ends: no other one is started",
}
ASKS_A_TIMER = {
    "cache_events.py": "news of a moment are told together: the first one arms",
    "failures.py": "lines of a second are told together: the first one arms",
    "askers.py": "one look at all rooms: the first room arms",
    "signs_of_life.py": "one sign for all requests: the first request arms",
    "rooms.py": "one look at all rooms and tombstones: the first one arms",
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
