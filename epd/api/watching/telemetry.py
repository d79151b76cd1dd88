"""What clients of the HTTP front see, as numbers: statuses, waiting times, prompt sizes.

Times run from the request's head, so they hold what the roles cannot see: reading the body,
fetching images, tokenizing, and writing.  Counting costs a few additions per request and nothing
per token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from epd.frontend import Metric, histogram

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)
TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class Histogram:
    """Counts by upper bound, in Prometheus' manner."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._help = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self) -> Iterator[Metric]:
        return histogram(self._name, self._help, self._bounds, self._counts, self._sum)


class Telemetry:
    """All of one server."""

    def __init__(self, expected_instances: int, started_s: int) -> None:
        """`started_s`: seconds since 1970."""
        self._constants = (
            ("epd_start_time_seconds", started_s, "of the gateway, since 1970"),
            ("epd_instances_expected", expected_instances, "that the cluster has at least"),
        )
        self._responses: Counter[tuple[str, int]] = Counter()
        self._num_images = 0
        self._body = Histogram(
            "epd_body_seconds", "from a request's head to the end of its body", SECONDS
        )
        self._first_token = Histogram(
            "epd_time_to_first_token_seconds", "from a request's head to its first token", SECONDS
        )
        self._whole = Histogram(
            "epd_completion_seconds", "from a request's head to the end of its answer", SECONDS
        )
        self._prompt = Histogram(
            "epd_prompt_tokens", "tokens of a prompt, rows of images included", TOKENS
        )

    def body_read(self, age_s: float) -> None:
        self._body.observe(age_s)

    def prompt_prepared(self, num_tokens: int, num_images: int) -> None:
        self._prompt.observe(num_tokens)
        self._num_images += num_images

    def first_token(self, age_s: float) -> None:
        self._first_token.observe(age_s)

    def answered(self, age_s: float) -> None:
        """A completion was answered in full."""
        self._whole.observe(age_s)

    def responded(self, path: str, status: int) -> None:
        """`status` 0: the client left before there was one."""
        self._responses[path, status] += 1

    def samples(self) -> Iterator[Metric]:
        for (path, status), count in sorted(self._responses.items()):
            labels = (("path", path), ("status", str(status) if status else "none"))
            text = "responses by status; none: the client left first"
            yield Metric("epd_http_responses_total", count, labels, "counter", text)
        for name, value, text in self._constants:
            yield Metric(name, value, (), "gauge", text)
        text = "images of prepared prompts"
        yield Metric("epd_prompt_images_total", self._num_images, (), "counter", text)
        for one in (self._body, self._first_token, self._whole, self._prompt):
            yield from one.samples()
