"""How far an encoder runs ahead: in order, within the device tier, grants first."""

from __future__ import annotations

from epd.scheduling.run_ahead import RunAhead


def queue(ahead: RunAhead[str], *wishes: tuple[str, int]) -> list[str]:
    for key, nbytes in wishes:
        ahead.join(key, nbytes)
    return ahead.turns()


def nobody(key: str) -> bool:
    return False


def test_what_does_not_fit_waits_and_is_not_overtaken() -> None:
    ahead = RunAhead(10, nobody)
    assert queue(ahead, ("a", 6), ("b", 6), ("c", 1)) == ["a"]
    assert [key in ahead for key in "abc"] == [False, True, True] and len(ahead) == 2
    ahead.leave("a")
    assert ahead.turns() == ["b", "c"]
    assert (ahead.used, len(ahead)) == (7, 0)


def test_one_that_is_larger_than_all_goes_alone() -> None:
    ahead = RunAhead(10, nobody)
    assert queue(ahead, ("huge", 100), ("a", 1)) == ["huge"]
    ahead.leave("huge")
    assert ahead.turns() == ["a"]


def test_who_has_a_grant_overtakes() -> None:
    granted: set[str] = set()
    ahead = RunAhead(10, granted.__contains__)
    assert queue(ahead, ("a", 10), ("b", 10), ("c", 10)) == ["a"]
    granted.add("c")
    assert ahead.turns() == ["c"]


def test_who_is_not_wanted_leaves_the_queue_or_gives_its_share_back() -> None:
    ahead = RunAhead(10, nobody)
    assert queue(ahead, ("a", 10), ("b", 10)) == ["a"]
    for key in "bba":
        ahead.leave(key)
    assert (ahead.used, len(ahead), ahead.turns()) == (0, 0, [])


def test_what_is_wanted_again_counts_once() -> None:
    ahead = RunAhead(10, nobody)
    for _ in range(2):
        ahead.count("a", 6)
    assert (ahead.used, queue(ahead, ("b", 6))) == (6, [])


def test_one_that_may_not_begin_holds_up_nobody() -> None:
    """As an image that has to be computed apart, and is larger than what is left."""
    apart = {"b"}
    ahead = RunAhead(10, nobody, lambda key: key not in apart)
    assert queue(ahead, ("a", 6), ("b", 6), ("c", 1)) == ["a", "c"]
    apart.clear()
    assert queue(ahead, ("d", 1)) == [], "it is first, and does not fit"


def test_what_one_takes_to_begin_another_lacks() -> None:
    taken: set[str] = set()
    ahead = RunAhead(10, nobody, lambda key: not taken, taken.add)
    assert queue(ahead, ("a", 1), ("b", 1)) == ["a"]


def test_pixels_have_a_bound_that_nobody_overtakes() -> None:
    """A grant neither: they are freed without a consumer, so who waits for them has its turn."""
    ahead = RunAhead(100, {"c"}.__contains__, pixels_nbytes=10)
    for key, pixels_nbytes in (("a", 6), ("b", 6), ("c", 1), ("huge", 30), ("d", 1)):
        ahead.join(key, 1, pixels_nbytes)
    assert (ahead.turns(), ahead.pixels_used) == (["a"], 6)
    ahead.free_pixels("a")
    assert (ahead.turns(), ahead.pixels_used, ahead.used) == (["b", "c"], 7, 3)
    ahead.free_pixels("b")
    assert ahead.turns() == [], "it is larger than all, and has to be alone"
    ahead.free_pixels("c")
    assert (ahead.turns(), ahead.pixels_used) == (["huge"], 30)
    ahead.free_pixels("huge")
    assert (ahead.turns(), ahead.pixels_used, len(ahead)) == (["d"], 1, 0)
