"""Names at the top of a body that no API here has: refused by name, or left out.

Under `--unknown-parameters warn` a gateway serves clients that send hints to other servers.  Then
the response names what was left out, in a header, and a counter counts it.  What any API here has
stays where it is, so that its own reader takes or refuses it: leaving it out would change the
answer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from epd.frontend import JsonObject, Metric

HEADER = b"x-epd-ignored-parameters"
MAX_NAMES = 16  # that the header shows; of the others it has the number
MAX_CHARS = 64  # of each
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")  # in a header that a client's own text goes into


class Unknown:
    """What one gateway does with them."""

    def __init__(self, known: Collection[str] | None = None) -> None:
        """`known`: what the top of some body may have; None: nothing is left out."""
        self._known = known
        self._num_ignored = 0

    def leave_out(self, body: JsonObject) -> list[str]:
        """Take them out of a body, perhaps on a thread; which these were."""
        if self._known is None:
            return []
        names = [name for name in body if name not in self._known]
        return [name for name in names if body.pop(name) is not None]  # null is absence

    def told(self, names: Sequence[str]) -> bytes:
        """The value of the header; counts them."""
        self._num_ignored += len(names)
        shown = [_UNSAFE.sub("?", name[:MAX_CHARS]) or "?" for name in names[:MAX_NAMES]]
        if len(names) > MAX_NAMES:
            shown.append(f"and {len(names) - MAX_NAMES} more")
        return ", ".join(shown).encode()

    def sample(self) -> Metric:
        """For /metrics."""
        text = "parameters that no API here has, left out (--unknown-parameters warn)"
        return Metric("epd_ignored_parameters_total", self._num_ignored, (), "counter", text)
