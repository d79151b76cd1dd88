"""FAN_OUT as data: a write of two parts."""

from __future__ import annotations

from epd.fsm import fan_out as f
from epd.fsm.kernel import Table
from epd_lab.formal.form import Happening, Law, Model, Part, Promise, Variable

OVER = "(WRITTEN, FAILED, UNKNOWN)"
_OTHER = {0: 1, 1: 0}


def _laws() -> tuple[Law, ...]:
    return (
        Law(
            "WrittenIsAllOfIt", 3, "what is said to be written has landed at every rank",
            "state != WRITTEN or (landed_0 and landed_1)",
        ),
        Law(
            "WhatHasFailedIsStill", 3, "when it is said to have failed, no part moves any more",
            "state != FAILED or not (moves_0 or moves_1)",
        ),
        Law(
            "NobodyIsToldEarly", 3, "its end is said when every part has begun and has an outcome",
            f"state not in {OVER} or not (awaited_0 or awaited_1)",
        ),
        Law("TheEndIsTold", 1, "who waits is told, once it is over", f"(state in {OVER}) == told"),
    )  # fmt: skip


def _of_part(part: int, other: int) -> tuple[Happening, ...]:
    awaited, still = f"awaited_{part}", f"moves_{part} = False"
    guards = {"is_last": f"not awaited_{other}"}
    ended = (f"awaited_{part} = False",)
    actions = {"keep_end": ended, "keep_sum": ended, "keep_reason": ended}
    fields = {"part": str(part)}
    return (
        Happening(
            f"part_{part}_lands", "work", awaited, f.PartWritten, 0,
            (still, f"landed_{part} = True"), guards, fields, actions,
        ),
        Happening(
            f"part_{part}_fails", "fault", awaited, f.PartFailed, 0, (still,), guards, fields,
            actions,
        ),
        Happening(
            f"part_{part}_is_in_doubt", "fault", awaited, f.PartUnknown, 0, (), guards, fields,
            actions,
        ),
        Happening(
            f"part_{part}_settles", "work", f"moves_{part} and not {awaited}", before=(still,)
        ),
    )  # fmt: skip


def fan_out_model(table: Table = f.TABLE) -> Model:
    """The model; `table` is FAN_OUT's, or one with a bug put back."""
    told = ("told = True",)
    part = Part(table, effects=dict.fromkeys(("TELL_WRITTEN", "TELL_FAILED", "TELL_UNKNOWN"), told))
    return Model(
        name="FAN_OUT", nodes=(21,), parts=(part,),
        about="a write of two parts, to two ranks or from two",
        variables=(
            *(Variable(f"awaited_{n}", (True, False), "it has no outcome yet") for n in _OTHER),
            *(Variable(f"moves_{n}", (True, False), "bytes of it may move") for n in _OTHER),
            *(Variable(f"landed_{n}", (False, True), "all of it is there") for n in _OTHER),
            Variable("told", (False, True), "who waits for it has heard"),
        ),
        happenings=tuple(one for n, other in _OTHER.items() for one in _of_part(n, other)),
        laws=_laws(),
        promises=(
            Promise(
                "ItEnds", 7, "when every part has an outcome it is over", "once",
                f"state in {OVER}", fair=("work",),
            ),
        ),
    )  # fmt: skip
