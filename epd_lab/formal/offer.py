"""OFFER as data: two images of one attempt, on their way to their encoders."""

from __future__ import annotations

from collections.abc import Iterator

from epd.fsm import offer as o
from epd.fsm.kernel import Table
from epd_lab.formal.form import Happening, Law, Model, Part, Promise, Variable

OVER = "(SERVED, CALLED_OFF)"


def _part(table: Table) -> Part:
    return Part(
        table,
        effects={
            "SEND_IMAGES": ("require lacks_a or lacks_b -- what all have is not sent again",),
            "ARM_RETRY": ("clock = True",),
            "SEND_ABORTS": ("told = True",),
            "ANSWER": (
                "require not has_a and not has_b -- the last rows are the answer",
                "answered = True",
            ),
        },
        silent=frozenset(("DOUBT", "SEND_ONE")),
        timers={"clock": o.RetryDue},
    )


def _happenings() -> Iterator[Happening]:
    yield Happening("goes_out", "work", "not begun", o.Offered, before=("begun = True",))
    yield Happening("is_due", "retry", "clock", o.RetryDue, before=("clock = False",))
    for room, other in (("a", "b"), ("b", "a")):
        mine, field = f"lacks_{room} = False", {"room": f"'{room}'"}
        last = {"is_last": f"not lacks_{other}"}
        yield Happening(
            f"{room}_is_taken", "fault", "begun and not FOR_ROWS", o.Taken, guards=last,
            event_fields=field, actions={"note_taken": (mine,)},
        )  # fmt: skip
        yield Happening(
            f"{room}_moves",
            "fault",
            "begun and not FOR_ROWS and state in (OFFERED, TAKEN)",
            o.RoomReplaced,
            event_fields={**field, "new_room": f"'{room}'"},
            actions={"replace_room": (f"lacks_{room} = True",)},
        )
        yield Happening(
            f"{room}_is_late",
            "fault",
            "begun and not FOR_ROWS and state in (OFFERED, TAKEN)",
            o.RivalAdded,
            event_fields={"new_room": f"'{room}'"},
            actions={"add_rival": (f"lacks_{room} = True",)},
        )
        yield Happening(
            f"{room}_is_kept", "fault", f"begun and FOR_ROWS and has_{room}", o.RowsKept,
            guards=last, event_fields=field, actions={"note_kept": (mine, f"has_{room} = False")},
        )  # fmt: skip
    yield Happening("is_answered", "fault", "begun", o.Answered)
    yield Happening("is_given_up", "work", "begun", o.GivenUp)  # by GENERATION's clocks


def offer_model(*, for_rows: bool, table: Table = o.TABLE, name: str = "OFFER") -> Model:
    """The model; `for_rows`: nothing but the rows is asked for."""
    wants = "for their rows alone" if for_rows else "for a prompt"
    return Model(
        name=name, nodes=(11,) if for_rows else (13,),
        about=f"two images of one attempt, on their way to encoders ({wants})",
        parts=(_part(table),),
        variables=(
            Variable("begun", (False, True), "it went out"),
            Variable("clock", (False, True), "armed: it is said again"),
            *(Variable(f"lacks_{room}", (True, False), "its encoder, it") for room in "ab"),
            *(Variable(f"has_{room}", (True, False), "may still be wanted") for room in "ab"),
            Variable("told", (False, True), "the encoders, that it is over"),
            Variable("answered", (False, True), "the generation"),
        ),
        happenings=tuple(_happenings()),
        laws=(
            Law(
                "NobodyElseWouldNotice", 7, "an image that was not taken is offered again",
                "state != OFFERED or not begun or (clock and (lacks_a or lacks_b))",
            ),
            Law(
                "TakenIsTaken", 4, "who is not asked any more has its image",
                "state != TAKEN or not (lacks_a or lacks_b)",
            ),
            Law(
                "EncodersAreTold", 4,
                "encoders hear of an attempt that was given up, and of no other",
                "told == (state == CALLED_OFF)",
            ),
        ),
        promises=(
            Promise(
                "ItIsOver", 7, "it is served or called off", "once", f"state in {OVER}",
                fair=("work",),
            ),
        ),
        constants={"FOR_ROWS": for_rows},
    )  # fmt: skip
