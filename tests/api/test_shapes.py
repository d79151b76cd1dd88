"""What is said of a body that has another shape."""

from __future__ import annotations

from typing import Any

import pytest

from epd.api.http.errors import ApiError
from epd.api.http.shapes import Shape, read_shape


class Inner(Shape):
    number: int


class Outer(Shape):
    inner: list[Inner] | None = None


@pytest.mark.parametrize("name", ["more", "two\nlines", "`tick", ""])
@pytest.mark.parametrize(("path", "code"), [("", "unknown"), ("inner[0]", "unsupported")])
def test_a_field_of_any_name_is_refused_by_it(name: str, path: str, code: str) -> None:
    value: dict[str, Any] = {"inner": [{"number": 1, name: 1}]} if path else {name: 1}
    with pytest.raises(ApiError) as raised:
        read_shape(value, Outer)
    error = raised.value
    assert error.status == 400 and str(error.code).startswith(code)
    assert error.message.startswith(f"{path}.{name}" if path else name)
