"""Films that a GPU decodes: a stand-in for it gives what NVDEC gives, interleaved samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import av
import pytest

from epd.engine.vision import film_device, video_file
from epd.engine.vision.film_device import FilmDevice, decoder_nbytes
from epd.engine.vision.video_file import decode_clip
from epd.errors import MediaError
from epd.media_files.container import container_of, open_container
from epd.messages import Clip
from tests.media_files.videos import film

MAX_PIXELS = 1_000_000
FRAMES = (0, 3, 3, 9, 20)
KINDS: dict[str, dict[str, Any]] = {
    "h264": {},
    "h264, all samples of a byte": {"pix_fmt": "yuvj420p"},
    "h264, on its side": {"rotation": 90},
    "hevc": {"codec": "libx265"},
    "hevc, 10 bits": {"codec": "libx265", "pix_fmt": "yuv420p10le"},
    "vp9": {"container": "webm"},
}
INTERLEAVED = {"yuv420p": "nv12", "yuvj420p": "nv12", "yuv420p10le": "p010le"}


class Driver:
    """Of a GPU without memory: each call succeeds, and is noted."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: self.calls.append(name) or 0  # type: ignore[func-returns-value]


def device_of(nbytes: int = 1 << 30) -> tuple[FilmDevice, Driver]:
    driver = Driver()
    return FilmDevice(99, nbytes, lambda name: driver), driver


class Kept:
    """A picture on the device: what a decoder of the CPU gave, in the GPU's format."""

    is_corrupt = False

    def __init__(self, frame: Any) -> None:
        self._frame = frame
        self.sw_format = SimpleNamespace(name=INTERLEAVED[frame.format.name])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._frame, name)

    def reformat(self, **to: str) -> Any:
        return self._frame.reformat(format=self.sw_format.name).reformat(**to)


class StandIn:
    """In place of FFmpeg with a GPU: opens for the CPU, and gives pictures that are kept."""

    def __init__(self, fails_after: int = 1000) -> None:
        self.num_kept, self._left = 0, fails_after
        self._kept: list[Any] = []  # containers; held, so that none has another's id
        self._apart, self._in_order = video_file._apart, video_file._in_order

    def open(self, data: Any, name: str, most: int, timeout_s: float, hwaccel: Any = None) -> Any:
        found = open_container(data, name, most, timeout_s)
        if hwaccel is not None:
            self._kept.append(found[0])
        return found

    def apart(self, container: Any, *asked: Any) -> Iterator[Any]:
        return self._pictures(container, self._apart(container, *asked))

    def in_order(self, container: Any, *asked: Any) -> Iterator[Any]:
        return self._pictures(container, self._in_order(container, *asked))

    def _pictures(self, container: Any, frames: Iterator[Any]) -> Iterator[Any]:
        for frame in frames:
            if not any(container is one for one in self._kept):
                yield frame
                continue
            if not self._left:
                raise OSError("the device is gone")
            self._left -= 1
            self.num_kept += 1
            yield Kept(frame)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> StandIn:
    found = StandIn(getattr(request, "param", 1000))
    monkeypatch.setattr(video_file, "open_container", found.open)
    monkeypatch.setattr(video_file, "_apart", found.apart)
    monkeypatch.setattr(video_file, "_in_order", found.in_order)
    return found


def decoded(data: bytes, device: FilmDevice | None = None, side: int = 96) -> Any:
    clip = Clip(container=container_of(data), frames=FRAMES)
    return decode_clip(data, clip, side, 130, MAX_PIXELS, device)


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_those_of_the_cpu(kind: str, stand_in: StandIn) -> None:
    """To the bit; sides are no multiples of what decoders round to."""
    data = film(5, 24, 130, 98, **KINDS[kind])
    device, driver = device_of()
    found = decoded(data, device)
    assert stand_in.num_kept == len(FRAMES)
    assert (found == decoded(data)).all()
    assert driver.calls[:4] == ["cuInit", "cuDeviceGet", "cuCtxCreate_v2", "cuCtxPopCurrent_v2"]
    assert driver.calls[4:] == ["cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"]


@pytest.mark.parametrize("stand_in", [0, 1, 3], indirect=True)
@pytest.mark.parametrize("kind", ["h264", "hevc"])
def test_where_the_device_fails_the_cpu_goes_on(
    kind: str, stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    data = film(5, 24, 130, 98, **KINDS[kind])
    assert (decoded(data, device_of()[0]) == decoded(data)).all()
    (line,) = caplog.messages
    assert "decoded by the CPU" in line
    assert "the device is gone" in line


def test_an_interlaced_film_is_the_cpus(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"codec": "libx265", "x265-params": "interlace=tff:log-level=none"}
    data = film(5, 24, 130, 98, **fields)
    assert (decoded(data, device_of()[0]) == decoded(data)).all()
    assert stand_in.num_kept == 1
    assert "it is interlaced" in caplog.messages[0]


def test_without_a_gpu_ffmpeg_refuses_and_the_cpu_decodes(caplog: pytest.LogCaptureFixture) -> None:
    """FFmpeg itself is asked, for a device that no machine has."""
    data = film(5, 24, 130, 98)
    device, _ = device_of()
    assert (decoded(data, device) == decoded(data)).all()
    assert len(caplog.messages) == 1
    with pytest.raises(MediaError, match="has no frame"):
        decode_clip(data, Clip(container="mp4", frames=(99,)), 96, 130, MAX_PIXELS, device)
    assert len(caplog.messages) == 1, "a film's own fault is none of the device"


def codec_of(data: bytes) -> Any:
    container, _ = open_container(data, container_of(data), MAX_PIXELS, 60.0)
    return container.streams.video[0].codec_context


def test_memory_is_counted_and_given_back() -> None:
    codec = codec_of(film(5, 24, 130, 98))
    nbytes = decoder_nbytes(codec)
    assert film_device.BASE_NBYTES < nbytes < film_device.BASE_NBYTES + (2 << 20)
    device, _ = device_of(3 * nbytes - 1)
    for _ in range(3):  # a film that failed holds nothing
        with ExitStack() as stack, pytest.raises(ZeroDivisionError):
            rooms = [stack.enter_context(device.room(codec)) for _ in range(3)]
            assert [room is None for room in rooms] == [False, False, True]
            raise ZeroDivisionError
    deep = codec_of(film(5, 24, 130, 98, codec="libx265", pix_fmt="yuv420p10le"))
    assert decoder_nbytes(deep) > nbytes, "10 bits take two bytes"


@pytest.mark.parametrize("options", [{"container": "avi"}, {"pix_fmt": "yuv444p"}], ids=str)
def test_what_no_standard_defines_to_the_bit_or_no_gpu_has_is_the_cpus(
    options: dict[str, str], stand_in: StandIn
) -> None:
    data = film(5, 24, 130, 98, **options)
    with device_of()[0].room(codec_of(data)) as accel:
        assert accel is None
    decoded(data, device_of()[0])
    assert not stand_in.num_kept


def test_a_missing_library_or_a_driver_that_refuses_leaves_films_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(OSError, match=r"libnvcuvid\.so\.1"):
        FilmDevice(0, 1, missing)
    refusing = SimpleNamespace(cuInit=lambda flags: 100)
    with pytest.raises(OSError, match=r"cuInit .* 100"):
        FilmDevice(0, 1, lambda name: refusing)
    monkeypatch.setattr(av.codec.hwaccel, "hwdevices_available", list)
    with pytest.raises(ImportError, match="without CUDA"):
        FilmDevice(0, 1, lambda name: Driver())
    with caplog.at_level(logging.INFO):
        assert film_device.film_device(SimpleNamespace(index=0), 1) is None  # type: ignore[arg-type]
    assert "films are decoded by the CPU: " in caplog.messages[-1]
