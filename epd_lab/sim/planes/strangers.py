"""Two living processes of one name: which of them a message is for, and whose the name is (F78).

A stranger is a process of another parent on another host. It is beside the one that has its name,
and in its place once it is a member. A line aside is called as the life that it leads to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

import msgspec

from epd.config import InstanceConfig
from epd.messages import Address, InstanceInfo
from epd.roles.member import Member
from epd_lab.sim.core.process import SimProcess

B = TypeVar("B")


class ClusterLife(Protocol):
    """What a cluster keeps of each life."""

    process: SimProcess


def listener(buses: Mapping[str, B], peer: Address) -> B | None:
    """Of this life, if it listens; else whoever has the name."""
    name = peer.instance_id.partition(":")[0]
    return buses.get(f"{name}:{peer.epoch}") or buses.get(name)


def listen(buses: dict[str, B], process: SimProcess, bus: B) -> None:
    buses[process.name] = bus
    if not process.is_stranger:
        buses[process.instance_id] = bus


def forget(buses: dict[str, B], life: str, name: str) -> None:
    """Of a life that is over; the name may be another's."""
    bus = buses.pop(life, None)
    if bus is not None and buses.get(name) is bus:
        del buses[name]


def is_of(peer: Address, process: SimProcess) -> bool:
    """Not of another life that has the name, too."""
    name = peer.instance_id.partition(":")[0]
    return name == process.instance_id and peer.epoch in (0, process.epoch)


def of_parent(config: InstanceConfig, process: SimProcess) -> InstanceConfig:
    lineage = "another" if process.is_stranger else "the topology's"
    return msgspec.structs.replace(config, lineage=lineage)


def attend(
    process: SimProcess,
    member: Member,
    processes: dict[str, SimProcess],
    buses: dict[str, B],
    lives: Mapping[str, ClusterLife],
) -> None:
    """A stranger has the name once it is welcomed; for the others, of one host, the kernel shows
    whether a life is gone."""

    def take_over() -> None:
        name = process.instance_id
        processes[name], buses[name] = process, buses[process.name]

    def is_gone(other: InstanceInfo) -> bool:
        life = lives.get(f"{other.address.instance_id}:{other.address.epoch}")
        return life is not None and all(
            not one.process.alive for one in lives.values() if one.process.pid == life.process.pid
        )

    if process.is_stranger:
        member.on_welcome = take_over
    else:
        member.is_gone = is_gone
