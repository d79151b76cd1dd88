"""Errors for the reader: a text for a person, and an exit status for a program."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
_OUT_OF_MEMORY = "out of memory"


class Told(Exception):
    """Its text was written for the reader: what is wrong, and the remedy."""

    exit_status: ClassVar[int] = FAILED


class MediaError(Told):
    """An image or video cannot be used (truncated, too big); the text is for the client."""


def is_of_this_host(error: BaseException) -> bool:
    """Whether no file could be opened, or no module loaded, whatever a client has sent."""
    return isinstance(error, ImportError) or (
        isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    )


@contextmanager
def refusing(text: str) -> Iterator[None]:
    """Around a decoder: any error of it is a MediaError with this text, but those of this host."""
    try:
        yield
    except MediaError:
        raise
    except Exception as error:  # of hostile or damaged data decoders raise many types
        if is_of_this_host(error):
            raise
        raise MediaError(text) from error


def explain(error: BaseException) -> tuple[int, str]:
    """Exit status and sentence of an error; any but `Told` is a bug of ours, with its place."""
    if isinstance(error, Told):
        return error.exit_status, str(error)
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("epd"):
        return FAILED, (
            f"the package {error.name} is not installed; epd doctor tells what is missing and how "
            "to install it"
        )
    if isinstance(error, OSError) and error.filename is not None:
        return FAILED, f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return FAILED, "a disk that this writes to is full; make room there"
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY in str(error):  # torch's, or NCCL's
        lines = str(error).splitlines() or [type(error).__name__]
        what = next((line for line in lines if _OUT_OF_MEMORY in line), lines[0])
        return FAILED, (
            f"the memory is not enough ({what}); use a smaller model, fewer bits for each weight "
            "(--quantization fp8), more devices for it (--tensor-parallel-size) or fewer instances "
            "on each, or lower --kv-nbytes, engine.max_step_tokens or encode.max_batch_patches"
        )
    return FAILED, (
        f"internal error, please report it: {type(error).__name__}: {error} "
        f"({_place(error)}; EPD_TRACEBACK=1 shows the way there)"
    )


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "no place"
