"""What one request breaks while a step is planned costs that request alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from epd.fsm.request import Request
from epd.scheduling.batching import BatchScheduler

T = TypeVar("T")


def blaming(
    work: Callable[[], T],
    batch: BatchScheduler[Request],
    fail: Callable[[Request, Exception], None],
) -> T:
    """Do it; if it raises while the batch looks at a request, fail that one and do it again without
    it.  Raises what is nobody's."""
    while True:
        batch.at_hand = None
        try:
            return work()
        except Exception as error:
            culprit = batch.at_hand
            if culprit is None or not batch.expel(culprit.key):
                raise
            fail(culprit, error)
