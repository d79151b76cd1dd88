"""Films on the decoders of a GPU (NVDEC), by PyAV's own FFmpeg.

Theory of operation
-------------------
FFmpeg reads a film as for a CPU, and the GPU makes the pictures.  Those of `CODECS` are defined to
the bit, so they are the same.  They stay on the device; those of the clip come down.

FFmpeg queues its copies on the null stream of a CUDA context.  In torch's own that is where steps
run: a picture would wait for a step, with the interpreter locked.  So the decoders share one
further context.  It is made at start, before the memory of the device is shared out.

A decoder takes memory by the size of its pictures.  `room` counts it, and the plan of the device
leaves so much free.  A film that finds no room, or another format, is the CPU's.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from av import VideoCodecContext, VideoFrame
    from av.codec.hwaccel import HWAccel

logger = logging.getLogger(__name__)
CODECS = ("h264", "hevc", "vp8", "vp9")
SAMPLE_NBYTES = {"yuv420p": 1, "yuvj420p": 1, "yuv420p10le": 2}  # by format
NUM_PICTURES = 36  # of a decoder: those that others refer to, and those on their way
BASE_NBYTES = 64 << 20  # of a decoder besides
_BLOCKING_SYNC = 4  # who waits for the device sleeps


class FilmDevice:
    """The decoders of one GPU; from any thread."""

    def __init__(
        self, index: int, nbytes: int, load: Callable[[str], object] = ctypes.CDLL
    ) -> None:
        """Makes a CUDA context.  Raises OSError and ImportError, with the reason."""
        from av.codec.hwaccel import hwdevices_available

        self._index, self.nbytes, self._free_nbytes = index, nbytes, nbytes
        self._lock = threading.Lock()
        self._context = ctypes.c_void_p()
        if "cuda" not in hwdevices_available():
            raise ImportError("the package av was built without CUDA")
        load("libnvcuvid.so.1")  # which FFmpeg loads by this name
        self._driver = load("libcuda.so.1")
        device = ctypes.c_int()
        self._ask("cuInit", 0)
        self._ask("cuDeviceGet", ctypes.byref(device), index)
        self._ask("cuCtxCreate_v2", ctypes.byref(self._context), _BLOCKING_SYNC, device)
        self._ask("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    @contextmanager
    def room(self, codec: VideoCodecContext) -> Iterator[HWAccel | None]:
        """For `av.open` in `opening`, of films of this kind; its memory is counted meanwhile.
        None: the CPU decodes them."""
        nbytes = decoder_nbytes(codec)
        with self._lock:
            fits = 0 < nbytes <= self._free_nbytes
            self._free_nbytes -= nbytes * fits
        try:
            yield self._accel() if fits else None
        finally:
            with self._lock:
                self._free_nbytes += nbytes * fits

    def _accel(self) -> HWAccel:
        from av.codec.hwaccel import HWAccel

        shared: dict[str, object] = {"primary_ctx": "0", "current_ctx": "1"}
        return HWAccel("cuda", str(self._index), options=shared, is_hw_owned=True)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """The context is the thread's current one, which FFmpeg takes and does not end."""
        self._ask("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._ask("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _ask(self, call: str, *arguments: object) -> None:
        if error := getattr(self._driver, call)(*arguments):
            raise OSError(f"{call} of NVIDIA's driver gives error {error}")


def decoder_nbytes(codec: VideoCodecContext) -> int:
    """Of the device's memory, at most; 0: it has no decoder for films of this kind."""
    sample_nbytes = SAMPLE_NBYTES.get(codec.pix_fmt or "", 0)
    if codec.name not in CODECS or not sample_nbytes:
        return 0
    return BASE_NBYTES + NUM_PICTURES * codec.width * codec.height * 3 // 2 * sample_nbytes


def film_device(device: torch.device, nbytes: int) -> FilmDevice | None:
    """Logs who decodes films."""
    try:
        found = FilmDevice(device.index or 0, nbytes)
    except (ImportError, OSError) as error:
        logger.info("films are decoded by the CPU: %s", error)
        return None
    logger.info("films are decoded by NVDEC of %s, in up to %d MiB", device, nbytes >> 20)
    return found


def brought_down(frame: VideoFrame) -> VideoFrame:
    """In host memory, as the CPU would have decoded it.

    FFmpeg makes colours of interleaved samples of 8 bits (nv12) with other roundings than of
    planes, by up to 31 levels; from the one to the other no bit changes.
    """
    if frame.sw_format is None:  # the CPU's, after all
        return frame
    if frame.is_corrupt:
        raise ValueError("a picture lacks others")
    if frame.interlaced_frame:  # fields of HEVC came with other bits
        raise ValueError("it is interlaced")
    return frame.reformat(format="yuv420p") if frame.sw_format.name == "nv12" else frame
