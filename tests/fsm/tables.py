"""Every kind of machine, with all that a test of each needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epd.fsm import (
    adapter,
    child,
    embedding,
    encoding,
    fan_out,
    generation,
    group,
    incoming,
    instance,
    link,
    membership,
    offer,
    outgoing,
)
from epd.fsm.kernel import Machine, Table
from epd.fsm.request import TABLE as REQUEST
from epd_lab.formal.machines import (
    CLIENT,
    CONTRACT,
    FAILURE,
    GRANT,
    HOLDER,
    KV,
    LAYOUT,
    LIMITS,
    MANIFEST,
    MESSAGE,
    OFFER,
    PEER,
    PLACEMENT,
    REGION,
    launch,
    make_adapter,
    make_child,
    make_embedding,
    make_encoding,
    make_event,
    make_fan_out,
    make_generation,
    make_granted,
    make_group,
    make_incoming,
    make_instance,
    make_link,
    make_membership,
    make_offer,
    make_outgoing,
    make_request,
)

__all__ = [
    "CLIENT",
    "CONTRACT",
    "FAILURE",
    "GRANT",
    "HOLDER",
    "KINDS",
    "KV",
    "LAYOUT",
    "LIMITS",
    "MANIFEST",
    "MESSAGE",
    "OFFER",
    "PEER",
    "PLACEMENT",
    "REGION",
    "Kind",
    "at",
    "context",
    "launch",
    "make_adapter",
    "make_child",
    "make_embedding",
    "make_encoding",
    "make_event",
    "make_fan_out",
    "make_generation",
    "make_granted",
    "make_group",
    "make_incoming",
    "make_instance",
    "make_link",
    "make_membership",
    "make_offer",
    "make_outgoing",
    "make_request",
]


@dataclass(frozen=True)
class Kind:
    table: Table
    make: Callable[[], Machine]
    num_cells: int  # state x event x outcome of the guard: at least so many must be visited

    @property
    def name(self) -> str:
        return self.table.name


KINDS = (
    Kind(generation.TABLE, make_generation, 40),
    Kind(REQUEST, make_request, 76),
    Kind(encoding.TABLE, make_encoding, 62),
    Kind(embedding.TABLE, make_embedding, 52),
    Kind(outgoing.TABLE, make_granted, 79),
    Kind(incoming.TABLE, make_incoming, 44),
    Kind(instance.TABLE, make_instance, 59),
    Kind(link.TABLE, make_link, 12),
    Kind(membership.TABLE, make_membership, 82),
    Kind(offer.TABLE, make_offer, 12),
    Kind(child.TABLE, make_child, 57),
    Kind(group.TABLE, make_group, 22),
    Kind(fan_out.TABLE, make_fan_out, 16),
    Kind(adapter.TABLE, make_adapter, 17),
)


def at(machine: Machine, state: Any) -> Machine:
    """The machine, put into a state by force."""
    machine._state = state
    return machine


def context(machine: Machine) -> dict[str, Any]:
    """Everything that a machine remembers, apart from its story."""
    kinds = [kind for kind in type(machine).__mro__ if kind not in (Machine, object)]
    names = [name for kind in kinds for name in kind.__dict__.get("__slots__", ())]
    return {name: repr(getattr(machine, name, None)) for name in sorted(names)}
