"""Threads and loops that stand still while their process lives: what faults freeze, and healing."""

from __future__ import annotations

from collections.abc import Iterable

from epd.roles.compose import Instance
from epd.roles.steps.step_loop import StepLoop
from epd_lab.sim.planes.transfer import Fabric, SimWrite


def stop_turns(instance: Instance | None) -> bool:
    """Its step loop takes no turn any more."""
    if instance is None or instance.requests is None:
        return False
    vars(instance.requests.loop)["_turn"] = lambda: None
    return True


def wedged(instance: Instance | None) -> StepLoop | None:
    """Its step loop, if that takes no turns."""
    requests = instance.requests if instance is not None else None
    return requests.loop if requests is not None and "_turn" in vars(requests.loop) else None


def freeze(fabric: Fabric, life: str) -> None:
    """The thread that copies for this life begins nothing any more."""
    held: list[SimWrite] = vars(fabric).setdefault("held", [])

    def begin(write: SimWrite) -> None:
        if write.writer.name == life:
            fabric.writes[write] = None
            held.append(write)
        else:
            Fabric.begin(fabric, write)

    vars(fabric)["begin"] = begin


def thaw(fabric: Fabric) -> None:
    vars(fabric).pop("begin", None)
    for write in vars(fabric).pop("held", ()):
        if not write.ended:
            fabric.begin(write)


def heal(fabric: Fabric, instances: Iterable[Instance | None]) -> None:
    """All go on."""
    fabric.heal()
    thaw(fabric)
    for instance in instances:
        if instance is not None and (loop := wedged(instance)) is not None:
            del vars(loop)["_turn"]
            instance.actor.mailbox.put("it takes turns again", loop._turn)
