"""What the sample's tests know; `test_mutation.py` says what they must catch and what not."""

from __future__ import annotations

from tests.mutation.sample.ledger import Do, Filled, Ledger, Page


def test_entries() -> None:
    ledger = Ledger(2)
    assert ledger.add("a", 1) is True
    assert ledger.add("a", 2) is True
    assert ledger.add("b", 1) is False
    assert ledger.num_refused == 1
    assert ledger.oldest() == ("a", 1)
    ledger.drop("a", 1)
    assert ledger.oldest() == ("a", 2)


def test_waiting() -> None:
    assert Ledger(1).wait(3) == 3


def test_page() -> None:
    page = Page("1")
    assert page.fire(Filled()) == (Do.TELL, Do.FREE)
    assert page.terminal
