"""GROUP as data: a leader and two other ranks, with up to two commands under way."""

from __future__ import annotations

from epd.fsm import group as g
from epd.fsm.kernel import Table
from epd_lab.formal.form import Happening, Law, Model, Part, Promise, Variable

TAKES = "(READY, STEPPING)"
OVER = "(CLOSED, LOST)"
MOST = 2  # commands under way
_COUNT = tuple(range(MOST + 1))
_OTHERS = {1: 2, 2: 1}


def _laws() -> tuple[Law, ...]:
    return (
        Law(
            "NeverHalfAGroup",
            6,
            "who takes commands has all ranks",
            f"state not in {TAKES} or (in_1 and in_2)",
        ),
        Law(
            "NobodyRunsAhead",
            6,
            "no rank has executed what was not given",
            "by_0 <= given and by_1 <= given and by_2 <= given",
        ),
        Law(
            "NoRankIsLeft",
            4,
            "a group that is over has no ranks",
            f"state not in {OVER} or not (lives_1 or lives_2)",
        ),
        Law("TheLossIsTold", 1, "the leader ends with its group", "state != LOST or told"),
        Law(
            "AClockRuns",
            7,
            "who waits for ranks does not wait for ever",
            "(state != FORMING or joining) and (state != STEPPING or answering)"
            " and (state != READY or probing) and (state != CLOSING or ending)"
            f" and (state not in {TAKES} or beating)",
        ),
    )


def _part(table: Table) -> Part:
    silent = ("SEND", "SEND_PROBE", "SETTLE", "TELL_READY", "END_RANKS")
    reasons = ("keep_ended", "keep_absent", "keep_silent", "keep_unheard", "keep_disagreement")
    return Part(
        table, guards={"is_last": "given == 1"},
        actions={
            "give": ("given = given + 1",),
            "pass_command": (
                "given = given - 1", *(f"by_{rank} = by_{rank} - 1" for rank in range(3)),
            ),
            "end_round": ("beat_1 = False", "beat_2 = False"),
        },
        effects={
            "RESOLVE": ("fresh = True",), "TELL_LOST": ("told = True",),
            "KILL_RANKS": ("lives_1 = False", "lives_2 = False"),
            "ARM_ANSWER": ("answering = True",), "ARM_PROBE": ("probing = True",),
            "ARM_BEATS": ("beating = True",), "ARM_END": ("ending = True",),
        },
        silent=frozenset((*silent, *reasons)),
        timers={
            "joining": g.JoinMissed, "answering": g.AnswerMissed, "probing": g.ProbeDue,
            "beating": g.BeatsMissed, "ending": g.EndMissed,
        },
    )  # fmt: skip


def _of_rank(rank: int, other: int) -> tuple[Happening, ...]:
    """What a rank other than the leader does."""
    lives = f"lives_{rank}"
    return (
        Happening(
            f"rank_{rank}_joins", "fault", f"{lives} and state == FORMING and not in_{rank}",
            g.RankJoined, guards={"is_last_to_join": f"in_{other}"},
            event_fields={"rank": str(rank)}, actions={"add_rank": (f"in_{rank} = True",)},
        ),
        Happening(
            f"rank_{rank}_beats", "fault", f"{lives} and state in {TAKES}", g.RankBeat,
            guards={"is_last_to_beat": f"beat_{other}"}, event_fields={"rank": str(rank)},
            actions={"add_beat": (f"beat_{rank} = True",)},
        ),
        Happening(
            f"rank_{rank}_ends", "fault", lives, g.RankEnded, before=(f"lives_{rank} = False",),
            guards={"is_last_to_end": f"not in_{other}"}, event_fields={"rank": str(rank)},
            actions={"drop_rank": (f"in_{rank} = False",)},
        ),
    )  # fmt: skip


def _executes(rank: int) -> Happening:
    lives = f"lives_{rank} and " if rank else ""
    return Happening(
        f"rank_{rank}_executes", "fault", f"{lives}state in {TAKES} and by_{rank} < given",
        g.CommandExecuted, before=("fresh = False",), guards={"agrees": "True"},
        event_fields={"rank": str(rank), "number": f"by_{rank} + 1", "failed": "False"},
        actions={"keep_answer": (f"by_{rank} = by_{rank} + 1",)},
    )  # fmt: skip


def _variables() -> tuple[Variable, ...]:
    return (
        *(Variable(f"in_{rank}", (False, True), "it has joined") for rank in _OTHERS),
        *(Variable(f"beat_{rank}", (False, True), "since both have") for rank in _OTHERS),
        *(Variable(f"lives_{rank}", (True, False), "its process") for rank in _OTHERS),
        Variable("given", _COUNT, "commands under way"),
        *(Variable(f"by_{rank}", _COUNT, "of these, executed by it") for rank in range(3)),
        Variable("joining", (True, False), "armed"),
        Variable("answering", (False, True), "armed"),
        Variable("probing", (False, True), "armed"),
        Variable("beating", (False, True), "armed"),
        Variable("ending", (False, True), "armed"),
        Variable("fresh", (False, True), "a command was over just now"),
        Variable("told", (False, True), "the process of the leader ends"),
    )


def _happenings() -> tuple[Happening, ...]:
    takes = f"state in {TAKES}"
    done = f"{takes} and by_0 > 0 and by_1 > 0 and by_2 > 0"
    return (
        *(one for rank, other in _OTHERS.items() for one in _of_rank(rank, other)),
        Happening(
            "command_is_given", "fault", f"{takes} and given < {MOST}", g.CommandGiven,
            before=("fresh = False",),
        ),
        *(_executes(rank) for rank in range(3)),
        Happening(
            "rank_1_disagrees", "fault", f"{takes} and lives_1", g.CommandExecuted,
            guards={"agrees": "False"},
            event_fields={"rank": "1", "number": "given + 2", "failed": "False"},
        ),
        Happening("command_is_done", "work", done, g.CommandDone),
        Happening("is_asked_to_end", "fault", event=g.CloseRequested),
        Happening("join_is_missed", "time", "joining", g.JoinMissed, before=("joining = False",)),
        Happening(
            "answer_is_missed", "time", "answering", g.AnswerMissed, before=("answering = False",),
        ),
        Happening("probe_is_due", "time", "probing", g.ProbeDue, before=("probing = False",)),
        Happening(
            "beats_are_missed", "time", "beating", g.BeatsMissed, before=("beating = False",),
            guards={"is_late": "False"}, event_fields={"is_late": "False"},
        ),
        Happening(
            "beats_are_missed_late", "time", "beating", g.BeatsMissed,
            before=("beating = False",), guards={"is_late": "True"},
            event_fields={"is_late": "True"},
        ),
        Happening("end_is_missed", "time", "ending", g.EndMissed, before=("ending = False",)),
    )  # fmt: skip


def group_model(table: Table = g.TABLE) -> Model:
    """The model; `table` is GROUP's, or one with a bug put back."""
    return Model(
        name="GROUP", nodes=(1224,), about="an instance of three ranks, as their leader sees them",
        parts=(_part(table),), variables=_variables(), happenings=_happenings(), laws=_laws(),
        promises=(
            Promise(
                "ASilentRankEndsTheGroup", 7, "it is over, or every rank answers again and again",
                "again", f"state in {OVER} or fresh",
            ),
        ),
    )  # fmt: skip
