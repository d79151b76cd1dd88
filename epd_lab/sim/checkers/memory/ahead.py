"""How far an encoder has run ahead of those who take its rows, by what really was begun.

Work on an image whose room was granted may always begin, also if that room is called off in the
turn of the grant: work may start in the next.  What was begun without a grant, and has rooms still,
fits the device tier together, unless it is one image alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from epd.fsm.encoding import Encoding
from epd.scheduling.slots import CACHE_ROWS, sized
from epd_lab.sim.cluster import Settings
from epd_lab.sim.engine.golden import ROW_NBYTES, Image
from epd_lab.sim.lives import Node
from epd_lab.sim.workload import mm_hash_of


class Ahead:
    """Of all encoders of a world."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._begun: dict[tuple[str, str], Encoding] = {}  # by process and hash
        self._called_off_s: dict[tuple[str, str], float] = {}  # when a granted room closed

    def began(self, node: Node, image: Any, settings: Settings) -> tuple[float, float]:
        """An image goes to a thread: how many bytes of rows were begun, and how many may be."""
        capacity = sized(settings.encode.cache_device_nbytes, CACHE_ROWS, ROW_NBYTES)
        instance, name = node.instance, node.process.name
        assert instance is not None
        assert instance.encode is not None
        try:
            key = mm_hash_of(Image.parse(bytes(image)))
        except ValueError:
            return 0, capacity
        machine = instance.encode.encodings.get(key)
        if machine is None or machine.stored:  # that began with its look into the storage
            return 0, capacity
        found = (instance.outgoing.find(room) for room in machine.rooms)
        if any(transfer is not None and transfer.grant is not None for transfer in found):
            return 0, capacity
        if self._called_off_s.get((name, key)) == self._now_s():
            return 0, capacity
        self._begun[name, key] = machine
        own = (m for (process, _), m in self._begun.items() if process == name)
        begun = [m for m in own if m.rooms and not m.terminal]
        nbytes = sum(machine.num_rows * ROW_NBYTES for machine in begun)
        return (nbytes if len(begun) > 1 else 0), capacity

    def left(self, node: Node, machine: Encoding, room: str) -> None:
        """A room was closed; with the last one the rows have no use."""
        place, instance = (node.process.name, machine.key), node.instance
        if not machine.rooms:
            self._begun.pop(place, None)
        transfer = instance.outgoing.find(room) if instance is not None else None
        if transfer is not None and transfer.grant is not None:
            self._called_off_s[place] = self._now_s()
