"""Films decoded by NVDEC: frames of the CPU, within the memory that is counted."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from epd.config import EngineConfig
from epd.engine.factory import build_vision
from epd.engine.vision import video_file
from epd.engine.vision.film_device import BASE_NBYTES, FilmDevice, decoder_nbytes
from epd.engine.vision.video_file import decode_clip
from epd.media_files.container import container_of, open_container
from epd.media_files.video import video_geometry, video_settings
from epd.messages import Clip
from epd.model_files.checkpoint import read_checkpoint
from epd.tiny import CHECKPOINT
from tests.media_files.videos import film

MAX_PIXELS = 10_000_000
WIDTH, HEIGHT = 322, 242
FRAMES = (0, 3, 3, 9, 20, 44)
KINDS: dict[str, dict[str, Any]] = {
    "h264": {},
    "h264, all samples of a byte": {"pix_fmt": "yuvj420p"},
    "h264, on its side": {"rotation": 90},
    "h264, many references": {"refs": "16", "bf": "5", "x264-params": "b-pyramid=normal"},
    "hevc": {"codec": "libx265"},
    "hevc, interlaced": {"codec": "libx265", "x265-params": "interlace=tff:log-level=error"},
    "hevc, 10 bits": {"codec": "libx265", "pix_fmt": "yuv420p10le"},
    "vp9": {"container": "webm"},
}


@pytest.fixture(scope="module")
def device(cuda: str) -> Iterator[FilmDevice]:
    torch.zeros(1, device=cuda)
    try:
        yield FilmDevice(0, 1 << 30)
    except OSError as error:
        pytest.skip(f"no NVDEC: {error}")


@pytest.fixture(autouse=True)
def brought_down(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of each frame, its format on the device; empty: it was the CPU's."""
    found: list[str] = []
    usual = video_file.brought_down

    def noted(frame: Any) -> Any:
        found.append(frame.sw_format.name if frame.sw_format else "")
        return usual(frame)

    monkeypatch.setattr(video_file, "brought_down", noted)
    return found


def decoded(data: bytes, device: FilmDevice | None = None) -> Any:
    clip = Clip(container=container_of(data), frames=FRAMES)
    return decode_clip(data, clip, 224, 308, MAX_PIXELS, device)


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_those_of_the_cpu(
    kind: str, device: FilmDevice, brought_down: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    data = film(5, 48, WIDTH, HEIGHT, **KINDS[kind])
    found = decoded(data, device)
    formats = {*brought_down}
    assert (found == decoded(data)).all()
    if "interlaced" in kind:
        assert "" in formats and "it is interlaced" in caplog.messages[0]
        return
    assert not caplog.messages
    assert formats == {"p010le" if "10 bits" in kind else "nv12"}


async def test_an_encoder_makes_the_same_pixels(
    device: FilmDevice, brought_down: list[str]
) -> None:
    config = EngineConfig(device="cuda:0", threads=1, cuda_graphs=False)
    vision = build_vision(CHECKPOINT, config, max_batch_patches=512)
    checkpoint = read_checkpoint(CHECKPOINT)
    settings = video_settings(checkpoint.config, checkpoint.video_preprocessor)
    assert settings is not None
    grid_thw = video_geometry(settings, len(FRAMES), WIDTH, HEIGHT).grid_thw
    asked = film(5, 48, WIDTH, HEIGHT), grid_thw, Clip(container="mp4", frames=FRAMES)
    by_cpu = await vision.preprocess(*asked)
    assert not vision.films_nbytes and {*brought_down} == {""}
    vision.take_films(1 << 30)
    assert vision.films_nbytes == 1 << 30
    brought_down.clear()
    assert torch.equal((await vision.preprocess(*asked)).pixels, by_cpu.pixels)
    assert {*brought_down} == {"nv12"}


def test_films_at_once_and_beside_steps_are_the_same(device: FilmDevice) -> None:
    """Each thread of an encoder has a film; the model's kernels run on the default stream."""
    data = film(5, 48, WIDTH, HEIGHT)
    expected = decoded(data)
    wrong: list[int] = []

    def many() -> None:
        wrong.extend(i for i in range(6) if not (decoded(data, device) == expected).all())

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    a = torch.eye(4096, device="cuda", dtype=torch.bfloat16)
    b = torch.arange(4096.0, device="cuda", dtype=torch.bfloat16).expand(4096, -1).contiguous()
    while any(thread.is_alive() for thread in threads):
        b = a @ b
    assert not wrong
    assert (b[0] == torch.arange(4096.0, device="cuda", dtype=torch.bfloat16)).all()


def test_a_damaged_film_ends_alone(device: FilmDevice) -> None:
    data = film(5, 48, WIDTH, HEIGHT)
    whole = decoded(data)
    broken = bytearray(data)
    for at in range(len(data) // 4, len(data) // 2, 397):
        broken[at] ^= 0x55
    shape = decoded(bytes(broken), device).shape  # concealed, by the one or the other
    assert shape == whole.shape
    assert (decoded(data, device) == whole).all()
    assert float(torch.ones(8, device="cuda").sum()) == 8.0


@pytest.mark.whole_gpu
@pytest.mark.parametrize("options", [{}, {"refs": "16", "bf": "5"}, {"codec": "libx265"}], ids=str)
def test_a_decoder_takes_no_more_memory_than_is_counted(
    options: dict[str, str], device: FilmDevice
) -> None:
    """Two are in the midst of a film; what they took is free behind them."""
    data = film(5, 48, 1920, 1080, **options)
    container, _ = open_container(data, "mp4", MAX_PIXELS, 60.0)
    counted = decoder_nbytes(container.streams.video[0].codec_context)
    clip = Clip(container="mp4", frames=tuple(range(48)))
    list(video_file._film(data, clip, MAX_PIXELS, device))  # what only a first one takes
    gc.collect()
    before = torch.cuda.mem_get_info()[0]
    films = [video_file._film(data, clip, MAX_PIXELS, device) for _ in range(2)]
    for one in films:
        for _ in range(30):
            next(one)
    taken = (before - torch.cuda.mem_get_info()[0]) / len(films)
    for one in films:
        one.close()
    gc.collect()
    print(f"{options}: {taken / 2**20:.0f} MiB of {counted >> 20} a decoder")
    assert 0 < taken <= counted
    assert torch.cuda.mem_get_info()[0] >= before - BASE_NBYTES
