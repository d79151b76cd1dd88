"""Placement: who may serve, and who does by the fixed rule: equal images meet in one encoder, load
is bounded, what is missing is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from hypothesis import given
from hypothesis import strategies as st

from epd.messages import Address, InstanceInfo, Load
from epd.scheduling import placement
from epd.scheduling.fixed_rule import BALANCE, PREFIX_BALANCE, PREFIX_SLACK, FixedRule
from epd.scheduling.placement import (
    NOTHING_HELD,
    NOWHERE,
    Candidate,
    Image,
    Needs,
    PickEncoder,
    Placement,
    Shares,
    Unplaceable,
    pick_encoder,
)
from epd.scheduling.residency import Whereabouts
from epd_lab.sim.core.rand import KeyedRandom


def candidate(
    name: str, *roles: str, assigned: int = 0, blocks: int = 100, silent: tuple[str, ...] = ()
) -> Candidate:
    info = InstanceInfo(
        address=Address(name, 1, f"ipc://{name}"), roles=roles, host_id="host", pid=1
    )
    return Candidate(info, Load(free_kv_blocks=blocks, silent_peers=silent), assigned)


def place(
    pool: Sequence[Candidate],
    hashes: Sequence[str],
    avoid: Collection[str] = (),
    known: Whereabouts = NOWHERE,
    held: Shares = NOTHING_HELD,
    *,
    finds: bool = True,
    at: str = "",
    pick: PickEncoder | None = None,
) -> Placement | Unplaceable:
    """By the fixed rule."""
    asked = Needs(tuple(map(Image, hashes)), known=known, held=held)
    return placement.place(pool, asked, FixedRule, avoid, finds=finds, at=at, pick=pick)


def another_encoder(
    pool: Sequence[Candidate],
    mm_hash: str,
    at: Address,
    but: Collection[str],
    known: Whereabouts = NOWHERE,
) -> Address | None:
    return placement.another_encoder(pool, Image(mm_hash), FixedRule, at, but, known)


def ids(chosen: Placement | Unplaceable) -> tuple[list[str], str, str]:
    assert isinstance(chosen, Placement)
    encoders = [address.instance_id for address in chosen.encoders]
    return encoders, chosen.prefill.instance_id, chosen.decode.instance_id


def test_what_is_missing_is_named() -> None:
    only_decode = [candidate("d0", "decode")]
    assert place(only_decode, []) == Unplaceable("no healthy instance has the role prefill")
    chosen = place([*only_decode, candidate("p0", "prefill")], ["h"])
    assert chosen == Unplaceable("no healthy instance has the role encode")
    assert ids(place([*only_decode, candidate("p0", "prefill")], [])) == ([], "p0", "d0")


def finder(name: str, *roles: str, assigned: int = 0) -> Candidate:
    info = InstanceInfo(
        address=Address(name, 1, f"ipc://{name}"),
        roles=roles,
        host_id="host",
        pid=1,
        finds_rows=True,
    )
    return Candidate(info, Load(free_kv_blocks=100), assigned)


def test_a_storage_serves_where_there_is_no_encoder() -> None:
    """F32: whoever reads it is asked; what it does not have needs an encoder after all."""
    pool = [
        candidate("p0", "prefill"),
        finder("p1", "prefill", assigned=9),
        candidate("d", "decode"),
    ]
    assert ids(place(pool, ["h"])) == (["p1"], "p1", "d")
    assert ids(place(pool, ["h"], avoid={"p1"})) == (["p1"], "p1", "d")
    assert ids(place(pool, [])) == ([], "p0", "d"), "a text goes where it is quiet"
    assert place(pool, ["h"], finds=False) == Unplaceable("no healthy instance has the role encode")


def test_what_storage_has_needs_no_encoder() -> None:
    pool = [finder("pd0", "prefill", "decode"), candidate("e0", "encode")]
    stored = Known(resident=("e0", "pd0"))
    assert ids(place(pool, ["h", "new"], known=stored)) == (["pd0", "e0"], "pd0", "pd0")
    joins = ids(place(pool, ["h"], known=Known(in_flight=("pd0",))))
    assert joins == (["pd0"], "pd0", "pd0"), "it is being loaded there"
    without = ids(place(pool, ["h"], known=stored, finds=False))
    assert without == (["e0"], "pd0", "pd0"), "storage was asked, and had none"


def test_local_hops_are_preferred() -> None:
    both = [candidate("epd0", "encode", "prefill", "decode"), candidate("e1", "encode")]
    assert ids(place(both, ["h1", "h2"])) == (["epd0", "epd0"], "epd0", "epd0")


def test_a_busy_neighbour_gives_way() -> None:
    pool = [candidate("pd0", "prefill", "decode"), candidate("d1", "decode", assigned=0)]
    assert ids(place(pool, []))[2] == "pd0"
    busy = [candidate("pd0", "prefill", "decode", assigned=9), candidate("d1", "decode")]
    assert ids(place(busy, []))[2] == "d1"


def test_instances_that_failed_it_are_avoided_if_there_are_others() -> None:
    pool = [candidate("p0", "prefill"), candidate("p1", "prefill"), candidate("d0", "decode")]
    assert ids(place(pool, [], avoid={"p0"}))[1] == "p1"
    assert ids(place(pool, [], avoid={"p0", "p1", "d0"}))[1] == "p0"


def test_a_pair_that_does_not_hear_each_other_is_taken_only_if_there_is_no_other() -> None:
    d0, d1 = candidate("d0", "decode", silent=("p0",)), candidate("d1", "decode", assigned=9)
    e0, e1 = candidate("e0", "encode"), candidate("e1", "encode")
    p0 = candidate("p0", "prefill", silent=("e0",))
    for mm_hash in ("h1", "h2", "h3", "h4"):
        assert ids(place([d0, d1, e0, e1, p0], [mm_hash])) == (["e1"], "p0", "d1")
    assert ids(place([d0, e0, p0], ["h"])) == (["e0"], "p0", "d0")
    p1 = candidate("p1", "prefill", assigned=9)
    assert ids(place([d0, e0, p0, p1], ["h"])) == (["e0"], "p1", "d0")


def test_equal_images_meet_in_one_encoder() -> None:
    pool = [candidate(f"e{i}", "encode") for i in range(4)]
    pool += [candidate("p0", "prefill"), candidate("d0", "decode")]
    first = ids(place(pool, [f"hash{i}" for i in range(50)]))[0]
    again = ids(place(list(reversed(pool)), [f"hash{i}" for i in range(50)]))[0]
    assert first == again
    counts = Counter(first)
    assert set(counts) == {"e0", "e1", "e2", "e3"}


def test_losing_an_encoder_moves_only_its_images() -> None:
    pool = [candidate(f"e{i}", "encode") for i in range(4)]
    rest = [candidate("p0", "prefill"), candidate("d0", "decode")]
    hashes = [f"hash{i}" for i in range(100)]
    before = ids(place(pool + rest, hashes))[0]
    after = ids(place(pool[1:] + rest, hashes))[0]
    assert all(b == a for b, a in zip(before, after, strict=True) if b != "e0")


@given(st.lists(st.integers(0, 40), min_size=2, max_size=6), st.text(max_size=8))
def test_no_encoder_is_loaded_beyond_the_bound(loads: list[int], mm_hash: str) -> None:
    pool = [candidate(f"e{i}", "encode", assigned=n) for i, n in enumerate(loads)]
    pool += [candidate("p", "prefill"), candidate("d", "decode")]
    chosen = ids(place(pool, [mm_hash]))[0][0]
    mean = sum(loads) / len(loads)
    assert loads[int(chosen[1:])] <= BALANCE * (mean + 1)


class Known:
    """Whereabouts of the hash `h`."""

    def __init__(self, in_flight: tuple[str, ...] = (), resident: tuple[str, ...] = ()) -> None:
        self._in_flight, self._resident = in_flight, resident

    def in_flight(self, mm_hash: str) -> tuple[str, ...]:
        return self._in_flight if mm_hash == "h" else ()

    def resident(self, mm_hash: str) -> tuple[str, ...]:
        return self._resident if mm_hash == "h" else ()


def encoders(*assigned: int) -> list[Candidate]:
    pool = [candidate(f"e{i}", "encode", assigned=n) for i, n in enumerate(assigned)]
    return [*pool, candidate("p0", "prefill"), candidate("d0", "decode")]


def test_an_image_on_its_way_is_joined_whatever_the_load() -> None:
    for name in ("e0", "e1", "e2"):
        pool = encoders(*(90 * (name == f"e{i}") for i in range(3)))
        assert ids(place(pool, ["h"], known=Known(in_flight=(name,))))[0] == [name]


def test_rows_are_worth_some_load_and_no_more() -> None:
    for name in ("e0", "e1", "e2"):
        busier = encoders(*(3 * (name == f"e{i}") for i in range(3)))
        assert ids(place(busier, ["h"], known=Known(resident=(name,))))[0] == [name]
        swamped = encoders(*(90 * (name == f"e{i}") for i in range(3)))
        assert ids(place(swamped, ["h"], known=Known((name,), (name,))))[0] != [name]


def test_what_is_known_of_others_than_candidates_counts_for_nothing() -> None:
    pool = encoders(0, 0)
    known = Known(in_flight=("gone",), resident=("gone", "p0"))
    assert place(pool, ["h"], known=known) == place(pool, ["h"])
    avoided = place(pool, ["h"], avoid={"e0"}, known=Known(("e0",), ("e0",)))
    assert ids(avoided)[0] == ["e1"]


def test_replicas_take_what_they_have() -> None:
    pool = [candidate(f"epd{i}", "encode", "prefill", "decode", assigned=i) for i in range(2)]
    assert ids(place(pool, ["h"], known=Known(resident=("epd1",)))) == (["epd1"], "epd1", "epd1")
    assert ids(place(pool, ["other"]))[1] == "epd0"
    pool[1] = candidate("epd1", "encode", "prefill", "decode", assigned=2)
    chosen = ids(place(pool, ["h"], known=Known(resident=("epd1",))))
    assert chosen == (["epd1"], "epd0", "epd0")  # too busy to prefill, not to hand rows over


# --- prefixes -------------------------------------------------------------------------------------

LOADS = st.lists(st.integers(0, 40), min_size=2, max_size=6)


def prefills(loads: list[int]) -> list[Candidate]:
    return [candidate(f"p{i}", "prefill", assigned=n) for i, n in enumerate(loads)]


def test_a_conversation_goes_back_to_where_its_beginning_is() -> None:
    pool = [*prefills([2, 1, 1]), *(candidate(f"d{i}", "decode", assigned=i) for i in range(3))]
    assert ids(place(pool, []))[1:] == ("p1", "d0")
    held = {"p0": 1.0, "p2": 0.2, "d1": 0.9}
    assert ids(place(pool, [], held=held))[1:] == ("p0", "d1")
    assert ids(place(pool, [], avoid={"p0", "d1"}, held=held))[1:] == ("p2", "d0")
    assert ids(place(pool[1:], [], held=held))[1] == "p2"  # it drains, or is gone


@given(LOADS, st.data())
def test_a_prefix_is_worth_some_load_and_no_more(loads: list[int], data: st.DataObject) -> None:
    """Whoever holds what: nobody is chosen who has many more attempts than the least busy one."""
    shares = st.dictionaries(st.sampled_from([f"p{i}" for i in range(len(loads))]), st.floats(0, 1))
    held = data.draw(shares)
    chosen = ids(place([*prefills(loads), candidate("d", "decode")], [], held=held))[1]
    bound = min(loads) + PREFIX_SLACK + PREFIX_BALANCE * sum(loads) / len(loads)
    assert loads[int(chosen[1:])] <= bound + 1e-9
    dominated = [
        i
        for i, load in enumerate(loads)
        if load < loads[int(chosen[1:])] and held.get(f"p{i}", 0.0) >= held.get(chosen, 0.0)
    ]
    assert not dominated, "less busy, and holds no less"


@given(LOADS, st.floats(0, 1), st.text(max_size=8))
def test_what_all_hold_changes_nothing(loads: list[int], share: float, mm_hash: str) -> None:
    pool = [*prefills(loads), candidate("e", "encode"), candidate("d", "decode")]
    everywhere = {f"p{i}": share for i in range(len(loads))}
    for hashes in ([], [mm_hash]):
        assert place(pool, hashes, held=everywhere) == place(pool, hashes)


@given(LOADS)
def test_a_popular_beginning_spreads(loads: list[int]) -> None:
    """Everybody asks with the same beginning, which one instance holds: all of them get work."""
    busy = list(loads)
    for _ in range(sum(loads) + 60 * len(loads)):
        pool = [*prefills(busy), candidate("d", "decode")]
        busy[int(ids(place(pool, [], held={"p0": 1.0}))[1][1:])] += 1
    mean = sum(busy) / len(busy)
    assert max(busy) - min(busy) <= max(*loads, PREFIX_SLACK + PREFIX_BALANCE * mean + 1)


def test_encoders_take_turns_or_are_drawn_whatever_is_known() -> None:
    """`encode_policy`: rows and load do not count, who just failed it still does."""
    pool = [candidate(f"e{n}", "encode", assigned=9 * n) for n in range(3)]
    pool += [candidate("p", "prefill"), candidate("d", "decode")]
    known = Known(resident=("e0",))
    in_turn = pick_encoder("round_robin", lambda *key: 0)
    two = [ids(place(pool, ["h", "h", "g"], known=known, pick=in_turn))[0] for _ in range(2)]
    assert Counter(two[0]) == Counter(two[1]) == Counter(["e0", "e1", "e2"])
    random = KeyedRandom(1, "placement")
    by_chance = pick_encoder("random", random.integer)
    drawn = ids(place(pool, ["h"] * 300, known=known, pick=by_chance))[0]
    assert all(70 < count < 130 for count in Counter(drawn).values()) and len(set(drawn)) == 3
    left = ids(place(pool, ["h"] * 9, avoid={"e1"}, known=known, pick=by_chance))[0]
    assert set(left) == {"e0", "e2"}
    assert pick_encoder("affinity", random.integer) is None


# --- bounds, met exactly --------------------------------------------------------------------------


def test_a_pair_that_hears_each_other_at_every_stage_is_best() -> None:
    """The encoder counts for who has images, and for nobody else."""
    deaf_to_e = candidate("p0", "prefill", silent=("e0",))
    deaf_to_d = candidate("p1", "prefill", silent=("d0",))
    hears_all = candidate("p2", "prefill", assigned=9)
    pool = [candidate("e0", "encode"), candidate("d0", "decode"), deaf_to_e, deaf_to_d, hears_all]
    assert ids(place(pool, ["h"]))[1] == "p2"
    assert ids(place(pool, []))[1] == "p0"


def test_who_holds_the_prompt_computes_on() -> None:
    pool = [*prefills([0, 9]), candidate("d", "decode")]
    assert ids(place(pool, [], at="p1"))[1] == "p1"
    assert ids(place(pool, [], at="gone"))[1] == "p0"
    assert ids(place(pool, [], at="p1", avoid={"p1"}))[1] == "p0"


def test_of_those_who_read_the_storage_who_failed_it_is_avoided() -> None:
    pool = [finder("p0", "prefill"), finder("p1", "prefill", assigned=9), candidate("d", "decode")]
    assert ids(place(pool, ["h"], avoid={"p0"})) == (["p1"], "p1", "d")


def test_a_local_hop_is_worth_one_attempt() -> None:
    for assigned, chosen in ((1, "pd"), (2, "d")):
        pool = [candidate("pd", "prefill", "decode", assigned=assigned), candidate("d", "decode")]
        assert ids(place(pool, []))[2] == chosen


def test_a_whole_prefix_is_worth_more_where_much_is_open() -> None:
    """Two attempts, and a quarter of the mean: 3.25 at loads of 7 and 3, 10.75 at 40 and 30."""
    for loads, chosen in (([6, 3], "p0"), ([7, 3], "p1"), ([40, 30], "p0"), ([41, 30], "p1")):
        pool = [*prefills(loads), candidate("d", "decode")]
        assert ids(place(pool, [], held={"p0": 1.0}))[1] == chosen, loads


def test_each_image_counts_once_for_who_has_it() -> None:
    pool = [candidate(f"epd{i}", "encode", "prefill", "decode") for i in range(2)]

    class Apart(Known):
        """epd0 holds `x`; epd1 holds `y` and `z`, and `y` is on its way there as well."""

        def in_flight(self, mm_hash: str) -> tuple[str, ...]:
            return ("epd1",) if mm_hash == "y" else ()

        def resident(self, mm_hash: str) -> tuple[str, ...]:
            return ("epd0",) if mm_hash in ("x", "w") else ("epd1",)

    assert ids(place(pool, ["x", "y", "z"], known=Apart()))[1] == "epd1"
    assert ids(place(pool, ["x", "y", "w"], known=Apart()))[1] == "epd0"
    assert ids(place(pool, ["x", "y"], known=Apart()))[1] == "epd0", "it counts once"


def test_who_is_gone_does_not_hide_the_next_one_that_has_an_image_on_its_way() -> None:
    known = Known(in_flight=("gone", "e1"))
    pool = encoders(0, 40)
    assert ids(place(pool, ["h"], known=known))[0] == ["e1"]


def test_rows_are_worth_twice_the_mean_load_and_not_more() -> None:
    for assigned, stays in ((6, True), (7, False)):
        known = Known(resident=("e0",))
        chosen = ids(place(encoders(assigned, 0, 0), ["h"], known=known))[0]
        assert (chosen == ["e0"]) is stays


def test_of_those_who_hold_rows_prefill_itself_is_best_and_then_the_quiet_one() -> None:
    known = Known(resident=("e0", "e1", "ep"))
    pool = [*encoders(1, 0), candidate("ep", "encode", "prefill", assigned=1)]
    assert ids(place(pool, ["h"], known=known, at="ep"))[0] == ["ep"]
    assert ids(place(pool, ["h"], known=known, at="p0"))[0] == ["e1"]


def test_an_encoder_is_passed_over_just_beyond_its_bound() -> None:
    """At loads of 5 and 1 it is 5, at 6 and 1 it is 5.6."""
    hashes = [f"hash{i}" for i in range(20)]
    at_home = [h for h in hashes if ids(place(encoders(0, 0), [h]))[0] == ["e0"]]
    assert at_home
    assert {ids(place(encoders(5, 1), [h]))[0][0] for h in at_home} == {"e0"}
    assert {ids(place(encoders(6, 1), [h]))[0][0] for h in at_home} == {"e1"}


def test_turns_go_round_by_name() -> None:
    pool = [candidate(f"e{n}", "encode") for n in (2, 0, 1)]
    pool += [candidate("p", "prefill"), candidate("d", "decode")]
    in_turn = pick_encoder("round_robin", lambda *key: 0)
    assert ids(place(pool, ["h"] * 4, pick=in_turn))[0] == ["e0", "e1", "e2", "e0"]
    asked: list[object] = []
    by_chance = pick_encoder("random", lambda *key: asked.append(key) or 7)
    assert ids(place(pool, ["h"] * 3, pick=by_chance))[0] == ["e1"] * 3
    assert len(set(asked)) == 3, "each image draws for itself"


def test_another_encoder_is_none_that_failed_and_one_that_prefill_hears() -> None:
    pool = [*encoders(0, 0, 9), candidate("e3", "encode", silent=("p0",))]
    at, gone = Address("p0", 1, "ipc://p0"), Address("p1", 1, "ipc://p1")
    first = another_encoder(pool, "h", at, ())
    assert first is not None and first.instance_id in ("e0", "e1")
    second = another_encoder(pool, "h", at, {first.instance_id, "e2"})
    assert second is not None and {first.instance_id, second.instance_id} == {"e0", "e1"}
    holds = another_encoder(pool, "h", at, {"e0"}, Known(resident=("e1",)))
    assert holds is not None and holds.instance_id == "e1"
    assert another_encoder(pool, "h", at, {"e0", "e1", "e2"}) is None, "only a deaf one is left"
    assert another_encoder(pool, "h", gone, ()) is None, "who computes its prompt takes no work"
