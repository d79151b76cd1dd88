"""The law of the connector: what is promised is held, and what fails is one request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epd.records import RowContract
from epd.vllm.halves import SchedulerHalf, load
from epd.vllm.shelf import Shelf

WIDTH = 4
CONTRACT = RowContract(hidden=4, row_width=WIDTH, num_deepstack=0, dtype="float32", row_nbytes=16)


class At:
    """A scheduler's half, with a clock that a test sets."""

    def __init__(self, *, encodes: bool = False) -> None:
        self.now_s = 0.0
        self.shelf = Shelf(CONTRACT)
        self.half = SchedulerHalf(self.shelf, lambda: self.now_s, 10.0, 5.0, encodes=encodes)

    def put(self, identifier: str, num_rows: int) -> torch.Tensor:
        rows = torch.arange(num_rows * WIDTH, dtype=torch.float32)
        data = memoryview(rows.numpy()).cast("B")
        self.shelf.put(identifier, [data[:WIDTH], data[WIDTH:]])
        return rows.view(num_rows, WIDTH)


def request(*wanted: tuple[str, int, int], pixels: bool = False, name: str = "r") -> Any:
    """`wanted`: identifier, first place, number of rows."""
    data = {"pixel_values": None} if pixels else {"image_grid_thw": None}
    features = [
        SimpleNamespace(
            identifier=identifier,
            data=data,
            mm_position=SimpleNamespace(offset=offset, length=length),
        )
        for identifier, offset, length in wanted
    ]
    return SimpleNamespace(
        request_id=name,
        mm_features=features,
        get_num_encoder_embeds=lambda index: features[index].mm_position.length,
    )


def test_rows_that_are_held_are_promised_and_handed_over() -> None:
    at = At()
    rows = at.put("a", 3)
    assert not at.half.has("a"), "nobody has asked for them in this step"
    assert at.half.ensure(request(("a", 1, 3)), 0) and at.half.has("a")
    at.half.allocated("a")
    orders = at.half.orders()
    cache: dict[str, torch.Tensor] = {}
    load(orders, cache, torch.device("cpu"))
    assert torch.equal(cache["a"], rows)
    assert not at.half.has("a") and not at.half.orders(), "each step promises anew"
    assert at.shelf.num_steps == 2


def test_a_promise_outlives_what_the_pool_does_meanwhile() -> None:
    """Between the promise and the step the loop may evict them."""
    at = At()
    rows = at.put("a", 3)
    assert at.half.ensure(request(("a", 1, 3)), 0)
    at.shelf.drop("a")
    at.half.allocated("a")
    assert at.half.has("a") and torch.equal(at.half.orders()["a"], rows)


@pytest.mark.parametrize("num_rows", [2, 4])
def test_another_number_of_rows_fails_the_request_alone(num_rows: int) -> None:
    at = At()
    at.put("a", num_rows)
    assert not at.half.ensure(request(("a", 1, 3)), 0)
    assert not at.half.has("a") and at.half.take_lost() == {"r"} and not at.half.take_lost()


def test_rows_on_their_way_defer_and_then_come() -> None:
    at = At()
    at.shelf.expect("a")
    asked = request(("a", 1, 3))
    assert not at.half.ensure(asked, 0) and not at.half.take_lost()
    at.put("a", 3)
    at.shelf.settle("a")
    assert at.half.ensure(asked, 0)


def test_rows_on_their_way_for_too_long_fail_the_request() -> None:
    at = At()
    at.shelf.expect("a")
    asked = request(("a", 1, 3))
    assert not at.half.ensure(asked, 0)
    at.now_s = 10.1
    assert not at.half.ensure(asked, 0) and at.half.take_lost() == {"r"}


def test_one_that_ended_meanwhile_is_not_failed_again() -> None:
    at = At()
    assert not at.half.ensure(request(("a", 1, 3)), 0)
    at.half.finished("r")
    assert not at.half.take_lost()


@pytest.mark.parametrize("encodes", [True, False])
@pytest.mark.parametrize("pixels", [True, False])
def test_local_encoding_is_for_pixels_and_only_if_it_was_chosen(
    encodes: bool, pixels: bool
) -> None:
    at = At(encodes=encodes)
    may = encodes and pixels
    assert at.half.ensure(request(("a", 1, 3), pixels=pixels), 0) is may
    assert at.half.take_lost() == (set() if may else {"r"})
    assert not at.half.has("a")


def test_what_is_computed_needs_no_rows() -> None:
    """It is asked in each step of a stream, long after its rows are gone."""
    at = At()
    at.put("b", 2)
    asked = request(("a", 1, 3), ("b", 5, 2))
    assert at.half.ensure(asked, 4) and at.half.has("b") and not at.half.has("a")
    assert at.half.ensure(asked, 7) and not at.half.take_lost()


def test_one_of_two_that_lacks_promises_neither() -> None:
    at = At()
    at.put("a", 3)
    at.shelf.expect("b")
    assert not at.half.ensure(request(("a", 1, 3), ("b", 5, 2)), 0)
    assert not at.half.has("a")


def test_rows_of_the_engine_stay() -> None:
    at = At()
    own = torch.zeros(1)
    cache = {"a": own}
    load({"a": at.put("a", 3)}, cache, torch.device("cpu"))
    assert cache["a"] is own


def test_kv_that_does_not_come_fails_its_request_and_no_other() -> None:
    at = At()
    at.half.fetch({"a": "kv-a", "b": "kv-b", "c": "kv-c"}, frozenset())
    at.half.finished("c")
    at.now_s = 5.1
    assert not at.half.fetch({}, frozenset()), "the step shows nothing"
    assert at.half.fetch({}, frozenset({"kv-b", "kv-c"})) == ["b"]
    assert at.half.take_lost() == {"b"}


def test_kv_is_late_only_while_it_is_shown_to_be_absent() -> None:
    at = At()
    at.half.fetch({"a": "kv-a", "b": "kv-b"}, frozenset())
    at.now_s = 4.0
    assert not at.half.fetch({"late": "kv-late"}, frozenset({"kv-a", "kv-late", "kv-c"}))
    at.now_s = 5.1
    assert at.half.fetch({}, frozenset({"kv-a", "kv-b", "kv-late"})) == ["a"]
    assert at.half.take_lost() == {"a"} and not at.half.take_lost()
    at.now_s = 60.0
    at.half.finished("late")
    assert not at.half.fetch({}, frozenset({"kv-a", "kv-b", "kv-late"})), "none is failed twice"
