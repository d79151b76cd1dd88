"""What is wrong with a value, found beside its type: in agreement with what reads it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from epd.api.http.errors import ApiError
from epd.api.http.shapes import Facts, NotRead, Shape, bounded, most, read_shape


class Inner(Shape):
    number: int


class Ab(Shape, tag="ab", tag_field="kind"):
    a: Annotated[str, Meta(min_length=1, max_length=3, pattern="a")] = "a"
    b: bool = False


class Cd(Shape, tag="cd", tag_field="kind"):
    c: Annotated[float, Meta(gt=0, le=2)]
    d: Literal["x", "y"] | None = None


REFUSED = {"best_of": NotRead("choose yourself", (1, 1.0))}


class Outer(Shape):
    """A shape of every kind of type that shapes of the server have."""

    refused = REFUSED
    inner: list[Inner] | None = None
    either: str | Annotated[list[Ab | Cd], Meta(min_length=1, max_length=2)] = ""
    ids: tuple[Annotated[int, most("token_id")], ...] = ()
    biases: dict[Annotated[int, most("token_id")], float] = msgspec.field(default_factory=dict)
    count: Annotated[int, Meta(ge=-1, le=3)] | Cd | None = None
    names: dict[str, Ab] = msgspec.field(default_factory=dict)
    anything: Any = None


SHAPE = bounded(Outer, Facts(token_id=5, choices=1, pixels=1))
SCALARS = st.none() | st.booleans() | st.integers(-3, 8) | st.sampled_from([2.0, 0.5, 10**30, -0.0])
SCALARS |= st.sampled_from(["", "a", "ab", "abcd", "x", "ab", "cd", "1", "07", "-1", "\u0661"])
NAMES = st.sampled_from(
    ["best_of", *Outer.__struct_fields__, "number", "kind", "a", "b", "c", "d", "1", "06"]
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("name", ["more", "two\nlines", "`tick", ""])
@pytest.mark.parametrize(("path", "code"), [("", "unknown"), ("inner[0]", "unsupported")])
def test_a_field_of_any_name_is_refused_by_it(name: str, path: str, code: str) -> None:
    value: dict[str, Any] = {"inner": [{"number": 1, name: 1}]} if path else {name: 1}
    with pytest.raises(ApiError) as raised:
        read_shape(value, Outer)
    error = raised.value
    assert error.status == 400 and str(error.code).startswith(code)
    assert error.param == (f"{path}.{name}" if path else name)
    assert error.param in error.message


@given(body=st.dictionaries(NAMES, JSON, max_size=4))
def test_every_value_is_read_or_its_fault_is_found(body: dict[str, Any]) -> None:
    """The walk never passes what the reader then refuses, and refuses nothing that it takes."""
    try:
        read = read_shape(body, SHAPE)
    except ApiError as error:
        assert error.status == 400 and error.param
        if "best_of" not in body:
            with pytest.raises(msgspec.ValidationError):
                msgspec.convert(body, SHAPE, str_keys=True)
    else:
        assert isinstance(read, Outer)
        assert all(0 <= key <= 5 for key in (*read.ids, *read.biases))


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"ids": [6]}, "ids[0]", "out_of_range"),
        ({"biases": {"6": 1}}, "biases", "out_of_range"),
        ({"biases": {"5": "x"}}, "biases.5", "invalid_type"),
        ({"either": []}, "either", "out_of_range"),
        ({"either": [{}]}, "either[0].kind", None),
        ({"either": [{"kind": "ef"}]}, "either[0].kind", "unsupported_parameter"),
        ({"either": [{"kind": "cd"}]}, "either[0].c", None),
        ({"either": [{"kind": "cd", "c": 2.5}]}, "either[0].c", "out_of_range"),
        ({"count": True}, "count", "invalid_type"),
        ({"count": 1.5}, "count", "invalid_type"),
        ({"names": {"x": {"a": "b"}}}, "names.x.a", "out_of_range"),
        ({"best_of": True}, "best_of", "unsupported_parameter"),
    ],
)
def test_a_fault_is_a_place_and_a_rule(body: Any, param: str, code: str | None) -> None:
    with pytest.raises(ApiError) as raised:
        read_shape(body, SHAPE)
    assert (raised.value.param, raised.value.code) == (param, code)


def test_null_is_absence_and_whole_floats_are_integers() -> None:
    said = {"inner": [{"number": 2.0, "more": None}], "ids": None, "count": 3.0, "best_of": 1.0}
    read = read_shape(said, SHAPE)
    assert read.inner == [Inner(number=2)] and (read.ids, read.count) == ((), 3)
    assert read_shape({"biases": {"03": 1}}, SHAPE).biases == {3: 1.0}
