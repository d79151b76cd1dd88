"""REQUEST as data: one attempt, its blocks, its rows, its KV and its steps.

The prompt is a word and a token for each of two images, or two words.  The answer has two tokens,
or three where the loop launches a step before the tokens of the last have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from epd.fsm import request as r
from epd.fsm.kernel import Event, Table
from epd.fsm.request import TABLE
from epd_lab.formal.form import Happening, Law, Model, Part, Promise, Variable

ENDED = "(FINISHED, FAILED)"
PLANNED = "(WAITING, PREEMPTED, RUNNING, WAITING_MID_PROMPT, DECODING, WAITING_FOR_REMOTE_KV)"
OVER_FOR_CLIENT = "(FINISHED, FAILED, ABORTING, CALLED_OFF, FINISHING, HELD)"
# Tokens up to the first image that lacks; the first is token 1, the second token 2.
READY = (
    "(1 if lacks_a and computed < 2 else (2 if lacks_b and computed < 3 else 9))",
    "(2 if lacks_b and computed < 3 else 9)",  # of the first the rows have come
    "(1 if lacks_a and computed < 2 else 9)",
)


@dataclass(frozen=True, slots=True)
class RequestSetting:
    """Where it runs; the names are constants of the model."""

    images: bool = False
    decode_here: bool = True
    remote_kv: bool = False
    ahead: bool = False
    for_its_prompt: bool = False
    begins_early: bool = True
    inherits: bool = False


REQUESTS = {  # with `nodes`
    "REQUEST_TEXT": (RequestSetting(), (45, 9)),
    "REQUEST_AHEAD": (RequestSetting(ahead=True), (114, 16)),
    "REQUEST_IMAGES": (RequestSetting(images=True), (160, 46)),
    "REQUEST_LATE_IMAGES": (RequestSetting(images=True, begins_early=False, ahead=True), (203, 55)),
    "REQUEST_HELD": (RequestSetting(for_its_prompt=True), (22, 7)),
    "REQUEST_KV_LEAVES": (RequestSetting(decode_here=False), (29, 8)),
    "REQUEST_IMAGES_KV_LEAVES": (RequestSetting(decode_here=False, images=True), (162, 44)),
    "REQUEST_KV_COMES": (RequestSetting(remote_kv=True), (36, 5)),
    "REQUEST_KV_IS_INHERITED": (RequestSetting(decode_here=False, inherits=True), (11, 3)),
    "REQUEST_KV_COMES_AHEAD": (RequestSetting(remote_kv=True, ahead=True), (95, 9)),
}
SILENT = frozenset(
    "grow slide keep_failure keep_move note_late EXTEND PUSH_KV REPORT_HANG RETURN_PASSED "
    "REFUSE_MOVE REPORT_SPANS END_LEASE CANCEL_TRANSFER".split()
)
TIMERS: tuple[tuple[str, str, type[Event]], ...] = (
    ("time_is_over", "deadline", r.DeadlinePassed),
    ("grace_is_over", "grace", r.GraceEnded),
    ("lease_is_over", "lease", r.LeaseEnded),
)
STEP_ENDS = ("in_flight = in_flight - 1",)
TOKEN_COMES = (*STEP_ENDS, "computed = computed + 1", "output = output + 1")
NOT_AFTER_THE_END = "require not aborted and told != 'failed' -- no tokens after the end"
GOES = (
    "require in_flight == 0 -- blocks are not freed under a step",
    "require blocks == 'owned' -- blocks are freed that are owned",
    "blocks = 'none'",
)
OPENS = ("require transfer == 'none' -- one transfer of KV per attempt", "transfer = 'open'")


def _part(table: Table) -> Part:
    return Part(
        table,
        guards={
            "may_begin": f"BEGINS_EARLY or {READY[0]} > 1",
            "reaches_missing": f"computed + 1 >= {READY[0]}",
            "decode_here": "DECODE_HERE",
            "in_flight": "in_flight > 0",
            "in_another_step": "in_flight > 1",
        },
        actions={
            "keep_blocks": ("computed = 0",),
            "await_rows": ("lacks_a = True", "lacks_b = True"),
            "launch": ("in_flight = in_flight + 1",),
            **dict.fromkeys(("end_step", "fail_step"), STEP_ENDS),
            "count_chunk": (*STEP_ENDS, "computed = computed + 1"),
            **dict.fromkeys(("keep_first_token", "keep_token"), TOKEN_COMES),
            "keep_last_token": (*STEP_ENDS, "output = output + 1", "said_all = True"),
            **dict.fromkeys(("adopt_kv", "inherit"), ("computed = 2", "output = output + 1")),
            "end_here": ("said_all = True",),
        },
        effects={
            "ACQUIRE_EMBEDDINGS": ("rows = True",),
            "RELEASE_EMBEDDINGS": (
                "require in_flight == 0 or output > 0 -- rows are not given back under a step",
                "rows = False",
            ),
            "ENQUEUE": ("queued = True",),
            "START_DECODING": ("queued = True",),
            "DEQUEUE": ("queued = False",),
            **dict.fromkeys(("RELEASE_BLOCKS", "BEQUEATH"), GOES),
            "OFFER_KV": OPENS,
            "RESERVE_BLOCKS": OPENS,
            "WITHDRAW_OFFER": ("transfer = 'over' if transfer == 'open' else transfer",),
            "HAND_OVER_KV": (
                "require blocks == 'owned' and transfer == 'open' -- there is KV to hand over",
                "blocks = 'lent'",
            ),
            "MOVE_KV": (*OPENS, "blocks = 'lent'"),
            "EMIT_TOKENS": (NOT_AFTER_THE_END, "told = 'all' if said_all else told"),
            "ARM_LEASE": ("require blocks == 'owned' -- what is held is owned", "lease = True"),
            "SEND_FAILURE": ("require told == 'some' -- one end is told", "told = 'failed'"),
            "SEND_ABORTED": ("aborted = True",),
            "ARM_GRACE": ("grace = True",),
        },
        silent=SILENT,
        at_end=(
            "require not queued -- no place in the batch is left over",
            "require transfer != 'open' or blocks == 'lent' or REMOTE_KV -- no offer is left over",
            # what nobody reads any more
            "computed = 0",
            "output = 0",
            "lacks_a = False",
            "lacks_b = False",
        ),
        timers={armed: event for _, armed, event in TIMERS},
    )


def _arrival() -> Iterator[Happening]:
    begun, here = ("begun = True",), "not begun"
    yield Happening(
        "arrives_with_text", "work", f"{here} and not (IMAGES or REMOTE_KV or INHERITS)",
        r.TextOnly, 0, begun,
    )  # fmt: skip
    yield Happening(
        "arrives_with_images", "work", f"{here} and IMAGES", r.EmbeddingsRequired, 0, begun
    )
    yield Happening("kv_is_offered", "work", f"{here} and REMOTE_KV", r.KvOffered, 0, begun)
    inherits = (*begun, "blocks = 'owned'")
    yield Happening("kv_is_inherited", "work", f"{here} and INHERITS", r.KvInherited, 0, inherits)


def _rows() -> Iterator[Happening]:
    lack = "rows and (lacks_a or lacks_b)"
    promised = ("promised = True",)
    late = f"IMAGES and state in {ENDED}"
    when = f"({lack} or {late}) and not promised"
    yield Happening("rows_are_promised", "work", when, r.EmbeddingsPromised, 0, promised)
    for image, ready in (("a", READY[1]), ("b", READY[2])):
        yield Happening(
            f"{image}_is_ready", "work", f"rows and lacks_{image}", r.EmbeddingReady, 0, (),
            {"may_begin": f"BEGINS_EARLY or {ready} > 1", "goes_on": f"{ready} > computed"},
            {"room": f"'{image}'"}, {"keep_rows": (f"lacks_{image} = False",)},
        )  # fmt: skip
    yield Happening("an_image_is_bad", "fault", lack, r.EmbeddingFailed, 0, ("bad = True",))


def _steps(max_tokens: int) -> Iterator[Happening]:
    known = "(3 if IMAGES else 2) + output"
    stays = "DECODE_HERE and not FOR_ITS_PROMPT"
    sampled = f"in_flight > 0 and {stays} and computed + in_flight >= {known}"
    tokens = f"{known} + (1 if {sampled} and output + 1 < {max_tokens} else 0)"
    works = "state in (RUNNING, DECODING) and in_flight < (2 if AHEAD else 1)"
    can = f"computed + in_flight < {tokens} and computed + in_flight < {READY[0]}"
    yield Happening(
        "a_step_begins", "work", f"{works} and {can}", r.StepLaunched, 0,
        ("require blocks == 'owned' -- a step writes into blocks that are owned",),
    )  # fmt: skip
    yield Happening(
        "layers_are_computed", "fault", "state == RUNNING and in_flight > 0", r.LayersComputed
    )
    runs = "in_flight > 0"
    over, open_ = f"state in {OVER_FOR_CLIENT}", f"state not in {OVER_FOR_CLIENT}"
    last = f"{runs} and {open_} and computed + 1 >= (3 if IMAGES else 2) + output"
    more_to_say = f"output + 1 < {max_tokens}"
    outcomes: tuple[tuple[str, str, str, type[Event]], ...] = (
        ("step_returns", "work", f"{runs} and {over}", r.StepReturned),
        ("step_fails", "fault", f"{runs} and {open_}", r.StepFailed),
        (
            "chunk_is_computed", "work",
            f"{runs} and {open_} and computed + 1 < (3 if IMAGES else 2) + output", r.ChunkComputed,
        ),
        ("prompt_is_held", "work", f"{last} and FOR_ITS_PROMPT", r.PromptHeld),
        (
            "last_token_is_sampled", "work",
            f"{last} and not FOR_ITS_PROMPT and (AHEAD or not {more_to_say})", r.LastTokenSampled,
        ),
        (
            "first_token_is_sampled", "work",
            f"{last} and not FOR_ITS_PROMPT and {more_to_say} and state == RUNNING",
            r.FirstTokenSampled,
        ),
        (
            "token_is_sampled", "work",
            f"{last} and not FOR_ITS_PROMPT and {more_to_say} and state in (DECODING, MOVING)",
            r.TokenSampled,
        ),
    )  # fmt: skip
    for name, kind, when, event in outcomes:
        yield Happening(name, kind, when, event)


def _blocks() -> Iterator[Happening]:
    queued = "queued and state in (WAITING, PREEMPTED)"
    yield Happening("is_scheduled", "work", queued, r.Scheduled, 0, ("blocks = 'owned'",))
    gives = "state in (RUNNING, WAITING_MID_PROMPT) or state == DECODING and not IMAGES"
    yield Happening("an_older_one_needs_blocks", "fault", gives, r.Preempted)
    runs = "state in (RUNNING, WAITING_MID_PROMPT, DECODING)"
    yield Happening("gets_more_blocks", "fault", runs, r.Grown)
    yield Happening("blocks_are_behind_its_window", "fault", runs, r.Slid)
    open_, over = "transfer == 'open'", "transfer = 'over'"
    yield Happening("kv_fails", "fault", open_, r.KvFailed, 0, (over,))
    remote = f"{open_} and REMOTE_KV"
    yield Happening("kv_arrives", "work", remote, r.RemoteKvArrived, 0, (over, "blocks = 'owned'"))
    yield Happening("kv_is_withdrawn", "fault", remote, r.KvWithdrawn, 0, (over,))
    lent = f"{open_} and blocks == 'lent'"
    yield Happening("kv_is_delivered", "work", lent, r.KvDelivered, 0, (over, "blocks = 'none'"))


def _ends() -> Iterator[Happening]:
    yield Happening("client_leaves", "fault", "begun", r.AbortReceived)
    moves = f"begun and state not in {ENDED}"
    yield Happening("another_instance_is_to_go_on", "fault", moves, r.MoveRequested)
    yield Happening("cannot_be_planned", "fault", f"state in {PLANNED}", r.PlanFailed)
    for name, timer, event in TIMERS:
        yield Happening(name, "time", f"begun and {timer}", event, 0, (f"{timer} = False",))
    yield Happening("lease_is_revoked", "fault", "state == HELD", r.LeaseRevoked)


def _rests(told: RequestSetting) -> dict[str, str]:
    """Where a REQUEST may wait for ever by time alone."""
    rests = {"state == ABORTING": "a step uses the blocks; its end frees them (F6)"}
    if told.remote_kv:
        rests["state == CALLED_OFF"] = "the transfer uses the blocks; its end frees them (F6)"
    if told.decode_here and not told.for_its_prompt:
        rests["state == FINISHING"] = "the step launched ahead uses the blocks until it ends (F6)"
    return rests


def _laws() -> tuple[Law, ...]:
    return (
        Law(
            "NothingIsLeftOver",
            4,
            "who has ended owns no blocks and no rows, and no step uses them (F6, F43)",
            f"state not in {ENDED} or (blocks != 'owned' and not rows and in_flight == 0)",
        ),
        Law(
            "StepsHaveBlocks",
            3,
            "a step writes into blocks that are the request's own (F6)",
            "in_flight == 0 or blocks == 'owned'",
        ),
        Law(
            "StepsHaveRows",
            3,
            "a step before the first token reads rows that the request holds (F24)",
            "in_flight == 0 or output > 0 or rows or not IMAGES",
        ),
        Law(
            "ATimerIsArmed",
            7,
            "as long as it is not over, some timer of its is armed (F15)",
            f"not begun or state in {ENDED} or deadline or grace or lease",
        ),
        Law(
            "TheLineOwnsNothing",
            4,
            "who waits owns no blocks",
            "state not in (ARRIVED, WAITING, WAITING_FOR_EMBEDDINGS, PREEMPTED)"
            " or blocks == 'none'",
        ),
        Law(
            "NoAnswerWithoutItsImage",
            1,
            "a request whose image failed is not answered as if it had seen it (F40)",
            "not (bad and told == 'all')",
        ),
        Law(
            "TheGatewayIsTold",
            1,
            "who has ended has told the gateway how, or handed its KV over, or was not needed",
            "state != FAILED or told == 'failed'",
        ),
    )


def request_model(name: str, table: Table = TABLE) -> Model:
    """The model of an attempt; `table` is REQUEST's, or one with a bug put back."""
    told, nodes = REQUESTS[name]
    max_tokens = 3 if told.ahead else 2
    flags = (
        "begun", "promised", "queued", "rows", "lacks_a", "lacks_b", "said_all", "aborted", "bad",
    )  # fmt: skip
    return Model(
        name=name, nodes=nodes,
        about="one attempt of a request at an instance that runs the language model",
        parts=(_part(table),),
        variables=(
            *(Variable(flag, (False, True)) for flag in flags),
            Variable("grace", (False, True), "armed"), Variable("lease", (False, True), "armed"),
            Variable("deadline", (True, False), "armed"),
            Variable("blocks", ("none", "owned", "lent")),
            Variable("transfer", ("none", "open", "over"), "of its KV"),
            Variable("in_flight", (0, 1, 2), "steps under way that use the blocks"),
            Variable("computed", tuple(range(8)), "tokens"),
            Variable("output", tuple(range(5)), "tokens"),
            Variable("told", ("some", "all", "failed"), "to the gateway"),
        ),
        happenings=(*_arrival(), *_rows(), *_steps(max_tokens), *_blocks(), *_ends()), laws=_laws(),
        promises=(
            Promise(
                "TimeEndsIt", 1,
                "it ends, or is over for the client and waits for a step or a transfer", "again",
                f"not begun or state in {ENDED}", rests=_rests(told),
            ),
            Promise(
                "Drains", 7, "it ends once its steps return and its transfer", "once",
                f"state in {ENDED}", ("time", "work"),
            ),
        ),
        succeeds="state == HELD or state == FINISHED and (told == 'all' or not DECODE_HERE)",
        constants={field.upper(): getattr(told, field) for field in told.__slots__},
    )  # fmt: skip
