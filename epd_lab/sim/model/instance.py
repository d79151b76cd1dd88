"""Two lives of one instance as the gateway's registry sees them: an INSTANCE per epoch.

The first life may stall, drain, leave or be killed at any moment, and what it said may arrive long
after its successor has joined.  The registry keeps one machine per name, as the role does.

Laws: what was lost or has left never takes work again (F44); each life that was a member is told of
once when it is over, and not before; the successor is never harmed by messages of its predecessor.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from epd.fsm import instance as i
from epd.fsm.kernel import Event
from epd.messages import Address, InstanceInfo, Load
from epd_lab.sim.model.laws import Step, require
from epd_lab.sim.model.world import World

EPOCHS = (1, 2)


IDLE = Load()


def _info(epoch: int) -> InstanceInfo:
    """What a join says of its process."""
    return InstanceInfo(address=Address("e0", epoch, ""), roles=(), host_id="", pid=0)


class InstanceWorld(World):
    """The registry's machines, and what each life has said and heard."""

    def __init__(self, *, replaced: bool = False) -> None:
        self.machines: dict[int, i.Instance] = {}
        self.known = 0  # the epoch that the name stands for
        self.running = 2 if replaced else 1  # the life that is a process now; 0: none
        self.words: set[tuple[int, str]] = {(1, "joins")} if replaced else set()
        self.welcomed: set[int] = set()
        self.refused: set[int] = set()
        self.members: set[int] = set()  # lives that took work once
        self.over: set[int] = set()  # lives whose end was told to the generations

    # --- INSTANCE, as its role performs it --------------------------------------------------------

    def fire(self, epoch: int, event: Event) -> None:
        machine = self.machines[epoch]
        self.perform(machine, machine.fire(event), event)
        if machine.takes_work:
            self.members.add(epoch)

    def welcome(self, machine: i.Instance, event: Event) -> None:
        self.welcomed.add(machine.info.address.epoch)

    def fail_attempts(self, machine: i.Instance, event: Event) -> None:
        epoch = machine.info.address.epoch
        require(machine.terminal, "its attempts are failed while it is a member")
        require(epoch not in self.over, "its attempts are failed twice")
        self.over.add(epoch)

    # --- everything that may happen next ----------------------------------------------------------

    def steps(self) -> Iterator[Step[InstanceWorld]]:
        if self.running:
            yield from self._process(self.running)
        for epoch, word in sorted(self.words):
            yield self.act(
                f"epoch {epoch} {word}", "message", partial(_hear, epoch=epoch, word=word)
            )
        known = self.machines.get(self.known)
        if known is not None and not known.terminal:
            for event in (i.HeartbeatMissed(), i.HeartbeatsEnded()):
                if self.changes(known, event):
                    yield self._event(self.known, event)

    def _process(self, epoch: int) -> Iterator[Step[InstanceWorld]]:
        words = ["joins"] if epoch not in self.welcomed else ["joins", "beats"]
        for word in words:
            if (epoch, word) not in self.words:
                yield self.act(
                    f"epoch {epoch} says that it {word}", "work", partial(_say, word=(epoch, word))
                )
        for word in ("drains", "leaves"):
            if (epoch, word) not in self.words:
                say = partial(_say, word=(epoch, word))
                yield self.act(f"epoch {epoch} says that it {word}", "fault", say)
        if epoch + 1 in EPOCHS:
            yield self.act(f"kill -9 of epoch {epoch}", "fault", partial(_replace, epoch=epoch))
        elif epoch in self.refused:
            yield self.act(f"epoch {epoch} ends", "fault", partial(_replace, epoch=epoch))

    def _event(self, epoch: int, event: Event) -> Step[InstanceWorld]:
        name = f"{type(event).__name__} of epoch {epoch}"
        return self.act(name, "time", lambda w: w.fire(epoch, event))

    # --- laws and ends ----------------------------------------------------------------------------

    def check(self) -> None:
        for epoch, machine in self.machines.items():
            takes = machine.takes_work
            require(not takes or epoch == self.known, f"epoch {epoch} takes work and is replaced")
            require(not takes or epoch not in self.over, f"epoch {epoch} is over and takes work")
            told = epoch in self.over or epoch not in self.members
            require(not machine.terminal or told, f"epoch {epoch} is over and nobody was told")

    def quiescent(self) -> bool:
        known = self.machines.get(self.known)
        return known is not None and (known.terminal or known.takes_work)

    def succeeded(self) -> bool:
        known = self.machines.get(self.known)
        return known is not None and known.takes_work and self.known == self.running


def _say(world: InstanceWorld, word: tuple[int, str]) -> None:
    world.words.add(word)


def _replace(world: InstanceWorld, epoch: int) -> None:
    world.running = epoch + 1 if epoch + 1 in EPOCHS else 0


def _hear(world: InstanceWorld, epoch: int, word: str) -> None:
    """As the registry reads it: nothing of a life that the name does not stand for."""
    if word == "joins":
        _join(world, epoch)
    elif epoch == world.known:
        heard = {"beats": i.HeartbeatReceived(IDLE, 0, 0.0), "drains": i.DrainAnnounced()}
        if word != "beats" or world.machines[epoch].present:
            world.fire(epoch, heard.get(word, i.LeftReceived()))


def _join(world: InstanceWorld, epoch: int) -> None:
    if world.known > epoch:
        return
    known = world.machines.get(world.known)
    if known is not None and world.known < epoch:
        world.fire(world.known, i.EpochReplaced())
    if known is not None and world.known == epoch:
        if known.terminal:
            world.refused.add(epoch)
        else:
            world.fire(epoch, i.JoinAccepted(0.0))
        return
    world.known = epoch
    world.machines[epoch] = i.Instance(_info(epoch), IDLE, 0.0)
    world.fire(epoch, i.JoinAccepted(0.0))
