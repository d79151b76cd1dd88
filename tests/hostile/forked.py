"""What may end its process is done in another one."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def forked(work: Callable[[], str]) -> str:
    """What `work` returns in a copy of this process; "wrong: …" if it raises or the copy ends."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            text = work()
        except BaseException:
            text = f"wrong: {traceback.format_exc()}"
        os.write(writes, text.encode("utf-8", "backslashreplace")[:60_000])
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as told:
        text = told.read().decode()
    _, status = os.waitpid(pid, 0)
    return text or f"wrong: the process ended with {os.waitstatus_to_exitcode(status)}"
