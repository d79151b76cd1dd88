"""The one error boundary of the command line: an error is a sentence and an exit status.

Errors of our own types were written for the reader and are printed as they are. Anything else is a
bug of ours: it is named, with its place, and the traceback is one environment variable away."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable

from epd.errors import FAILED, INTERRUPTED, OK, Told, explain


class CommandFailed(Told):
    """A verb could not do its work; the text has the reason and the remedy."""


def guarded(work: Callable[[], int]) -> int:
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
    if os.environ.get("EPD_TRACEBACK"):
        traceback.print_exception(error)
    status, sentence = explain(error)
    with contextlib.suppress(OSError):  # nobody reads it; the exit status says it, too
        print(f"epd: {sentence}", file=sys.stderr)
    return status


def _only_one(error: BaseException) -> BaseException:
    """A group of one error is that error."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
