"""What a model is: nodes, the steps between them, and what is asked of every one.

A node is a frozen value that holds the states of real machines, what their owners still have to do,
and messages on their way.  `steps` names everything that may happen next, in an order that never
changes; running a step gives the node after it, or raises: `Violation` for a broken law,
`IllegalEvent` for an event that the table does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Node = TypeVar("Node", bound=Hashable)


class Violation(AssertionError):
    """A law is broken; told with the shortest way there."""


def require(holds: bool, law: str) -> None:
    """Raises Violation."""
    if not holds:
        raise Violation(law)


@dataclass(frozen=True, slots=True)
class Step(Generic[Node]):
    """Something that may happen next.

    Kinds: `message` (one arrives), `work` (what somebody has to do anyway), `retry` (a timer that
    repeats), `time` (any other timer), `loss` (a message is gone), `fault` (everything else).
    """

    name: str
    kind: str
    run: Callable[[], Node]


class Model(Protocol[Node]):
    """A small configuration of machines."""

    def initial(self) -> Node: ...

    def steps(self, node: Node) -> Iterator[Step[Node]]: ...

    def quiescent(self, node: Node) -> bool:
        """Nothing is left to do, and nothing is owned that should not be."""
        ...

    def succeeded(self, node: Node) -> bool:
        """Quiescent, and everybody has what was asked for."""
        ...
