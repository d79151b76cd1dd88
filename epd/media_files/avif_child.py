"""AVIF in a child that may die: its decoder allocates by the sizes in the stream (F67).

A file of 2 KB whose header announces 64 x 64 pixels may hold a stream of 16,000 x 16,000; libavif
compares the two when all is decoded.  So the pixels of this format come from a process with a limit
of memory, computed from the header that was admitted.  It takes a tenth of a second to start.

`python -m epd.media_files.avif_child IMAGE PIXELS NBYTES` reads the image from one file descriptor
and writes into another: its mode and size as a line, behind it the pixels.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from epd.errors import MediaError, is_of_this_host
from epd.media_files.image_opening import load_pillow, open_image

if TYPE_CHECKING:
    from PIL.Image import Image

Buffer = bytes | memoryview
BASE_NBYTES = 64 << 20  # for the file, and a decoder's threads; beyond what the child has at first
PIXEL_NBYTES = 16
NUM_THREADS = 2
DAMAGED = 65  # a status of the child: its file is bad (EX_DATAERR)
JUDGED = {DAMAGED, *(-number for number in signal.valid_signals())}  # a file can kill a decoder


def decode_avif(data: Buffer, width: int, height: int, timeout_s: float) -> Image:
    """The pixels of an AVIF as an image of Pillow, as it is stored.  Raises MediaError,
    and OSError or SubprocessError of this host."""
    source, target = os.memfd_create("image"), os.memfd_create("pixels")
    with open(source, "wb") as image, open(target, "rb") as pixels:
        image.write(data)
        image.flush()
        nbytes = BASE_NBYTES + PIXEL_NBYTES * width * height
        command = [sys.executable, "-m", __name__, str(source), str(target), str(nbytes)]
        try:
            subprocess.run(
                command,
                pass_fds=(source, target),
                timeout=timeout_s,
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"MALLOC_ARENA_MAX": "1"},  # each takes address space
            )
            pixels.seek(0)
            mode, *size = pixels.readline().decode().split()
            if [*map(int, size)] != [width, height]:
                raise ValueError(size)
            found = load_pillow().frombytes(mode, (width, height), pixels.read())
        except (ValueError, subprocess.SubprocessError) as error:
            if getattr(error, "returncode", DAMAGED) not in JUDGED:
                raise
            raise MediaError("the image is damaged; send the whole file") from error
    return found


def main() -> None:
    load_pillow()
    from PIL import AvifImagePlugin

    source, target, nbytes = map(int, sys.argv[1:])
    AvifImagePlugin.DEFAULT_MAX_THREADS = NUM_THREADS
    with open("/proc/self/statm") as pages:
        nbytes += int(pages.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
    with open(source, "rb") as file, open(target, "wb") as pixels:
        file.seek(0)
        try:
            image = open_image(file.read(), 60.0)
            pixels.write(f"{image.mode} {image.width} {image.height}\n".encode())
            pixels.write(image.tobytes())
        except Exception as error:
            sys.exit(1 if is_of_this_host(error) else DAMAGED)


if __name__ == "__main__":
    main()
