"""The one error boundary of the command line: an error is a sentence and an exit status.

Errors of known types were written for the reader and are printed as they are. Anything else is a
bug of ours: it is named, with its place, and the traceback is one environment variable away.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from epd.cli.parser import UsageError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class CommandFailed(Exception):
    """A verb could not do its work; the text says what and the remedy."""


def guarded(work: Callable[[], int]) -> int:
    """Run it; whatever happens becomes an exit status."""
    try:
        return work()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `epd doctor | head`; Python would complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except SystemExit as leaving:  # argparse's --help
        return leaving.code if isinstance(leaving.code, int) else OK
    except Exception as error:
        return report(_only_one(error))


def report(error: BaseException) -> int:
    """Print an error on stderr; returns its exit status."""
    if os.environ.get("EPD_TRACEBACK"):
        traceback.print_exception(error)
    status, sentence = explain(error)
    print(f"epd: {sentence}", file=sys.stderr)
    return status


def explain(error: BaseException) -> tuple[int, str]:
    """Exit status and sentence of an error."""
    if isinstance(error, UsageError):
        return USAGE, str(error)
    if isinstance(error, CommandFailed):
        return FAILED, str(error)
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("epd"):
        return FAILED, (
            f"the package {error.name} is not installed; epd doctor tells what is missing and how "
            "to install it"
        )
    if isinstance(error, OSError) and error.filename is not None:
        return FAILED, f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return FAILED, (
            f"the memory is not enough ({first_line}); use a smaller model or fewer instances on "
            "this device, or lower --kv-nbytes or engine.max_step_tokens"
        )
    known = _statuses()
    for kind in type(error).__mro__:
        if kind in known:
            return known[kind], str(error)
    return FAILED, (
        f"internal error, please report it: {type(error).__name__}: {error} "
        f"({_place(error)}; EPD_TRACEBACK=1 shows the way there)"
    )


def _statuses() -> dict[type, int]:
    """Errors whose text was written for the reader. Imported only when there is an error."""
    from epd.bench.openai_load import ServerError
    from epd.config import ConfigError
    from epd.engine.base import EngineError, MediaError
    from epd.engine.checkpoint import ModelError
    from epd.runtime.supervisor import StartFailed
    from epd.transport.base import TransportError

    return {
        ConfigError: USAGE,
        EngineError: FAILED,
        ServerError: FAILED,
        MediaError: FAILED,
        ModelError: FAILED,
        StartFailed: FAILED,
        TransportError: FAILED,
    }


def _only_one(error: BaseException) -> BaseException:
    """A group of one error is that error."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "no place"
