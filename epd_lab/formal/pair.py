"""OUTGOING and INCOMING over a network that loses, repeats and reorders, as data.

The network keeps every message that was ever sent: it may arrive at any later moment, any number of
times, or never.  The writer runs on its own: it may end late, and an outcome that the engine calls
unknown leaves a *zombie*, a write that may still touch source and slots.  Peers are declared lost
at any moment, rightly or not; only a process that is dead can be fenced.  Bytes are counted in
halves of a room.

Liveness speaks of what comes after the faults: the constant FAULTS_STOP lets `calm` come true
some day.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from epd.fsm import incoming as i
from epd.fsm import outgoing as o
from epd.fsm import room as r
from epd.fsm.kernel import Event, Table
from epd_lab.formal.form import Happening, Law, Model, Part, Promise, Variable

ENDED = "(DELIVERED, CANCELLED, EXPIRED, FAILED)"
MAY_WRITE = "(AWAITING_SLOTS, STREAMING, WRITING, CANCEL_PENDING, EXPIRE_PENDING, QUARANTINED)"
HALVES = (0, 1, 2)
TO_PRODUCER: dict[str, type[Event]] = {
    "Grant": o.GrantReceived,
    "CancelTransfer": o.CancelReceived,
    "CommitAck": o.CommitAcked,
}
TO_CONSUMER: dict[str, type[Event]] = {
    "Commit": i.CommitReceived,
    "ShortCommit": i.CommitReceived,
    "CancelAck": i.CancelAcked,
    "TransferAborted": i.AbortReceived,
    "TransferInDoubt": i.DoubtReceived,
}
SIDES = ("producer", "consumer")
DRAINED = " and ".join(f"(not {side}_alive or {side}_state in {ENDED})" for side in SIDES)
DELIVERED = f"{DRAINED} and producer_memory == 'released' and consumer_memory == 'published'"


@dataclass(frozen=True, slots=True)
class PairSetting:
    """The parameters of both ends before the first event; the names are constants of the model."""

    contract_holds: bool = True
    offers: bool = False
    commit_is_short: bool = False
    engine_is_certain: bool = True
    may_die: bool = True
    may_be_declared_lost: bool = True
    forgetful: bool = False
    in_parts: bool = False
    faults_stop: bool = False


_CALM = {"may_die": False, "may_be_declared_lost": False}
PAIRS = {  # with `nodes`
    "PAIR": (PairSetting(engine_is_certain=False), (8990, 12)),
    "PAIR_MESSAGES_LOST_IN_DOUBT": (
        PairSetting(engine_is_certain=False, forgetful=True, **_CALM),
        (11884, 48),
    ),
    "PAIR_KV": (PairSetting(offers=True, may_die=False), (2816, 14)),
    "PAIR_KV_IN_PARTS": (PairSetting(offers=True, may_die=False, in_parts=True), (4578, 23)),
    "PAIR_KV_IN_PARTS_IN_DOUBT": (
        PairSetting(offers=True, in_parts=True, engine_is_certain=False, **_CALM),
        (4313, 23),
    ),
    "PAIR_CONTRACT_DRIFT": (PairSetting(contract_holds=False), (3674,)),
    "PAIR_SHORT_COMMIT": (PairSetting(commit_is_short=True, may_die=False), (2386,)),
    "PAIR_MESSAGES_LOST": (PairSetting(forgetful=True, **_CALM), (10516, 48)),
    "PAIR_MESSAGES_LOST_KV": (PairSetting(forgetful=True, offers=True, **_CALM), (12822, 50)),
    "PAIR_DECLARED_LOST": (PairSetting(forgetful=True, may_die=False), (13412, 48)),
    "PAIR_HEALS": (
        PairSetting(engine_is_certain=False, forgetful=True, faults_stop=True),
        (91204,),
    ),
}

# What actions do to the counts of halves; the others keep what no guard reads.
ACTIONS = {
    "keep_last_part": ("me.ready = 2",),
    "write_source": ("me.ready = 2", "me.part = me.ready - me.written"),
    "write_granted": ("me.ready = 2", "me.part = me.ready - me.written"),
    "keep_part": ("me.ready = me.ready if me.ready > 1 else 1",),
    "write_part": ("me.ready = me.ready if me.ready > 1 else 1", "me.part = me.ready - me.written"),
    "keep_written": ("me.written = me.written + me.part", "me.part = 0"),
    "write_next": ("me.written = me.written + me.part", "me.part = me.ready - me.written"),
}
SILENT = frozenset(
    "keep_slots keep_late_slots keep_blocks keep_late_blocks keep_manifest "
    "keep_source keep_grant keep_commit keep_broken note_cancelled "
    "keep_failure keep_refusal note_short_commit note_bad_bytes note_called_off note_lost "
    "note_silent note_late SEND_OFFER AWAIT_LANDING WITHDRAW_LEASE REPORT_HANG".split()
)
EFFECTS = {
    "SEND_GRANT": ("net_Grant = True",),
    "SEND_COMMIT": (
        "require me.written == 2 -- what is committed was written",
        "net_Commit = net_Commit or not COMMIT_IS_SHORT",
        "net_ShortCommit = net_ShortCommit or COMMIT_IS_SHORT",
    ),
    "SEND_COMMIT_ACK": ("net_CommitAck = True",), "SEND_CANCEL": ("net_CancelTransfer = True",),
    "SEND_CANCEL_ACK": ("net_CancelAck = True",), "SEND_ABORT": ("net_TransferAborted = True",),
    "SEND_DOUBT": ("net_TransferInDoubt = True",), "HOLD_PART": ("me.memory = 'owned'",),
    "LEASE_SLOTS": (
        "require me.slots == 'none' -- slots to write from are leased once", "me.slots = 'awaited'",
    ),
    "START_WRITE": (
        "require write not in ('running', 'zombie') -- one write at a time",
        "require landed < 2 -- a room is written once", "require me.part > 0 -- a write has bytes",
        "require CONTRACT_HOLDS -- a write starts with its contract", "write = 'running'",
    ),
    "PUBLISH": ("me.publishing = True",), "SETTLE_WRITE": ("me.settling = True",),
    "START_FENCE": ("me.fencing = True",), "ARM_RETRY": ("me.retry = True",),
    "ARM_GRACE": ("me.grace = True",), "CONCLUDE_FAILED": ("me.concluded = me.concluded + 1",),
}  # fmt: skip
RELEASE = ("require me.memory == 'owned' -- owned memory is released", "me.memory = 'released'")
OWN = {
    "producer": {
        "RELEASE_SOURCE": RELEASE,
        "RELEASE_SLOTS": (
            "require write not in ('running', 'zombie') -- no write reads slots that are returned",
            "me.slots = 'none'",
        ),
        "CONCLUDE_DELIVERED": ("me.concluded = me.concluded + 1",),
    },
    "consumer": {
        "RELEASE_SLOTS": RELEASE,
        "CONCLUDE_DELIVERED": (
            "me.concluded = me.concluded + 1",
            "require me.memory == 'owned' -- memory is published that is owned",
            "require landed == 2 -- what is published has landed",
            "me.memory = 'published'",
        ),
    },
}
AT_END = (
    *("me.fencing = False", "me.settling = False"),
    *(f"me.{count} = 0" for count in ("ready", "part", "written")),
)


TIMERS = {"retry": r.RetryDue, "grace": r.GraceEnded, "deadline": r.DeadlinePassed}


def _part(side: str, table: Table) -> Part:
    return Part(
        table, f"{side}_state",
        guards={
            "contract_holds": "CONTRACT_HOLDS", "offers": "OFFERS", "length_matches": "True",
            "is_news": "1 > me.written", "more_is_ready": "me.ready > me.written + me.part",
        },
        actions=ACTIONS, effects=EFFECTS | OWN[side], silent=SILENT, at_end=AT_END,
        timers={f"me.{armed}": event for armed, event in TIMERS.items()},
        owners={"me": side, "other": SIDES[side == "producer"]},
    )  # fmt: skip


def _end(side: str, told: PairSetting) -> Iterator[Variable]:
    def made(name: str, *values: bool | int | str, note: str = "") -> Variable:
        return Variable(f"{side}_{name}", values, note)

    offers = told.offers and side == "producer"
    yield made("alive", True, False)
    yield made("retry", offers, not offers, note="armed")
    yield made("grace", False, True)
    yield made("deadline", True, False)
    yield made("fencing", False, True)
    yield made("concluded", 0, 1, 2, note="outcomes that its owner was told")
    yield made("memory", "none", "owned", "released", "published")
    if side == "consumer":
        yield made("blocks", not told.offers, told.offers, note="of KV: were leased")
    else:
        yield made("slots", "none", "awaited", "owned", note="to write from")
    yield made("started", False, True, note="bytes were ready, or slots were leased")
    yield made("cancelled", False, True, note="its owner has called it off")
    yield made("settling", False, True)
    yield made("publishing", False, True)
    for name in ("ready", "part", "written"):
        yield made(name, *HALVES)


def _words(alive: str, part: int, words: dict[str, type[Event]]) -> Iterator[Happening]:
    for word, event in words.items():
        sent, before = f"net_{word}", ("producer_granted = True",) if word == "Grant" else ()
        guards = {"length_matches": str(word == "Commit")}
        fields = {"nbytes": "63"} if word == "ShortCommit" else {}
        yield Happening(
            f"{word}_arrives", "work", f"{sent} and {alive}", event, part, before, guards, fields
        )
        lost = f"{sent} and FORGETFUL and not calm"
        yield Happening(f"{word}_is_lost", "loss", lost, before=(f"{sent} = False",))


def _writer() -> Iterator[Happening]:
    landed = ("landed = landed + producer_part",)
    ends: tuple[tuple[str, str, str, type[Event], tuple[str, ...]], ...] = (
        ("succeeds", "work", "True", o.WriteSucceeded, ("write = 'over'", *landed)),
        ("is_refused", "fault", "not calm", o.WriteRefused, ("write = 'over'",)),
        (
            "is_in_doubt",
            "fault",
            "not calm and not ENGINE_IS_CERTAIN",
            o.WriteOutcomeUnknown,
            ("write = 'zombie'",),
        ),
    )
    for name, kind, when, event, before in ends:
        here = f"write == 'running' and {when}"
        yield Happening(f"write_{name}", kind, f"{here} and producer_alive", event, 0, before)
        yield Happening(
            f"write_{name}_for_nobody", kind, f"{here} and not producer_alive", before=before
        )
    asked = "producer_alive and producer_settling"
    settled = ("write = 'over'", "producer_settling = False")
    yield Happening("write_settles", "work", asked, o.WriteSettled, 0, settled)
    again = ("producer_settling = False", "producer_retry = True")
    yield Happening("engine_cannot_tell", "fault", f"{asked} and not calm", before=again)
    fence = ("producer_settling = False", "producer_fencing = True")
    yield Happening("peer_is_known_lost", "work", f"{asked} and not consumer_alive", before=fence)


def _timers(side: str, part: int) -> Iterator[Happening]:
    alive = f"{side}_alive"
    for timer, event in TIMERS.items():
        armed = f"{side}_{timer}"
        when, before = f"{alive} and {armed}", (f"{armed} = False",)
        kind = "retry" if timer == "retry" else "time"
        yield Happening(f"{side}_{event.__name__}", kind, when, event, part, before)


def _losses(side: str, part: int) -> Iterator[Happening]:
    other = SIDES[side == "producer"]
    alive, open_ = f"{side}_alive", f"{side}_state not in {ENDED}"
    yield Happening(
        f"{other}_is_lost", "time", f"{alive} and {open_} and not {other}_alive", r.PeerLost, part
    )
    wrongly = f"{alive} and {open_} and {other}_alive and MAY_BE_DECLARED_LOST and not calm"
    yield Happening(f"{other}_is_declared_lost_wrongly", "fault", wrongly, r.PeerLost, part)
    silent = f"{alive} and {other}_alive and not calm"
    yield Happening(f"{other}_seems_silent", "fault", silent, r.PeerSilent, part)
    can_die = f"{alive} and {other}_alive and MAY_DIE and not calm"
    yield Happening(f"{side}_is_killed", "fault", can_die, before=(f"{alive} = False",))
    fencing = f"{alive} and {side}_fencing"
    yield Happening(
        f"{side}_cannot_fence_the_living",
        "work",
        f"{fencing} and {other}_alive",
        before=(f"{side}_fencing = False", f"{side}_retry = True"),
    )
    quiet = "write == 'zombie'" if side == "producer" else "write != 'none'"
    yield Happening(
        f"{side}_fences",
        "work",
        f"{fencing} and not {other}_alive",
        o.PeerFenced if side == "producer" else i.PeerFenced,
        part,
        (f"write = 'over' if {quiet} else write", f"{side}_fencing = False"),
    )


def _owners() -> Iterator[Happening]:
    yield Happening("is_requested", "fault", "producer_alive and not OFFERS", o.Requested)
    idle = "not producer_started and not producer_cancelled"
    half = f"producer_alive and IN_PARTS and producer_granted and {idle}"
    yield Happening("half_is_ready", "work", half, o.PartReady, 0, event_fields={"nbytes": "32"})
    begun = ("producer_started = True", "producer_memory = 'owned'")
    yield Happening("bytes_are_ready", "work", f"producer_alive and {idle}", o.BytesReady, 0, begun)
    waits = "producer_alive and producer_slots == 'awaited'"
    got = ("producer_slots = 'owned'",)
    yield Happening("slots_to_write_from", "work", waits, o.SlotsLeased, 0, got)
    off = "producer_alive and not producer_cancelled and not calm"
    gone = ("producer_cancelled = True",)
    yield Happening("source_fails", "fault", off, o.SourceFailed, 0, gone)
    lacks = "consumer_alive and not consumer_blocks"
    blocks = ("consumer_blocks = True", "consumer_memory = 'owned'")
    yield Happening("blocks_are_leased", "work", lacks, i.BlocksLeased, 1, blocks)
    waits = "consumer_alive and consumer_blocks and not consumer_started"
    leased = ("consumer_started = True", "consumer_memory = 'owned'")
    yield Happening("slots_are_leased", "work", waits, i.SlotsLeased, 1, leased)
    off = "consumer_alive and not consumer_cancelled and not calm"
    gone = ("consumer_cancelled = True",)
    yield Happening("consumer_is_cancelled", "fault", off, i.CancelRequested, 1, gone)
    over, when = ("consumer_publishing = False",), "consumer_alive and consumer_publishing"
    yield Happening("published", "work", when, i.Published, 1, over)
    yield Happening("publish_fails", "fault", f"{when} and not calm", i.PublishFailed, 1, over)


def _laws() -> Iterator[Law]:
    writable = "write in ('running', 'zombie')"
    given = "consumer_memory in ('released', 'published')"
    yield Law(
        "SlotsAreNotWritten",
        3,
        "no write may touch slots that are released or published (F6, F7, F8)",
        f"not ({given} and {writable})",
    )
    yield Law(
        "NobodyMayWriteIntoThem",
        3,
        "while both live the producer cannot begin to write into slots that are given away",
        f"not ({given} and producer_alive and consumer_alive and producer_state in {MAY_WRITE})",
    )
    yield Law(
        "TheSourceIsNotRead",
        3,
        "no write may read a source that is released (F8)",
        f"not (producer_memory == 'released' and {writable})",
    )
    yield Law(
        "NoSlotsAreLeft",
        4,
        "who has ended waits for no slots to write from, and has none (F3)",
        f"producer_state not in {ENDED} or producer_slots == 'none'",
    )
    for side in SIDES:
        name, ended = side.capitalize(), f"{side}_state in {ENDED}"
        told = f"{side}_concluded == 1" + (" or producer_cancelled" * (side == "producer"))
        yield Law(f"{name}IsToldOnce", 4, "an owner hears one outcome", f"{side}_concluded <= 1")
        yield Law(
            f"{name}EndsEmpty",
            4,
            "who has ended owns nothing",
            f"not ({ended} and {side}_memory == 'owned')",
        )
        yield Law(
            f"{name}IsTold",
            4,
            "who has ended has told its owner, unless that ended it",
            f"not ({ended}) or {told}",
        )


def _promises(told: PairSetting) -> Iterator[Promise]:
    if told.faults_stop:
        words = "once nothing fails any more everything ends"
        yield Promise("Drains", 7, words, "once", DRAINED, ("time", "work"))
    elif not told.engine_is_certain:
        rests = {
            "producer": (
                "EXPIRE_PENDING",
                "the own engine still reads the source: its write decides",
            ),
            "consumer": ("PUBLISHING", "publishing is bounded local work; its outcome decides"),
        }
        for side, (state, why) in rests.items():
            yield Promise(
                f"TimeEndsThe{side.capitalize()}",
                7,
                "time moves every end towards its end, or to where time must not free memory",
                "again",
                f"not {side}_alive or {side}_state in {ENDED}",
                rests={
                    f"{side}_state == QUARANTINED": "only the writer or a fence frees it (F7, F8)",
                    f"{side}_state == {state}": why,
                },
            )


def pair_model(
    name: str, outgoing: Table = o.TABLE, incoming: Table = i.TABLE, told: PairSetting | None = None
) -> Model:
    """The model of a scenario; of the tables one may have a bug put back."""
    planned, nodes = PAIRS[name]
    told = told or planned
    words = (*TO_PRODUCER, *TO_CONSUMER)
    can_succeed = told.contract_holds and not told.commit_is_short and not told.faults_stop
    return Model(
        name=name, nodes=nodes,
        about="both ends of a room, over a network that loses, repeats and reorders",
        parts=(_part("producer", outgoing), _part("consumer", incoming)),
        variables=(
            *(variable for side in SIDES for variable in _end(side, told)),
            Variable("producer_granted", (False, True), "has read a grant"),
            Variable("write", ("none", "running", "over", "zombie")), Variable("landed", HALVES),
            *(Variable(f"net_{word}", (False, True), "said, and may arrive") for word in words),
            Variable("calm", (False, True), "nothing fails any more"),
        ),
        happenings=(
            *_words("producer_alive", 0, TO_PRODUCER), *_words("consumer_alive", 1, TO_CONSUMER),
            *_writer(),
            *(h for n, side in enumerate(SIDES) for h in (*_timers(side, n), *_losses(side, n))),
            *_owners(),
            Happening("faults_stop", "work", "FAULTS_STOP and not calm", before=("calm = True",)),
        ),
        laws=tuple(_laws()), promises=tuple(_promises(told)),
        succeeds=DELIVERED if can_succeed else "", rests=DRAINED,
        constants={field.upper(): getattr(told, field) for field in told.__slots__},
    )  # fmt: skip
