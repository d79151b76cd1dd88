"""What instances died of: counted by input and life, bounded, taken back, acquitted."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from epd.records import HandsList, SamplingParams
from epd.roles.gateway.suspects import content_of
from epd.scheduling.deaths import MAX_DEATHS, MAX_INPUTS, REMEMBERED_S, Deaths, Life, Silence

E0, E0_AGAIN, E1, E2 = ("e0", 1), ("e0", 2), ("e1", 1), ("e2", 1)


@dataclass
class Books:
    now_s: float = 0.0
    silent: set[Life] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.deaths = Deaths(lambda: self.now_s, self.silent.__contains__, together_s=1.0)


def test_the_second_life_that_dies_of_it_is_the_last() -> None:
    deaths = Books().deaths
    assert not deaths.count(E0, ["x", "y"])
    assert not deaths.count(E0, ["x"]), "a life dies once"
    assert deaths.is_suspect("x") and not deaths.is_poison("x")
    assert deaths.count(E0_AGAIN, ["x"]) == {"x": (E0, E0_AGAIN)}, "its next life is another one"
    assert deaths.is_poison("x") and not deaths.is_poison("y")
    assert not deaths.count(E1, ["x"]), "that was said"


def test_lives_of_one_host_that_fall_silent_together_are_one_death() -> None:
    deaths = Books().deaths
    deaths.count(E0, ["x"], Silence("a", 7.0))
    assert not deaths.count(E1, ["x"], Silence("a", 7.9)), "a cable"
    assert deaths.lives("x") == (E0,)
    assert deaths.count(E1, ["x"], Silence("a", 9.5)), "the input went on to it"
    for other in (Silence("b", 7.0), None):
        deaths.acquit("x")
        deaths.count(E0, ["x"], Silence("a", 7.0))
        assert deaths.count(E1, ["x"], other), "another host, or an end that was seen"


def test_only_what_was_at_hand_counts_and_each_report_is_whole() -> None:
    deaths = Books().deaths
    deaths.hold(E0, HandsList(serial=1, images=("x", "y"), requests=("r",)))
    deaths.hold(E0, now := HandsList(serial=3, images=("y",), requests=("r",)))
    deaths.hold(E0, HandsList(serial=2, images=("x", "y"), requests=("r",)))
    assert deaths.holders("y") == deaths.holders("r") == (E0,) and not deaths.holders("x")
    assert deaths.end(E0) == now, "what was overtaken is no news"
    assert deaths.end(E0) == HandsList()


def test_what_was_computed_is_acquitted_and_who_is_heard_again_did_not_die() -> None:
    deaths = Books().deaths
    for life in (E0, E1):
        deaths.count(life, ["x", "y"])
    deaths.acquit("x")
    deaths.forgive(E1)
    assert not deaths.lives("x") and deaths.lives("y") == (E0,)
    deaths.forgive(E0)
    assert not deaths


def test_what_one_died_of_is_at_one_instance_at_a_time() -> None:
    books = Books()
    deaths = books.deaths
    deaths.hold(E1, HandsList(serial=1, images=("x",)))
    assert deaths.may_hedge("x") and not deaths.is_barred("x")
    deaths.hold(E2, HandsList(serial=1, images=("x",)))
    assert not deaths.may_hedge("x") and not deaths.is_barred("x"), "nobody has died"
    deaths.end(E2)
    deaths.count(E2, ["x"])
    assert deaths.is_barred("x") and not deaths.may_hedge("x")
    assert deaths.is_barred("x", life=E0_AGAIN) and not deaths.is_barred("x", life=E1), "at stake"
    deaths.hold(E1, HandsList(serial=2))
    assert not deaths.is_barred("x"), "E1 let go of it"


def test_who_is_silent_may_have_died_of_it() -> None:
    books = Books()
    deaths = books.deaths
    books.silent.add(E2)
    deaths.hold(E2, HandsList(serial=1))
    deaths.hold(E0, HandsList(serial=1, images=("x",), requests=("r",)))
    assert not deaths.has_doubts
    books.silent.add(E0)
    assert deaths.has_doubts and deaths.is_suspect("x")
    assert not deaths.is_barred("x"), "a second one may take it"
    deaths.hold(E1, HandsList(serial=1, images=("x",), requests=("r",)))
    assert deaths.is_barred("x") and deaths.is_barred("content", "r")
    books.silent.clear()
    assert not deaths.is_barred("x")


def test_a_death_is_forgotten_in_time() -> None:
    books = Books()
    books.deaths.count(E0, ["x"])
    books.now_s = REMEMBERED_S / 2
    books.deaths.count(E1, ["y"])
    books.now_s = REMEMBERED_S + 1
    assert not books.deaths.lives("x") and books.deaths.lives("y") == (E1,)


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2000), max_size=40))))
def test_no_input_is_poison_by_fewer_deaths_and_the_books_are_bounded(
    ends: list[tuple[int, list[int]]],
) -> None:
    deaths = Books().deaths
    died: dict[str, set[Life]] = {}
    for number, (name, inputs) in enumerate(ends):
        life, keys = (f"e{name}", number), [str(one) for one in inputs]
        found = deaths.count(life, keys)
        for key in keys:
            died.setdefault(key, set()).add(life)
        assert all(len(died[key]) == MAX_DEATHS for key in found)
        assert len(deaths) <= MAX_INPUTS
    assert all(len(died[key]) >= MAX_DEATHS for key in died if deaths.is_poison(key))


def test_content_is_what_is_asked_for_whoever_drew_the_seed() -> None:
    one = content_of((1, 2), ("h",), SamplingParams(max_tokens=4, seed=1), "t")
    assert one == content_of((1, 2), ("h",), SamplingParams(max_tokens=4, seed=2), "t")
    others = {
        content_of((1, 3), ("h",), SamplingParams(max_tokens=4), "t"),
        content_of((1, 2), ("g",), SamplingParams(max_tokens=4), "t"),
        content_of((1, 2), ("h",), SamplingParams(max_tokens=4, grammar="x"), "t"),
        content_of((1, 2), ("h",), SamplingParams(max_tokens=4), "u"),
    }
    assert len(others) == 4 and one not in others
