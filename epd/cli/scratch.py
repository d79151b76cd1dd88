"""A temporary directory of a verb that Ctrl-C may end at once (`epd.cli.main.run`)."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from epd.errors import INTERRUPTED


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """Of the main thread.  Ctrl-C removes it ahead of the process's end; an event loop that takes
    the signal itself leaves it to the end of the block."""
    with tempfile.TemporaryDirectory(prefix=prefix) as directory:
        owner = os.getpid()

        def end(number: int, frame: object) -> None:
            if os.getpid() == owner:  # a fork of it has the handler, too
                shutil.rmtree(directory, ignore_errors=True)
            os._exit(INTERRUPTED)

        before = signal.signal(signal.SIGINT, end)
        try:
            yield Path(directory)
        finally:
            signal.signal(signal.SIGINT, before)
