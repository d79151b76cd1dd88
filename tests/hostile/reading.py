"""Reads hostile files as gateway and encoder do, and measures what each took.

`python -m tests.hostile.reading FORM FIRST COUNT` is a process of its own, since memory is that of
a process; one line of JSON says what it found.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.hostile.headers import FILMS, bases, hostile

REFUSED_NBYTES = 256 << 20
PIXEL_NBYTES = 12
OVERHEAD_NBYTES = 64 << 20  # code and tables of a library that is used for the first time
MOST_S = 5.0
MAX_SIDE_FRAMES = 8


@dataclasses.dataclass
class Found:
    """Of some files of one form."""

    outcomes: dict[str, int]
    faults: list[str]  # each names a seed
    most_nbytes: int = 0
    most_s: float = 0.0


def read_apart(form: str, first: int, count: int, timeout_s: float = 600.0) -> Found:
    """In a process of its own."""
    command = [sys.executable, "-m", "tests.hostile.reading", form, str(first), str(count)]
    done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    if done.returncode:
        return Found({}, [f"{form}: it ended with {done.returncode}: {done.stderr[-2000:]!r}"])
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def read_one(form: str, data: bytes) -> tuple[str, int]:
    """How it ended, and the pixels that were admitted.  Raises what is no refusal."""
    from epd.api.http.errors import ApiError
    from epd.api.prompts.film import read_film
    from epd.api.prompts.image_size import read_size
    from epd.config import Limits
    from epd.engine.vision.image_ops import rgb_bytes
    from epd.engine.vision.image_pixels import decode_image
    from epd.engine.vision.video_file import decode_clip
    from epd.errors import MediaError
    from epd.messages import Clip

    num_pixels = 0
    try:
        if form in FILMS:
            film = read_film(data, Limits(), "x")
            num_pixels = film.num_frames * film.width * film.height
            frames = tuple(range(min(film.num_frames, MAX_SIDE_FRAMES)))
            decode_clip(data, Clip(container=film.container, frames=frames), 28, 28, 64_000_000)
        else:
            width, height = read_size(data, Limits(), "x")
            num_pixels = width * height
            rgb_bytes(decode_image(data))
    except ApiError as error:
        assert error.status == 400
        return "gateway refused", 0
    except MediaError:
        return "encoder refused", num_pixels
    return "read", num_pixels


def _memory_nbytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise LookupError(name)


def memory_begins() -> int:
    """What there is now; the peak begins anew."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is no room for the next one
    Path("/proc/self/clear_refs").write_text("5")
    return _memory_nbytes("VmRSS")


def memory_peak_nbytes(before: int) -> int:
    """The most that there was since `memory_begins`, beyond what there was then."""
    return _memory_nbytes("VmHWM") - before


def read_many(form: str, first: int, count: int) -> Found:
    """The peak of each is measured, from what there was before it."""
    found = Found({}, [])
    outcomes: Counter[str] = Counter()
    for data in bases(form):  # libraries are loaded
        read_one(form, data)
    for seed in range(first, first + count):
        data = hostile(form, seed)
        before, began_s = memory_begins(), time.thread_time()
        try:
            outcome, num_pixels = read_one(form, data)
        except Exception as error:
            found.faults.append(f"{form} {seed}: {type(error).__name__}: {error}")
            continue
        took_s = time.thread_time() - began_s
        nbytes = memory_peak_nbytes(before)
        outcomes[outcome] += 1
        found.most_nbytes, found.most_s = max(found.most_nbytes, nbytes), max(found.most_s, took_s)
        allowed = OVERHEAD_NBYTES + PIXEL_NBYTES * num_pixels if num_pixels else REFUSED_NBYTES
        if outcome == "encoder refused":
            allowed = max(allowed, REFUSED_NBYTES)
        if nbytes > allowed or took_s > MOST_S:
            found.faults.append(
                f"{form} {seed}: {outcome}: {nbytes >> 20} MiB, {num_pixels} pixels, {took_s:.1f} s"
            )
    found.outcomes = dict(outcomes)
    return found


def main() -> None:
    form, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    result: dict[str, Any] = dataclasses.asdict(read_many(form, first, count))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
