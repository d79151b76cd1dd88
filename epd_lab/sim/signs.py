"""What happened in a run that no transition shows, counted for drills."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epd.engine.base import StepSequence
from epd.fsm.incoming import SlotsLeased
from epd.fsm.kernel import Event, Machine, State
from epd.fsm.outgoing import GrantReceived
from epd.fsm.request import (
    DeadlinePassed,
    LastTokenSampled,
    Preempted,
    RemoteKvArrived,
    S,
    Scheduled,
    Slid,
    TokenSampled,
)
from epd.keys import is_kv
from epd.layouts import PASSED
from epd.scheduling.kv_order import moved
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.world import World

EVENTS = (
    Scheduled,
    GrantReceived,
    TokenSampled,
    LastTokenSampled,
    DeadlinePassed,
    RemoteKvArrived,
    Preempted,
    SlotsLeased,
    Slid,
)


def is_longer_for_a_picture(max_chunk_tokens: int, sequence: StepSequence) -> bool:
    """A chunk that has more tokens than others may have, since they are one picture's."""
    count = len(sequence.token_ids)
    return count > max_chunk_tokens and any(span.count == count for span in sequence.spans)


def count(
    world: World,
    has_state: bool,
    nodes: Mapping[str, Any],
    process: SimProcess,
    machine: Machine,
    event: Event,
    source: State,
    target: State,
) -> None:
    """`has_state`: of the model; `nodes`: by process."""
    fired = world.fired
    if isinstance(event, Scheduled) and event.num_cached:
        fired["prefix_hit"] += 1
    if isinstance(event, Scheduled):
        fired["found_with_its_window"] += PASSED in event.blocks
        fired["state_found"] += bool(event.states_found)
        fired["state_kept"] += bool(event.states_kept)
    fired["slides"] += isinstance(event, Slid)
    if isinstance(event, GrantReceived) and event.grant.num_held:
        fired["kv_held"] += 1
    if isinstance(event, GrantReceived) and (layout := event.grant.layout) is not None:
        places = moved(layout.rows, event.grant.num_rows)
        fired["kv_of_a_window"] += len(places) < layout.rows.count(event.grant.num_rows)
        held = event.grant.held
        fired["kv_held_apart"] += held != tuple(places[: len(held)])
    if isinstance(event, SlotsLeased) and is_kv(machine.key):
        *_, entered, left = machine.story  # AWAITING_LANDING
        fired["kv_waited_to_land"] += entered.at_s < left.at_s
    if isinstance(event, TokenSampled | LastTokenSampled):
        fired["draft_accepted"] += len(event.accepted)
    if isinstance(event, DeadlinePassed) and target in (S.FINISHED, S.FINISHING):
        fired["cut_at_its_deadline"] += 1
    if isinstance(event, TokenSampled | LastTokenSampled):
        fired["draft_rejected"] += _rejects(nodes[process.name], machine)
    if has_state and isinstance(event, RemoteKvArrived):
        fired["state_moved"] += 1
    if has_state and isinstance(event, Preempted) and source != target:
        fired["state_given_up"] += 1


def _rejects(node: Any, machine: Machine) -> bool:
    """Whether drafts of this request were wrong."""
    return bool(node.instance.requests.record(machine).num_rejected)
