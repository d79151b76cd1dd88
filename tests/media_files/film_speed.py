"""What a film of 10 s in 1080p costs an encoder: films per second and CPU seconds for each.

`python -m tests.media_files.film_speed [--out FILE] [--times N]` encodes two films by x264, one
with frames that nothing refers to, and takes two frames a second of each, as for Qwen3-VL.  Rows:
all frames decoded, and those alone that the clip depends on, by FFmpeg's kinds and counts of
threads.  Where the driver has NVDEC, it decodes the same two ways, in a context beside torch's as
an encoder does, in torch's own, and by PyNvVideoCodec, if installed.  Each is the median of films
one after the other; `worst` is the largest difference of a sample from the first row's frames.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from epd.engine.vision import video_file
from epd.engine.vision.film_device import FilmDevice
from epd.engine.vision.video_file import decode_clip
from epd.media_files.container import open_container
from epd.media_files.video import Sampling, sample_frames, video_geometry, video_settings
from epd.messages import Clip
from epd_lab.bench.machine import describe, gpus
from tests.media_files.videos import film

WIDTH, HEIGHT, RATE, SECONDS = 1920, 1080, 30, 10
FILMS = {"3 frames between": {}, "none between": {"bf": "0"}}  # type: dict[str, dict[str, str]]
THREADS = (("NONE", 1), ("SLICE", 2), ("FRAME", 2), ("FRAME", 4), ("FRAME", 8))
MAX_PIXELS = 64_000_000
SETTINGS: dict[str, Any] = {
    "size": {"shortest_edge": 4096, "longest_edge": 25_165_824},
    "patch_size": 16,
}


def clip_of() -> tuple[Clip, int, int]:
    """The clip, and height and width of its frames."""
    settings = video_settings({"model_type": "qwen3_vl", "video_token_id": 1}, SETTINGS)
    assert settings is not None
    frames = sample_frames(settings, RATE * SECONDS, float(RATE), Sampling(), 768)
    _, rows, columns = video_geometry(settings, len(frames), WIDTH, HEIGHT).grid_thw
    return Clip(container="mp4", frames=frames), 16 * rows, 16 * columns


@contextmanager
def decoding(kind: str, count: int, *, whole: bool) -> Iterator[None]:
    """By so many threads of FFmpeg's; `whole`: all frames."""

    def opened(*asked: Any) -> Any:
        container, header = open_container(*asked)
        context = container.streams.video[0].codec_context
        context.thread_type, context.thread_count = kind, count
        context.options = context.options | {"threads": str(count)}
        return container, header

    needed = (lambda *_: None) if whole else video_file.needed_packets
    with (
        mock.patch.object(video_file, "open_container", opened),
        mock.patch.object(video_file, "needed_packets", needed),
    ):
        yield


def timed(decode: Callable[[], Any], times: int) -> tuple[dict[str, float], Any]:
    frames = decode()  # what only a first one takes
    walls, cpus = [], []
    for _ in range(times):
        wall, cpu = time.perf_counter(), time.process_time()
        decode()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    wall_s = statistics.median(walls)
    figures = {"wall_s": wall_s, "films_per_s": 1 / wall_s, "cpu_s": statistics.median(cpus)}
    return {name: round(value, 3) for name, value in figures.items()}, frames


def worst(frames: Any, first: Any) -> int | None:
    """None: they have another shape."""
    if np.shape(frames) != first.shape:
        return None
    return int(np.abs(frames.astype(np.int16) - first).max())


class InTorchsContext(FilmDevice):
    """Where each picture waits for what torch has launched."""

    @contextmanager
    def opening(self) -> Iterator[None]:
        torch.zeros(1, device="cuda")
        yield


def by_nvdec(data: bytes, path: Path, decode: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Names of what there is, and decoders; their errors are rows as well."""

    devices: dict[type[FilmDevice], FilmDevice] = {}

    def pyav(kind: type[FilmDevice], *, whole: bool) -> Any:
        if kind not in devices:
            devices[kind] = kind(0, 1 << 30)
        with decoding("NONE", 1, whole=whole):
            return decode(devices[kind])

    def pynv() -> Any:
        import PyNvVideoCodec

        path.write_bytes(data)
        decoder = PyNvVideoCodec.SimpleDecoder(str(path), use_device_memory=False)
        return [np.array(decoder[index]) for index in clip_of()[0].frames]

    for kind in (FilmDevice, InTorchsContext):
        for whole in (True, False):
            name = f"PyAV, {kind.__name__}, {'all' if whole else 'needed'}"
            yield name, partial(pyav, kind, whole=whole)
    yield "PyNvVideoCodec, frames of the clip alone, not resized", pynv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--times", type=int, default=5)
    asked = parser.parse_args()
    out: Path | None = asked.out
    clip, height, width = clip_of()
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    for name, options in FILMS.items():
        data = film(7, RATE * SECONDS, WIDTH, HEIGHT, RATE, **options)

        def decode(device: FilmDevice | None = None, data: bytes = data) -> Any:
            return decode_clip(data, clip, height, width, MAX_PIXELS, device)

        first: Any = None
        for whole in (True, False):
            for kind, count in THREADS:
                with decoding(kind, count, whole=whole):
                    figures, frames = timed(decode, asked.times)
                first = frames if first is None else first
                row = {"film": name, "decoded": "all" if whole else "needed", "threads": kind}
                add(row | {"num_threads": count, "worst": worst(frames, first), **figures})
        for way, nvdec in by_nvdec(data, Path("/tmp/film_speed.mp4"), decode):
            try:
                figures, frames = timed(nvdec, asked.times)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}: {error.__cause__!r}"
                add({"film": name, "decoded": way, "error": reason})
                continue
            add({"film": name, "decoded": way, "worst": worst(frames, first), **figures})
    if out is not None:
        about = {"machine": describe(), "gpus": gpus(), "frames": [len(clip.frames), height, width]}
        out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
