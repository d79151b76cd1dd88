"""Bugs of adapters that come and go, put back."""

from __future__ import annotations

from collections.abc import Mapping

from epd.engine.adapter_list import Changing
from epd.fsm import adapter
from epd.groups.engines import GroupLanguageEngine
from epd.roles.gateway.adapters import Adapters
from epd.roles.steps.held_adapters import HeldAdapters
from tests.sim.mutants.planting import Planted, mutant, patched, row

S, Do = adapter.S, adapter.Do


@mutant
def offered_before_all_hold_it() -> Planted:
    """The first instance that holds an adapter makes a model of it."""

    def hasty(self: Adapters) -> None:
        applied = [i for i in self._holders() if i.load.adapter_list == self._list]
        for machine in self._adapters.values() if applied else ():
            self.post(machine, adapter.ListApplied(len(applied)))

    return patched(Adapters, "_look", hasty)


@mutant
def a_leader_alone_holds_adapters() -> Planted:
    """The other ranks of its group compute as without."""

    def alone(self: GroupLanguageEngine, wanted: Mapping[str, str]) -> Changing:
        return self._own.hold_adapters(wanted)

    return patched(GroupLanguageEngine, "hold_adapters", alone)


@mutant
def who_joins_late_has_no_list() -> Planted:
    """The list goes to those who are there when it changes, and to nobody later."""
    return row(adapter.TABLE, S.SERVING, adapter.InstanceBehind, None)


@mutant
def a_new_gateway_has_the_start_alone() -> Planted:
    """Adapters that were loaded at run time end with the gateway that was asked."""
    return patched(Adapters, "_joined")


@mutant
def an_unload_does_not_wait() -> Planted:
    """Requests that name an adapter end with it at once."""
    do, keep = (Do.WITHDRAW, Do.SEND_LIST, Do.ARM_REMOVING), adapter.keep_asker
    return row(adapter.TABLE, S.SERVING, adapter.UnloadAsked, S.REMOVING, do, keep)


@mutant
def an_adapter_goes_under_its_requests() -> Planted:
    """An instance drops what open requests still compute with."""
    return patched(HeldAdapters, "_end")


@mutant
def a_failed_load_is_not_taken_back() -> Planted:
    """An adapter that one instance cannot hold stays in the memory of the others."""
    do, keep = (Do.ANSWER, Do.FREE_NAME), adapter.keep_reason
    return row(adapter.TABLE, S.LOADING, adapter.LoadRefused, S.GONE, do, keep)


@mutant
def a_list_that_raised_counts_as_taken() -> Planted:
    """A change of adapters that failed is not made when its list comes again."""
    return patched(HeldAdapters, "_take_again")
