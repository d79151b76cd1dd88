"""Who keeps a vLLM server: the supervisor keeps this process, by the rule of all its children.

The server is of a process group of its own.  It serves when `/health` does, is killed when that has
been silent for long, has time to drain at SIGTERM, and nothing of its group is left when this
process ends; killed, this process takes it along by the kernel's signal.  What the server prints
goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
from functools import partial

import aiohttp

from epd.runtime.program import ServerCommand
from epd.runtime.system import die_with_parent
from epd.runtime.worker import Ending, Status

LOOK_S = 0.5
ANSWER_S = 5.0
SILENT_S = 60.0  # of one that served: it hangs
STOP_S = 20.0  # it has 10 to drain, and some to end
STDERR = 2


async def keep(server: ServerCommand, ending: Ending, status: Status) -> int:
    """Until it has ended, or is asked to end; returns the exit status."""
    status("loading", "")
    process = await asyncio.create_subprocess_exec(
        *server.words,
        env=os.environ | server.environment,
        stdin=subprocess.DEVNULL,
        stdout=STDERR,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, signal.SIGTERM),
    )
    ended = asyncio.ensure_future(process.wait())
    others = [asyncio.ensure_future(ending.drain.wait()), asyncio.ensure_future(ending.now.wait())]
    looking = asyncio.ensure_future(_look(server.url, status))
    try:
        await asyncio.wait((ended, looking, others[0]), return_when=asyncio.FIRST_COMPLETED)
        if others[0].done() and not ended.done():
            status("draining", "")
            process.terminate()
            wanted = ended, others[1]
            await asyncio.wait(wanted, timeout=STOP_S, return_when=asyncio.FIRST_COMPLETED)
            return ending.exit_status
    finally:
        for waiting in (looking, *others):
            waiting.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its engine, too
        await ended
    # Behind the kill: with this status the supervisor may end this process.
    why = f"vLLM has ended with exit status {ended.result()}: it printed the reason"
    if looking.done() and not looking.cancelled():
        why = f"vLLM has not answered {server.url}/health for {SILENT_S:.0f} s, and was killed"
    status("failed", why)
    return 1


async def _look(url: str, status: Status) -> None:
    """Until it hangs: it has answered once, and then nothing for long."""
    now_s, last_s = asyncio.get_running_loop().time, math.inf
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while now_s() - last_s < SILENT_S:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        if last_s == math.inf:
                            status("serving", url)
                        last_s = now_s()
            await asyncio.sleep(LOOK_S if last_s == math.inf else ANSWER_S)
