"""`data:` URLs (F46, F52): as a text, and piece by piece while they arrive."""

from __future__ import annotations

import base64

import pytest

from epd.api.http.data_url import image_bound, is_data_url, read_data_url
from epd.api.http.errors import ApiError
from epd.config import Limits

IMAGE = b"\x89PNG as far as this module knows"
LIMITS = Limits(max_image_nbytes=100_000)
BOUND = image_bound(LIMITS)


def test_data_urls() -> None:
    url = "data:image/png;base64," + base64.b64encode(IMAGE).decode()
    assert read_data_url(url, BOUND, "x") == IMAGE
    assert read_data_url("DATA:;BASE64,YWJj", BOUND, "x") == b"abc"
    assert read_data_url("data:image/svg+xml,%3Csvg", BOUND, "x") == b"<svg"
    assert is_data_url("data:,")
    assert is_data_url("Data:,")
    assert not is_data_url("http://data:1")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64", "comma"),
        ("data:image/png;base64,@", "base64"),
        ("data:;base64,abc", "base64"),
        ("data:;base64,YWJj\nYWJj", "base64"),
        ("data:;base64,☃☃☃☃", "base64"),
        ("data:;base64," + "A" * 200_000, "more than 100000 bytes"),
        ("data:," + "A" * 100_001, "more than 100000 bytes"),
        ("data:," + "%41" * 200_000, "more than 100000 bytes"),
    ],
)
def test_broken_and_large_data_urls(url: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        read_data_url(url, BOUND, "x")
    assert (refused.value.status, refused.value.param) == (400, "x")
