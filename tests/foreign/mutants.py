"""The project's table mutants, for foreign checkers: tables with some cells replaced."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from epd.fsm import link
from epd.fsm.kernel import Event, Ignore, Row, State, Table
from epd.fsm.tables import TABLES
from epd_lab.formal import models
from epd_lab.formal.explore import Mode, explore
from epd_lab.formal.expressions import Body
from epd_lab.formal.form import Model, Part
from epd_lab.formal.request import STEP_ENDS
from epd_lab.formal.wander import replay, wander
from epd_lab.formal.world import Violation, World
from tests.fsm.bugs import BUGS
from tests.fsm.mutants import Planted, patched
from tests.sim.mutants import MUTANTS as IN_THE_SIMULATOR

# What the mutants' own actions do to the models' variables.
ACTIONS: Mapping[str, Body] = {
    "forget": ("computed = 0", "output = 0"),
    "claim": ("me.written = me.written + me.part", "me.part = 0"),
    "never_again": ("in_batch = False",),
    "append_later_token": ("said = True",),
    "mark": ("computed = 0",),
    "remember": (),
    "keep_passed": (),
    "begin_again": ("computed = 0",),
    "short": (*STEP_ENDS, "computed = computed + 1"),
}


# Which model shows a mutant, where it is not the first of its machine.
SHOWN_IN = {
    "decode is lost while preempted, and the table does not know": "REQUEST_KV_LEAVES",
    "an abort of a preempted request leaves its offer standing": "REQUEST_KV_LEAVES",
    "leaving_mid_prompt_keeps_blocks": "REQUEST_IMAGES",
    "mid_prompt_is_forgotten": "REQUEST_IMAGES",
    "rows_of_the_preempted_are_given_up": "REQUEST_IMAGES",
    "answer_without_image": "REQUEST_IMAGES",
    "a_lease_has_no_end": "REQUEST_HELD",
    "F6: a last token frees the blocks that the step ahead writes into": "REQUEST_AHEAD",
    "last_token_frees_blocks": "REQUEST_AHEAD",
    "a_load_is_waited_for": "ENCODING_STORED",
    "F11: a grant of other rows is written to": "PAIR_CONTRACT_DRIFT",
    "F28: a commit before the last part has landed": "PAIR_KV_IN_PARTS",
    "commit_before_the_last_layer": "PAIR_KV_IN_PARTS",
    "no_commit_retry": "PAIR_MESSAGES_LOST",
    "no_grant_retry": "PAIR_MESSAGES_LOST",
    "who_leaves_does_not_wait_for_its_write": "PAIR_KV_IN_PARTS",
}
# These break no law of a moment, but a promise.
BREAKS_A_PROMISE = (
    "a_silent_gateway_is_waited_for",
    "a_late_answer_is_taken_back",
    "a_load_is_waited_for",
    "F48: no echo over the new link, and nobody gives up",
    "another_room_is_waited_for",
)
# And these are beyond the models, which count and own, and carry no content.
UNSEEN = {
    "preempted_says_it_again": "the tokens themselves are no part of the model",
    "mid_prompt_is_forgotten": "what EXTEND tells the batch is the batch's own",
    "bad_image_fails_batch": "the kind of a failure is no part of the model",
    "a_preempted_grammar_starts_anew": "what may be said next is no part of the model",
    "a_token_is_computed_again": "how many tokens a chunk has is no part of the model",
    "what_is_passed_goes_back_twice": "blocks one by one are no part of the model",
    "a_grant_waits_for_its_retry": "a timer says it: it is late and breaks nothing",
    "both_loads_are_first": "whose rows they are is no part of the model",
    "no_commit_retry": "a deadline ends it: the own search's mode `timers last` sees it",
    "no_grant_retry": "a deadline ends it: the own search's mode `timers last` sees it",
    "the_living_defend_no_name": "the other life is no part of the model",
    "who_joins_trusts_the_link": "links are no part of the model",
    "who_joins_late_has_no_list": "instances are no part of the model, but all together",
}
# Of all, those that the own searches and walks do not notice.
UNNOTICED = {
    "F48: no echo over the new link, and nobody gives up": "a promise: SPIN sees it",
    "another_room_is_waited_for": "a promise: SPIN sees it, and drill `no-room-is-told`",
    "a_silent_gateway_is_waited_for": "a promise: SPIN sees it, and drill `restart-gateway`",
    "a_load_is_waited_for": "a promise: SPIN sees it, and drill `slow-disk`",
    "a_move_forgets_what_was_said": "what tokens are is no part: drill `drain-at-its-bound`",
    "numbers_of_two_registries_are_compared": "the other registry is no part of the machine: drill"
    " `a-successor-is-heard-but-not-its-welcome`",
    **{
        name: why
        for name, why in UNSEEN.items()
        if name not in ("no_commit_retry", "no_grant_retry")
    },
}
NUM_WALKS = 50
_OPEN = (link.S.ASKED, link.S.MUTE, link.S.UNREACHABLE)
OF_LINK = {
    "F48: nobody is told that the pair carries words again": Row(
        (link.S.MUTE, link.S.UNREACHABLE), link.EchoReceived, link.S.CARRIES
    ),
    "F48: a probe that was lost is not sent again": Row(
        _OPEN, link.RetryDue, None, (link.Do.SEND_PROBE,)
    ),
    "F48: no echo over the new link, and nobody gives up": Row(
        link.S.MUTE, link.EchoMissed, link.S.MUTE, (link.Do.SEND_PROBE, link.Do.ARM_TIMEOUT)
    ),
}


def with_cells(table: Table, rows: Iterator[Row]) -> Table:
    """The table with the cells of `rows` replaced; the kernel's laws are not asked."""
    rows_ = tuple(rows)
    cells = {(s, event) for row in rows_ for s in row.sources for event in row.events}

    def kept(row: Row) -> Iterator[Row]:
        for event in row.events:
            sources = tuple(s for s in row.sources if (s, event) not in cells)
            if sources:
                yield replace(row, source=sources, event=event)

    other = copy.copy(table)
    other.rows = (*(part for row in table.rows for part in kept(row)), *rows_)
    other.ignores = tuple(
        Ignore((state,), (event,), ignore.reason)
        for ignore in table.ignores
        for state in ignore.sources
        for event in ignore.events
        if (state, event) not in cells
    )
    other.dispatch = {state: dict(events) for state, events in table.dispatch.items()}
    for state, event in cells:
        other.dispatch[state][event] = tuple(
            (row.when, row.do, row.all_effects(state, event), row.target)
            for row in rows_
            if state in row.sources and event in row.events
        )
    return other


def _differences(before: dict[State, dict[type[Event], object]], table: Table) -> Iterator[Row]:
    for state, cells in table.dispatch.items():
        for event, edges in cells.items():
            if before[state].get(event) is not edges:
                for guard, action, effects, target in edges:
                    yield Planted(state, event, target, effects, action, guard)


def table_mutants() -> dict[str, Table]:
    """By its words, or by its name in the simulator."""
    found: dict[str, Table] = {}
    for name, (table, remove, rows) in BUGS.items():
        found[name] = patched(table, remove, rows)
    for name, row in OF_LINK.items():
        found[name] = with_cells(link.TABLE, iter((row,)))
    for name, mutant in IN_THE_SIMULATOR.items():
        before = {t.name: {s: dict(cells) for s, cells in t.dispatch.items()} for t in TABLES}
        with mutant():
            for table in TABLES:
                rows = list(_differences(before[table.name], table))
                if rows:
                    found[name] = with_cells(table, iter(rows))
    return found


def shown_by(name: str, table: Table) -> Model:
    """The model that shows a mutant."""
    every = models({table.name: table})
    mine = [model for model in every if any(part.table is table for part in model.parts)]
    shown = SHOWN_IN.get(name, mine[0].name)
    model = next(model for model in mine if model.name == shown)
    return replace(model, parts=tuple(map(_with_actions, model.parts)))


def _with_actions(part: Part) -> Part:
    return replace(part, actions={**part.actions, **ACTIONS})


def noticed(model: Model) -> str:
    """How the own search notices a bug in the tables of a model; empty: it does not.  What the data
    of the bug say is not asked: it is no part of the machine."""
    world = World(model, compares=False)
    try:
        space = explore(world)
        space.require_good_ends()
        replay(space)
        if model.succeeds:
            explore(world, Mode.TIMERS_LAST).require_good_ends()
        dice = random.Random(0)
        for _ in range(NUM_WALKS):
            wander(world, dice.randrange)
    except Violation as violation:
        return str(violation)
    return ""
