"""Placement by predicted completion: no herd, nothing more loaded before what is less, each picture
where it is done first, and the gateway's books, which all of it is read from."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, replace
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.messages import Address, InstanceInfo, KvLayout, Load, RowContract, StageCosts
from epd.scheduling.backlog import NOTHING_WAITS, Attempt, Backlog, Books
from epd.scheduling.placement import NOWHERE, Candidate, Image, Needs, Placement, place
from epd.scheduling.predicted_rule import USUAL, PredictedRule, outlook, predicted_loads
from epd.scheduling.residency import Said

GPU = StageCosts(
    patch_s=3e-6, token_s=14e-6, step_s=3.6e-3, sequence_s=5e-5, nbyte_s=3e-12, quantum_s=0.01
)
UNMEASURED = StageCosts()
PICTURE = 8160  # patches: 1920x1080
LAYOUT = KvLayout(
    num_layers=36,
    block_size=16,
    num_kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
    block_nbytes=16 * 147456,
)
CONTRACT = RowContract(
    hidden=2560, row_width=10240, num_deepstack=3, dtype="bfloat16", row_nbytes=20480
)
ROLES = {"e": "encode", "p": "prefill", "d": "decode"}


def instance(name: str, backlog: Backlog = NOTHING_WAITS, costs: StageCosts = GPU) -> Candidate:
    """`ep0` encodes and prefills."""
    info = InstanceInfo(
        address=Address(name, 1, f"ipc://{name}"),
        roles=tuple(ROLES[letter] for letter in name if letter in ROLES),
        host_id="host",
        pid=1,
        kv_layout=LAYOUT,
        row_contract=CONTRACT,
    )
    return Candidate(info, Load(free_kv_blocks=100, costs=costs), 0, backlog)


def pictures(count: int, num_patches: int = PICTURE) -> Needs:
    images = [Image(f"hash{n}", num_patches, num_patches // 4) for n in range(count)]
    return Needs(images, num_tokens=count * num_patches // 4 + 64, max_tokens=64)


def chosen(pool: list[Candidate], asked: Needs) -> tuple[list[str], str, str]:
    found = place(pool, asked, PredictedRule)
    assert isinstance(found, Placement)
    return (
        [encoder.instance_id for encoder in found.encoders],
        found.prefill.instance_id,
        found.decode.instance_id,
    )


# --- 1ep1ed and its kin ---------------------------------------------------------------------------


def test_one_picture_stays_with_its_prompt() -> None:
    assert chosen([instance("ep0"), instance("ed0")], pictures(1)) == (["ep0"], "ep0", "ed0")


def test_pictures_of_one_prompt_spread() -> None:
    encoders, *_ = chosen([instance("ep0"), instance("ed0")], pictures(4))
    assert Counter(encoders) == {"ep0": 2, "ed0": 2}
    encoders, *_ = chosen([*map(instance, ("e0", "e1", "e2", "pd0"))], pictures(9))
    assert Counter(encoders) == {"e0": 3, "e1": 3, "e2": 3}


def test_decode_takes_pictures_when_many_wait_at_prefill_and_few_decode() -> None:
    waits = Backlog(num_patches=9 * PICTURE, num_tokens=20000, num_ready=2000, num_prompts=9)
    few = Backlog(num_sequences=2, num_decoding=2)
    many = Backlog(num_sequences=20, num_decoding=20)
    assert chosen([instance("ep0", waits), instance("ed0", few)], pictures(1))[0] == ["ed0"]
    assert chosen([instance("ep0", waits), instance("ed0", many)], pictures(1))[0] == ["ep0"]
    for num_served, expected in ((20, "ep0"), (40, "ed0"), (10_000, "ed0")):
        lasts = replace(waits, num_served=num_served)
        assert chosen([instance("ep0", lasts), instance("ed0", many)], pictures(1))[0] == [expected]
    crowd = Backlog(num_sequences=60, num_decoding=60)
    assert chosen([instance("ep0", lasts), instance("ed0", crowd)], pictures(1))[0] == ["ep0"]


def test_replicas_keep_their_pictures_unless_one_is_much_less_busy() -> None:
    """What differs by chance is made up for by the next prompt; what leaves one comes back."""

    def replica(name: str, num_prompts: int) -> Candidate:
        tokens, streams = 2100 * num_prompts, 2 * num_prompts
        return instance(
            name,
            Backlog(
                num_patches=PICTURE * num_prompts, num_tokens=tokens, num_prompts=num_prompts,
                num_sequences=streams, num_decoding=streams,
            ),
        )  # fmt: skip

    def goes_to(*pool: Candidate) -> str:
        asked = pictures(1)
        rule = PredictedRule(asked, pool)
        return rule.encoder(asked.images[0], pool, pool[0]).instance_id

    assert goes_to(replica("epd0", 8), replica("epd1", 7)) == "epd0"
    assert goes_to(replica("epd0", 8), replica("epd1", 6)) == "epd0"
    assert goes_to(replica("epd0", 8), replica("epd1", 2)) == "epd1"
    assert goes_to(replica("epd0", 8), replica("ed1", 6)) == "ed1", "who has no prompts of its own"


def test_an_answer_goes_where_it_has_fewer_turns_with_others() -> None:
    """Between two of its tokens a device works for a quantum at what waits there."""
    few, more_streams = (Backlog(num_sequences=n, num_decoding=n) for n in (4, 8))
    here = replace(few, num_patches=12 * PICTURE, num_tokens=25_000, num_prompts=12)
    for backlog, costs, expected in (
        (here, GPU, "d0"),
        (few, GPU, "epd0"),
        (replace(few, num_patches=PICTURE // 8), GPU, "epd0"),  # 3 ms, once
        (here, msgspec.structs.replace(GPU, quantum_s=0.0), "d0"),  # it waits for all of it
    ):
        pool = [instance("epd0", backlog, costs), instance("d0", more_streams, costs)]
        asked = replace(pictures(0), num_tokens=1000)
        assert chosen(pool, asked)[2] == expected
    pool = [instance("ep0"), instance("ed0", here), instance("ed1", more_streams)]
    assert chosen(pool, asked)[2] == "ed0", "images that are there because few decode"
    pool = [instance("epd0", here), instance("epd1", here)]
    _, prefill, decode = chosen(pool, replace(pictures(0), num_tokens=1000))
    assert prefill == decode, "where all have as much to do nothing moves"


def test_a_hop_through_slow_memory_keeps_pictures_and_answers_where_they_are() -> None:
    slow = msgspec.structs.replace(GPU, nbyte_s=1e-8)
    pool = [instance("ep0", costs=slow), instance("ed0", costs=slow)]
    assert chosen(pool, pictures(2))[0] == ["ep0", "ep0"]
    busy = Backlog(num_sequences=40, num_decoding=40)
    pool = [instance("epd0", busy, slow), instance("d0", costs=slow)]
    assert chosen(pool, pictures(1))[2] == "epd0"
    pool = [instance("epd0", busy), instance("d0")]
    assert chosen(pool, pictures(1))[2] == "d0", "over a fast one it goes"


def test_a_prompt_goes_where_the_rows_of_its_images_are() -> None:
    asked = replace(pictures(1), known=Said(NOWHERE, {"hash0": "ep1"}))
    assert chosen([*map(instance, ("ep0", "ep1", "d0"))], asked)[1] == "ep1"
    assert chosen([*map(instance, ("ep0", "ep1", "d0"))], pictures(1))[1] == "ep0"


# --- costs that are not known ---------------------------------------------------------------------


def test_what_is_not_measured_costs_as_elsewhere() -> None:
    """Someone new is neither free nor dear, nor is who was slow long ago."""
    waits = Backlog(num_tokens=1000, num_ready=1000)
    slow = msgspec.structs.replace(GPU, token_s=1.0, unsure=("token_s",))
    for costs in (UNMEASURED, slow):
        pool = [instance("p0", waits), instance("p1", costs=costs), instance("d0")]
        assert chosen(pool, pictures(0))[1] == "p1"
        pool = [instance("p0"), instance("p1", waits, costs), instance("d0")]
        assert chosen(pool, pictures(0))[1] == "p0"
    pool = [instance("p0", waits), instance("p1", costs=msgspec.structs.replace(slow, unsure=()))]
    assert chosen([*pool, instance("d0")], pictures(0))[1] == "p0"


def test_before_anything_is_measured_ratios_are_usual() -> None:
    """A CPU that has only measured its tower: its prompts are as much slower than usual."""
    cpu = StageCosts(patch_s=100 * USUAL.patch_s)
    waits = Backlog(num_tokens=PICTURE // 4, num_ready=PICTURE // 4, num_prompts=1)
    for costs in (UNMEASURED, cpu):
        pool = [instance("e0", costs=costs), instance("ep0", waits, costs), instance("d0")]
        assert chosen(pool, pictures(1))[0] == ["e0"]


@pytest.mark.parametrize("lacks", ["token_s", "step_s", "patch_s"])
def test_an_outlook_counts_as_measured_by_what_its_wait_is_made_of(lacks: str) -> None:
    """One step of one token, before any of decodes, once had a request refused for 24 s to come."""
    costs = msgspec.structs.replace(GPU, **{lacks: 0.0})
    for num_decoding, with_images in ((0, False), (4, False), (0, True)):
        pool = [instance("epd0", Backlog(num_decoding=num_decoding), costs)]
        needed = {"token_s": True, "step_s": bool(num_decoding), "patch_s": with_images}
        assert outlook(pool, with_images=with_images).is_measured != needed[lacks]


# --- laws -----------------------------------------------------------------------------------------

BACKLOGS = st.builds(
    lambda patches, tokens, ready, decoding, coming, prompts, served: Backlog(
        num_patches=patches,
        num_tokens=tokens + ready,
        num_ready=ready,
        num_sequences=decoding + coming,
        num_decoding=decoding,
        num_prompts=prompts,
        num_served=2 * served,
    ),
    *(st.integers(0, 40) for _ in range(7)),
)
COSTS = st.sampled_from([GPU, UNMEASURED, msgspec.structs.replace(GPU, quantum_s=0.0)])


def more(backlog: Backlog, name: str) -> Backlog:
    """The same and some of one kind."""
    grown = {
        "num_patches": {"num_patches": 5000},
        "num_tokens": {"num_tokens": 5000, "num_ready": 5000, "num_prompts": 1, "num_served": 9},
        "num_sequences": {"num_sequences": 9, "num_decoding": 9},
    }[name]
    return replace(backlog, **{n: getattr(backlog, n) + count for n, count in grown.items()})


@given(BACKLOGS, COSTS, st.sampled_from(["num_patches", "num_tokens", "num_sequences"]))
def test_of_two_alike_the_more_loaded_one_is_never_preferred(
    backlog: Backlog, costs: StageCosts, kind: str
) -> None:
    for loaded in (0, 1):
        pair = [more(backlog, kind) if n == loaded else backlog for n in range(2)]
        free = 1 - loaded
        replicas = [instance(f"epd{n}", pair[n], costs) for n in range(2)]
        assert chosen(replicas, pictures(1))[1] == f"epd{free}"
        if kind == "num_sequences":
            decodes = [instance(f"d{n}", pair[n], costs) for n in range(2)]
            assert chosen([instance("p0"), *decodes], pictures(0))[2] == f"d{free}"
        if kind == "num_patches":
            encoders = [instance(f"e{n}", pair[n], costs) for n in range(2)]
            assert chosen([*encoders, instance("pd0")], pictures(1))[0] == [f"e{free}"]


@given(BACKLOGS, COSTS, st.integers(1, 6), st.randoms())
def test_the_choice_does_not_depend_on_the_order_of_the_registry(
    backlog: Backlog, costs: StageCosts, count: int, random: Random
) -> None:
    names = ("epd0", "epd1", "ep0", "ed0", "e0", "d0")
    pool = [instance(name, backlog, costs) for name in names]
    shuffled = list(pool)
    random.shuffle(shuffled)
    assert chosen(shuffled, pictures(count)) == chosen(pool, pictures(count))


@given(st.integers(1, 3), st.integers(12, 60), st.sampled_from([1, 2, 4]))
def test_a_stale_view_makes_no_herd(num_images: int, num_requests: int, speed: int) -> None:
    """No heartbeat comes and nothing ends: work spreads in proportion to what each can do."""
    fast = StageCosts(
        patch_s=GPU.patch_s / speed,
        token_s=GPU.token_s / speed,
        step_s=GPU.step_s / speed,
        sequence_s=GPU.sequence_s / speed,
        nbyte_s=GPU.nbyte_s,
    )
    slow = msgspec.structs.replace(GPU, quantum_s=0.0)
    books, work_s = Books(), Counter[str]()
    costs = {"p0": fast, "p1": slow, "e0": fast, "e1": slow}
    asked = pictures(num_images)
    for n in range(num_requests):
        pool = [instance(name, books.at(name), costs.get(name, slow)) for name in (*costs, "d0")]
        named = replace(
            asked, images=[replace(i, mm_hash=f"{n} {i.mm_hash}") for i in asked.images]
        )
        encoders, prefill, decode = chosen(pool, named)
        images = {(e, i.mm_hash): PICTURE for e, i in zip(encoders, named.images, strict=True)}
        books.sent(f"request {n}", Attempt(prefill, decode, asked.num_tokens, images))
        work_s[prefill] += asked.num_tokens * costs[prefill].token_s
        for encoder in encoders:
            work_s[encoder] += PICTURE * costs[encoder].patch_s
    one_s = {"p": asked.num_tokens * GPU.token_s, "e": PICTURE * GPU.patch_s}
    for role, unit_s in one_s.items():
        both = [work_s[f"{role}{n}"] for n in range(2)]
        assert abs(both[0] - both[1]) <= 0.1 * sum(both) + 3 * unit_s * num_images, role


@given(st.integers(1, 200))
def test_a_stale_view_makes_no_herd_of_answers(num_requests: int) -> None:
    books = Books()
    for n in range(num_requests):
        pool = [instance("p0", books.at("p0")), *(instance(d, books.at(d)) for d in ("d0", "d1"))]
        _, prefill, decode = chosen(pool, pictures(0))
        books.sent(str(n), Attempt(prefill, decode, 64, {}))
    assert abs(books.at("d0").num_sequences - books.at("d1").num_sequences) <= 1


# --- the books ------------------------------------------------------------------------------------


def test_an_attempt_goes_through_the_books() -> None:
    books = Books()
    books.sent("a", Attempt("p0", "d0", 200, {("e0", "x"): 100, ("p0", "y"): 50}))
    assert books.at("e0") == Backlog(num_patches=100)
    assert books.at("p0") == Backlog(num_patches=50, num_tokens=200, num_prompts=1)
    assert books.at("d0") == Backlog(num_sequences=1)
    books.encoded("p0", "y")
    books.encoded("e0", "x")
    books.encoded("e0", "x")
    assert books.at("p0") == Backlog(num_tokens=200, num_ready=200, num_prompts=1)
    books.prefilled("a")
    books.prefilled("a")
    assert books.at("p0") == Backlog()
    assert books.at("d0") == Backlog(num_sequences=1, num_decoding=1)
    books.ended("a")
    books.ended("a")
    assert books.at("d0") == Backlog() and not len(books)


def test_prompts_are_counted_since_none_waited() -> None:
    books = Books()
    for key in "abc":
        books.sent(key, Attempt("p0", "d0", 10, {}))
    served = []
    for key in "ab":
        books.prefilled(key)
        served.append(books.at("p0").num_served)
    books.ended("c")
    assert served == [1, 2]
    assert books.at("p0") == Backlog()


def test_an_image_counts_once() -> None:
    books = Books()
    for key in ("a", "b"):
        books.sent(key, Attempt("p0", "d0", 10, {("e0", "x"): 100}))
    assert books.at("e0").num_patches == 100
    books.ended("a")
    assert books.at("e0").num_patches == 0, "who joined it is not known to need it"
    books.ended("b")
    assert books.at("p0") == books.at("d0") == Backlog()


EVENTS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from("sepx"), st.integers(0, 3)))


@given(EVENTS)
def test_nothing_is_left_in_the_books_and_nothing_is_negative(
    events: list[tuple[int, str, int]],
) -> None:
    books, names = Books(), ("e0", "ep0", "d0", "")
    for number, kind, image in events:
        key = str(number)
        if kind == "s":
            prefill = "" if number == 5 else "ep0"
            images = {(names[n % 2], f"h{n}"): 10 + n for n in range(image)}
            decode = "d0" if prefill else ""
            attempt = Attempt(prefill, decode, 7 * number, images, tuple(images), (prefill, decode))
            books.sent(key, attempt)
        elif kind == "e":
            books.encoded(names[image % 2], f"h{image}")
        elif kind == "p":
            books.prefilled(key)
        else:
            books.ended(key)
        for name in names:
            found = books.at(name)
            assert min(astuple(found)) >= 0
            assert found.num_ready <= found.num_tokens
            assert found.num_decoding <= found.num_sequences
    for number in range(6):
        books.ended(str(number))
    assert all(books.at(name) == Backlog() for name in names) and not len(books)
    assert not books.num_assigned and not any(books.in_flight(f"h{n}") for n in range(4))


# --- what is told of it ---------------------------------------------------------------------------


def test_the_load_of_a_stage_is_what_waits_for_it() -> None:
    """Each stage of each instance, by what it has measured, or what others have."""
    busy = Backlog(num_patches=1000, num_tokens=2000, num_sequences=3, num_decoding=2)
    pool = [instance("ep0", busy), instance("d0", busy, UNMEASURED)]
    loads = {(one.instance, one.stage): one.load_s for one in predicted_loads(pool)}
    step_s = GPU.step_s + 2 * GPU.sequence_s
    expected = {("ep0", "encode"): 3e-3, ("ep0", "prefill"): 28e-3, ("d0", "decode"): step_s}
    assert loads == pytest.approx(expected)
    assert all(one.load_s == 0.0 for one in predicted_loads([instance("epd0")]))


# --- who decodes ----------------------------------------------------------------------------------


def test_prompts_that_wait_take_a_quantum_of_each_step_from_an_answer_and_no_more() -> None:
    """14 seconds of prompts cost 64 tokens 0.64 of them; 300 more in each step cost 0.96."""
    busy = instance("epd0", Backlog(num_tokens=1_000_000, num_prompts=1))
    for num_sequences, name in ((300, "epd0"), (100, "d0")):
        crowded = instance("d0", Backlog(num_sequences=num_sequences))
        *_, decode = chosen([instance("p0"), busy, crowded], pictures(0))
        assert decode == name


@pytest.mark.parametrize(("more", "name"), [(3, "d1"), (9, "d0")])
def test_an_answer_stays_with_who_has_the_prompt_unless_another_is_better_by_a_tenth(
    more: int, name: str
) -> None:
    """Each sequence more makes a step 1.4% longer; to move these bytes takes next to nothing."""
    pool = [instance("p0"), instance("d0"), instance("d1", Backlog(num_sequences=more))]
    asked = replace(pictures(0), num_tokens=16, held={"d1": 1.0})
    assert chosen(pool, asked)[2] == name
    assert chosen(pool, replace(asked, held={}))[2] == "d0"
