"""The processes, files and ports behind a column, for the rows that need more than its URL."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Skipped(Exception):
    """A row cannot be measured here; the text is why."""


class TruthCluster:
    """Of a server that was started elsewhere: what a row cannot do raises Skipped."""

    def ready(self, setup: str) -> None:
        """All of it serves, whatever the last row did.  `setup`: of a row (table.py)."""

    def victims(self, role: str) -> Sequence[Callable[[], None]]:
        """Those with that role; a call is kill -9."""
        raise Skipped("its processes were not started here")

    def metrics_urls(self) -> Sequence[str]:
        """Those that show what is in use; none: the column's own."""
        return ()

    def close(self) -> None:
        """No process and no file of it stays."""
