"""Cache events: in order they are the truth, and what is lost, late or repeated is noticed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epd.scheduling.backlog import Attempt, Books
from epd.scheduling.residency import MAX_BATCH, Batch, CacheIndex, CacheLog, Nowhere, Said

KEYS = [f"{n:064x}" for n in range(6)]
CHANGES = st.lists(
    st.tuples(st.sampled_from(KEYS), st.booleans(), st.sampled_from(("keep", "lose", "copy")))
)


@given(CHANGES)
def test_whatever_is_lost_or_repeated_the_index_ends_as_the_log(
    changes: list[tuple[str, bool, str]],
) -> None:
    log, index = CacheLog(), CacheIndex()
    sent: list[Batch] = []

    def deliver(batch: Batch) -> None:
        if not index.apply("e0", 1, batch):
            log.owe_full()

    for key, is_stored, fate in changes:
        (log.stored if is_stored else log.evicted)(key)
        if not log.has_news:
            continue
        sent.append(log.take())
        if fate != "lose":
            deliver(sent[-1])
        if fate == "copy":
            deliver(sent[len(sent) // 2])  # an old one once more
    if not index.is_current("e0", 1, log.sequence):  # what a heartbeat tells
        log.owe_full()
    if log.has_news:
        deliver(log.take())
    assert index.held("e0") == log.held
    assert all((("e0",) if key in log.held else ()) == index.resident(key) for key in KEYS)


def test_a_gap_changes_nothing() -> None:
    index = CacheIndex()
    assert index.apply("e0", 1, Batch(1, False, ("a",), ()))
    assert not index.apply("e0", 1, Batch(3, False, ("b",), ("a",)))
    assert index.held("e0") == {"a"}
    assert index.apply("e0", 1, Batch(4, True, ("b",), ()))
    assert index.held("e0") == {"b"}


def test_another_life_holds_nothing() -> None:
    index = CacheIndex()
    index.apply("e0", 1, Batch(1, False, ("a",), ()))
    assert index.is_current("e0", 2, 0)
    assert index.resident("a") == ()
    index.apply("e0", 2, Batch(1, False, ("a",), ()))
    index.forget("e0", 1)  # late word of the first life's end
    assert index.resident("a") == ("e0",)
    index.forget("e0", 2)
    assert index.resident("a") == ()


def test_all_is_bounded() -> None:
    log, index = CacheLog(max_tracked=3), CacheIndex(max_tracked=3)
    for n in range(5):
        log.stored(f"h{n}")
    assert log.held == {"h2", "h3", "h4"}
    index.apply("e0", 1, log.take())
    assert index.held("e0") == log.held
    for n in range(MAX_BATCH + 1):
        log.stored(f"k{n}")
    batch = log.take()
    assert batch.full and len(batch.stored) == 3
    index.apply("e0", 1, Batch(2, False, tuple(f"x{n}" for n in range(9)), ()))
    assert len(index.held("e0")) == 3  # whatever it is told


def test_stored_and_evicted_between_two_batches_is_no_residency() -> None:
    log = CacheLog()
    log.stored("a")
    log.evicted("a")
    assert log.take() == Batch(1, False, (), ("a",))


def test_what_is_said_again_is_no_news_and_pushes_nothing_out() -> None:
    log = CacheLog(max_tracked=2)
    for key in ("a", "b"):
        log.stored(key)
    log.take()
    log.stored("a")
    assert not log.has_news and log.held == {"a", "b"}


def test_more_changes_than_a_batch_holds_go_as_a_full_one() -> None:
    log = CacheLog()
    for number in range(MAX_BATCH):
        log.stored(f"k{number}")
    assert not log.take().full
    for number in range(MAX_BATCH + 1):
        log.evicted(f"k{number}")
        log.stored(f"k{number}")
    assert log.take().full
    log.stored("new")
    assert log.take() == Batch(3, False, ("new",), ())


def test_a_copy_of_a_batch_says_nothing_new() -> None:
    index = CacheIndex()
    assert index.apply("e0", 1, Batch(1, False, ("a", "b"), ()))
    assert index.apply("e0", 1, Batch(2, False, (), ("a", "b")))
    assert index.held("e0") == frozenset()
    assert index.apply("e0", 1, Batch(1, False, ("a", "b"), ())), "it was heard, and is over"
    assert index.apply("e0", 1, Batch(2, True, ("a",), ()))
    assert index.held("e0") == frozenset()
    assert index.is_current("e0", 1, 2) and not index.is_current("e0", 1, 3)


def test_the_index_forgets_the_oldest_and_the_dead_and_keeps_nothing_of_them() -> None:
    index = CacheIndex(max_tracked=2)
    index.apply("e0", 7, Batch(1, False, ("a", "b", "c"), ()))
    assert index.held("e0") == {"b", "c"}
    assert index.is_current("e0", 7, 1)
    assert index.held("e0") == {"b", "c"}, "to be asked changes nothing"
    index.forget("unknown", 7)
    index.forget("e0", 7)
    assert index.held("e0") == frozenset()
    assert not index._books and not index._holders


def test_what_the_asking_one_says_is_asked_last() -> None:
    index = CacheIndex()
    index.apply("e0", 1, Batch(1, False, ("a",), ()))
    said = Said(Nowhere(), {"a": "e7"})
    assert (tuple(said.resident("a")), tuple(said.resident("b"))) == (("e7",), ())
    assert tuple(said.in_flight("a")) == ()


def test_images_are_found_where_open_attempts_have_sent_them() -> None:
    books = Books()
    books.sent("r1", Attempt("", "", 0, {}, (("e0", "a"), ("e0", "a"), ("e1", "b")), ("e0", "e1")))
    books.sent("r2", Attempt("", "", 0, {}, (("e2", "a"),), ("e2",)))
    assert (books.in_flight("a"), books.in_flight("b")) == (("e0", "e2"), ("e1",))
    books.sent("r1", Attempt("", "", 0, {}, (("e1", "b"),), ("e1",)))
    assert (books.in_flight("a"), books.in_flight("b")) == (("e2",), ("e1",))
    books.ended("r1")
    books.ended("r1")
    assert (books.in_flight("a"), books.in_flight("b"), books.num_assigned) == (("e2",), (), 1)
