"""GENERATION as data: a request at the gateway, its attempts and its one answer.

An attempt is played by the messages that may come from it; those of attempts that were given up are
dropped by their number before a machine gets them.  All failures are of one kind, because attempts
are counted by kind.
"""

from __future__ import annotations

from collections.abc import Iterator

from epd.fsm import generation as g
from epd.fsm.kernel import Event, Table
from epd_lab.formal.form import Happening, Law, Model, Part, Promise, Variable

ENDED = "(FINISHED, CANCELLED, FAILED, REJECTED)"
UNPLACED = "(PREPARING, QUEUED, AWAITING_TOPOLOGY, MIGRATING)"
TIMERS: dict[str, type[Event]] = {
    "patience": g.TokenTimedOut,
    "watch": g.AttemptTimedOut,
    "pause": g.PlacementDue,
    "topology": g.PlacementTimedOut,
    "abort_timer": g.AbortTimedOut,
}
KIND = {"failure": "'lost'"}  # of every failure but those for good
SILENT = frozenset(
    "keep_prompt "
    "note_accepted note_refusal note_lacking note_no_topology note_cut note_late note_deadline "
    "note_abandoned note_moved note_poison note_late_found ARM_DEADLINE".split()
)


def _part(table: Table) -> Part:
    return Part(
        table,
        guards={
            "may_retry": "failures + 1 < MAX_ATTEMPTS", "has_said": "said",
            "is_last": "unconfirmed < 2",
        },
        actions={
            **dict.fromkeys(
                ("begin_attempt", "begin_move"), ("attempts = attempts + 1", "unconfirmed = 2")
            ),
            "note_confirmed": ("unconfirmed = unconfirmed - 1",), "append_tokens": ("said = True",),
            "note_failure": ("failures = failures + 1",),
        },
        effects={
            "DISPATCH": (
                "require not at_work -- one attempt at a time",
                "require attempts <= MAX_ATTEMPTS + recalls -- attempts are bounded",
                "at_work = True",
            ),
            "PLACE": ("pause = True",), "AWAIT_TOPOLOGY": ("pause = True",),
            "CHOOSE": ("placing = True",), "QUEUE": ("queued = True",),
            "LEAVE_QUEUE": ("queued = False",), "ARM_TOPOLOGY": ("topology = True",),
            "HAND_OVER": ("require at_work -- what moves is at work",),
            "MOVE_IMAGE": ("require at_work -- images move within an attempt",),
            "HEDGE_IMAGE": ("require at_work -- images are hedged within an attempt",),
            "DELIVER": (
                "require answers == 0 and not silent -- no tokens after the end",
                "require not hole -- a hole in the tokens is not passed on",
            ),
            "DELIVER_FINAL": (
                "require not hole -- a hole in the tokens is not passed on",
                "answers = answers + 1",
            ),
            "DELIVER_CUT": ("require said -- nothing is no answer", "answers = answers + 1"),
            "ANSWER_ERROR": ("answers = answers + 1",), "ABORT_ATTEMPT": ("at_work = False",),
            "LOG_FAILURE": ("logged = logged + 1",), "CLOSE": ("closed = closed + 1",),
            "ARM_PATIENCE": ("patience = True",), "ARM_ATTEMPT": ("watch = True",),
            "ARM_ABORT": ("abort_timer = True",),
        },
        silent=SILENT, at_end=("placing = False", "hole = False", "unconfirmed = 0"), timers=TIMERS,
    )  # fmt: skip


def _gateway() -> Iterator[Happening]:
    waits = f"state in {UNPLACED} and placing"
    admitted, prepared = ("admitted = True",), ("prepared = True",)
    yield Happening("is_admitted", "work", "state == RECEIVED", g.Admitted, 0, admitted)
    waits_for_it = "state == PREPARING and not prepared"
    yield Happening("is_prepared", "work", waits_for_it, g.Prepared, 0, prepared)
    has_turn, out = "state == QUEUED and queued", ("queued = False",)
    yield Happening("turn_comes", "work", has_turn, g.TurnCame, 0, out)
    yield Happening("is_too_late", "fault", has_turn, g.LateFound, 0, out)
    yield Happening("is_full", "fault", "state == RECEIVED", g.Refused)
    yield Happening("is_placed", "work", waits, g.Placed, 0, ("placing = False",))
    looked = ("placing = False",)
    yield Happening("nobody_is_there", "fault", waits, g.NoTopology, 0, looked)
    yield Happening("nobody_will_come", "fault", waits, g.TopologyUnknown, 0, looked)
    timers: tuple[tuple[str, str, type[Event], tuple[str, ...]], ...] = (
        ("pause_is_over", "pause", g.PlacementDue, ("pause = False",)),
        ("nobody_comes", "topology", g.PlacementTimedOut, ("topology = False",)),
        ("attempt_is_silent", "watch", g.AttemptTimedOut, ("watch = False",)),
        ("token_is_late", "patience", g.TokenTimedOut, ("patience = False",)),
        ("nobody_confirms", "abort_timer", g.AbortTimedOut, ("abort_timer = False",)),
        ("time_is_over", f"state not in {ENDED}", g.DeadlinePassed, ()),
    )
    for name, when, event, before in timers:
        kind = "retry" if event is g.PlacementDue else "time"
        yield Happening(name, kind, when, event, 0, before)


def _api() -> Iterator[Happening]:
    may_speak, before = f"admitted and not silent and state not in {ENDED}", ("silent = True",)
    yield Happening("client_leaves", "fault", may_speak, g.CancelRequested, 0, before)
    yield Happening("api_refuses", "fault", may_speak, g.Refused, 0, before)
    yield Happening("api_fails", "fault", may_speak, g.Abandoned, 0, before)
    has_read = f"{may_speak} and said"
    yield Happening("client_has_enough", "fault", has_read, g.StopRequested, 0, before)


def _attempt() -> Iterator[Happening]:
    sent, open_ = "attempts > 0", "state in (PLACED, STREAMING)"
    prompt = ("is_accepted", "tokens_arrive", "last_tokens_arrive")
    words: tuple[tuple[str, type[Event], str, tuple[str, ...]], ...] = (
        ("is_accepted", g.Accepted, sent, ("watch = False",)),
        (
            "tokens_arrive", g.TokensArrived, f"{sent} and at_work and not hole",
            ("watch = False", "patience = False"),
        ),
        (
            "last_tokens_arrive", g.FinalTokensArrived, f"{sent} and at_work and not hole",
            ("at_work = False",),
        ),
        ("last_tokens_arrive_late", g.FinalTokensArrived, f"{sent} and not at_work", ()),
        ("tokens_are_missed", g.TokensMissed, f"{sent} and at_work", ("hole = True",)),
        ("attempt_fails", g.AttemptFailed, sent, ()),
        ("attempt_is_refused", g.AttemptRefused, sent, ()),
        ("poison_is_found", g.PoisonFound, sent, ()),
        ("abort_is_confirmed", g.AbortConfirmed, f"{sent} and not at_work", ()),
    )  # fmt: skip
    for name, event, when, before in words:
        kind = "work" if name in prompt else "fault"
        yield Happening(name, kind, when, event, 0, before, event_fields=KIND)
    recalled, before = f"{sent} and recalls < 1", ("recalls = recalls + 1",)
    yield Happening("its_instance_drains", "fault", recalled, g.AttemptRecalled, 0, before)
    streams = f"{recalled} and at_work and state == STREAMING"
    yield Happening("it_moves_with_its_kv", "fault", streams, g.AttemptMoved, 0, before)
    yield Happening("an_image_moves", "fault", f"{sent} and at_work and {open_}", g.ImageMoved)
    yield Happening("an_image_is_late", "fault", f"{sent} and at_work and {open_}", g.ImageHedged)
    yield Happening(
        "attempt_fails_for_good", "fault", f"{sent} and at_work", g.AttemptFailed,
        guards={"may_retry": "False"}, event_fields={"failure": "'contract'"},
    )  # fmt: skip


def _laws() -> tuple[Law, ...]:
    ended = f"state in {ENDED}"
    turned_away = "(state == REJECTED and not admitted)"
    return (
        Law("AtMostOneAnswer", 1, "one answer (F39, F40)", "answers <= 1"),
        Law(
            "OneAnswer", 1,
            "who ends has answered once, unless nobody reads or it was refused at once",
            f"not ({ended}) or (answers == 0) == (silent or {turned_away})",
        ),
        Law(
            "ThePlaceIsGivenBackOnce", 4, "the place is given back once",
            f"closed <= 1 and (closed == 1) == ({ended} and admitted)",
        ),
        Law(
            "OurFaultsAreLogged", 1, "each failure of ours leaves a line, and nothing else does",
            "logged <= 1 and (logged == 1) == (state == FAILED)",
        ),
        Law(
            "TheNextTokenIsBounded", 1,
            "who waits for a token has a clock for it, that began with the last one (F15)",
            f"state not in {UNPLACED} and state not in (PLACED, STREAMING) or patience",
        ),
        Law(
            "TheWaitForATopologyIsBounded", 7,
            "who waits for a topology has a clock for it, and nobody else has (F15)",
            "(state == AWAITING_TOPOLOGY) == topology",
        ),
        Law(
            "SilenceIsBounded", 7, "an attempt has a clock that began with its last message",
            "state not in (PLACED, STREAMING) or watch",
        ),
        Law("NobodyQueuesInVain", 4, "who has left has no turn", "state == QUEUED or not queued"),
        Law(
            "NobodyWorksForNobody", 4, "what has ended has called its attempt off (F43)",
            f"not ({ended}) or not at_work",
        ),
    )  # fmt: skip


def generation_model(table: Table = g.TABLE, max_attempts: int = 2) -> Model:
    """The model; `table` is GENERATION's, or one with a bug put back."""
    return Model(
        name="GENERATION", nodes=(243, 7), about="a request at the gateway, over its attempts",
        parts=(_part(table),),
        variables=(
            Variable("admitted", (False, True), "it holds a place"),
            Variable("prepared", (False, True), "its prompt is ready"),
            Variable("unconfirmed", (0, 1, 2), "instances that have not called it off"),
            Variable("attempts", tuple(range(max_attempts + 3)), "sent so far"),
            Variable("recalls", (0, 1), "of attempts, from instances that drain"),
            Variable("failures", tuple(range(max_attempts + 2))),
            Variable("said", (False, True), "the client has tokens"),
            Variable("hole", (False, True), "a chunk came that leaves a hole before it"),
            Variable("at_work", (False, True), "the attempt was not called off"),
            Variable("queued", (False, True), "it has a place in the queue of its key"),
            Variable("placing", (False, True), "somebody will choose instances"),
            Variable("silent", (False, True), "the client left, or the API has answered"),
            Variable("answers", (0, 1, 2)),
            Variable("closed", (0, 1, 2), "times that the place was given back"),
            Variable("logged", (0, 1, 2)),
            *(Variable(timer, (False, True), "armed") for timer in TIMERS),
        ),
        happenings=(*_gateway(), *_api(), *_attempt()), laws=_laws(),
        promises=(
            Promise(
                "TimeEndsIt", 1, "one terminal answer before its deadline", "once",
                f"state in {ENDED}",
            ),
        ),
        succeeds="state == FINISHED and not silent", constants={"MAX_ATTEMPTS": max_attempts},
    )  # fmt: skip
