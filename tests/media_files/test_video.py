"""Frames, sizes, times and patches of videos are those of transformers' own processors."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from epd.engine.adapter import adapter_for
from epd.engine.vision import video_file
from epd.engine.vision.image_ops import QwenImageOps
from epd.engine.vision.preprocess import Preprocessor
from epd.engine.vision.video_file import decode_clip
from epd.errors import MediaError
from epd.media_files.container import container_of, read_header
from epd.media_files.video import (
    Sampling,
    VideoSettings,
    sample_frames,
    second_per_grid,
    video_geometry,
    video_settings,
)
from epd.messages import Clip
from epd.model_files.checkpoint import read_checkpoint
from tests.engine.hf_video import make_processor
from tests.media_files.videos import film, frame, frames_of, packed

MAX_PIXELS = 1_000_000
SMALL: dict[str, Any] = {
    "size": {"shortest_edge": 1024, "longest_edge": 16384},
    "patch_size": 8,
    "merge_size": 2,
}
LARGE: dict[str, Any] = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}}
FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]
GLM = ["glm4v", "glm46v"]
RATES = [1.0, 8.0, 10.0, 24.0, 24000 / 1001, 25.0, 29.97, 30.0, 60.0]


def settings_of(family: str, config: dict[str, Any]) -> VideoSettings:
    vision = {"image_size": 448, "patch_size": 14}
    known = {"model_type": family, "video_token_id": 1, "vision_config": vision}
    found = video_settings(known, config)
    assert found is not None
    return found


def metadata(total: int, rate: float) -> Any:
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_the_same_frames_are_taken(family: str) -> None:
    """By rate and by number; lengths from two frames to an hour.

    Where Qwen2-VL's fp32 steps come close to a whole number, what torch.arange gives depends on the
    processor's vectors: another of two neighbours then, and seldom.
    """
    rng = random.Random(5)
    settings, processor = settings_of(family, {}), make_processor(family, {})
    num_taken = num_other = 0
    for _ in range(600):
        total = rng.choice([rng.randint(2, 60), rng.randint(60, 4000), rng.randint(4000, 108000)])
        rate = rng.choice(RATES)
        fps = rng.choice([0.1, 0.5, 1.0, 2.0, 3.0, 4.0, 7.5, 30.0])
        number = rng.randint(1, min(350, total // 2)) * 2
        for ask in ({"fps": fps}, {"num_frames": number}):
            expected = processor.sample_frames(metadata(total, rate), **ask)
            found = sample_frames(settings, total, rate, Sampling(**ask), 1000)
            off = np.abs(np.array(found) - np.asarray(torch.as_tensor(expected)))
            assert off.max(initial=0) <= (family == "qwen2_vl" and total > 4000), (total, rate, ask)
            num_taken += len(found)
            num_other += int(off.sum())
    assert num_other < num_taken / 1_000


def test_what_the_processors_refuse_is_taken_as_far_as_it_goes() -> None:
    for family in FAMILIES:
        settings = settings_of(family, {})
        assert sample_frames(settings, 1, 25.0, Sampling(), 768) == (0,)
        assert len(sample_frames(settings, 7, 25.0, Sampling(num_frames=50), 768)) in (6, 7)
        assert len(sample_frames(settings, 900, 30.0, Sampling(max_frames=8), 768)) == 8
        assert len(sample_frames(settings, 900, 30.0, Sampling(fps=30.0), 16)) == 16
        assert sample_frames(settings, 5, 30.0, Sampling(every_frame=True), 5) == (0, 1, 2, 3, 4)
        for wanted in (Sampling(num_frames=17), Sampling(every_frame=True)):
            with pytest.raises(MediaError, match="at most 16 are taken"):
                sample_frames(settings, 900, 30.0, wanted, 16)
    two = settings_of("qwen2_5_vl", {})
    assert len(sample_frames(two, 300, 30.0, Sampling(), 768)) == 20  # two frames per second


@pytest.mark.parametrize("config", [{}, SMALL, LARGE, {"cap_pixels_per_frame": True} | SMALL])
@pytest.mark.parametrize("family", [*FAMILIES, *GLM])
def test_the_same_sizes(family: str, config: dict[str, Any]) -> None:
    rng = random.Random(6)
    settings, processor = settings_of(family, config), make_processor(family, config)
    for _ in range(400):
        num_frames = rng.choice([rng.randint(2, 12), rng.randint(2, 768)])
        width, height = rng.randint(8, 2000), rng.randint(8, 2000)
        if max(width, height) > 190 * min(width, height):
            continue
        target = _resize_target(processor, num_frames, width, height)
        found = video_geometry(settings, num_frames, width, height)
        patch = settings.patch_size
        grid = (-(-num_frames // 2), target[0] // patch, target[1] // patch)
        assert found.grid_thw == grid, (num_frames, width, height)
        assert found.num_rows * settings.merge_size**2 == found.num_patches == np.prod(grid)


def _resize_target(processor: Any, num_frames: int, width: int, height: int) -> tuple[int, int]:
    """What the processor's own `resize` asks for, without pixels."""
    from transformers.image_processing_backends import TorchvisionBackend

    asked: list[Any] = []
    original = TorchvisionBackend.resize
    TorchvisionBackend.resize = lambda self, image, size, **_: asked.append(size)
    try:
        processor.resize(
            torch.empty(1, num_frames, 3, height, width, device="meta"),
            size=processor.size,
            resample=3,
            factor=processor.patch_size * processor.merge_size,
            temporal_factor=2,
            cap_pixels_per_frame=getattr(processor, "cap_pixels_per_frame", False),
        )
    finally:
        TorchvisionBackend.resize = original
    return asked[0].height, asked[0].width


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", *GLM])
def test_the_same_patches(family: str) -> None:
    """Odd sizes, odd numbers of frames, every container, images: decoded, resized, cut."""
    settings, processor = settings_of(family, SMALL), make_processor(family, SMALL)
    ops = QwenImageOps(settings)
    cases: list[tuple[Any, Clip]] = [
        (film(1), Clip(container="mp4", frames=(0, 3, 6, 9))),
        (film(2, 9, 100, 38, container="webm"), Clip(container="webm", frames=(0, 4, 8))),
        (film(3, 5, 90, 130, container="matroska"), Clip(container="webm", frames=(1,))),
        (film(4, 7, 40, 40, container="avi"), Clip(container="avi", frames=(0, 1, 2, 3, 4, 5, 6))),
        packed(5, 3, 61, 47),
    ]
    for data, clip in cases:
        if clip.container == "frames":
            frames = np.stack([frame(5, i, 61, 47) for i in clip.frames])
        else:
            frames = frames_of(data, clip.frames)
        expected = processor(
            videos=[frames if len(frames) > 1 else frames.repeat(2, axis=0)],
            video_metadata=[metadata(len(frames), 24.0)],
            do_sample_frames=False,
            return_tensors="pt",
        )
        geometry = video_geometry(settings, len(frames), frames.shape[2], frames.shape[1])
        assert list(geometry.grid_thw) == expected["video_grid_thw"][0].tolist()
        taken = decode_clip(data, clip, *ops.size_of(geometry.grid_thw), MAX_PIXELS)
        found = ops.patches(torch.from_numpy(taken), geometry.grid_thw, torch.float32)
        torch.testing.assert_close(found, expected["pixel_values_videos"], atol=1e-5, rtol=0)
        assert ops.num_rows(geometry.grid_thw) == geometry.num_rows


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_frames_prepared_for_a_device_become_the_same_patches(
    family: str, model_dir: Callable[[str], Path]
) -> None:
    """There the pool ends with resized bytes, and the device does the rest."""
    adapter = adapter_for(read_checkpoint(model_dir(family)))
    here, there = Preprocessor(adapter), Preprocessor(adapter, on_device=True)
    for clip in (
        Clip(container="mp4", frames=(0, 3, 6, 9)),
        Clip(container="mp4", frames=(0, 5, 10)),
    ):
        settings = settings_of(family, SMALL)
        geometry = video_geometry(settings, len(clip.frames), 64, 48)
        expected = here(film(1), geometry.grid_thw, clip)
        found = there(film(1), geometry.grid_thw, clip)
        assert found.pixels.dtype == torch.uint8 and len(found.pixels) == len(clip.frames)
        ops = there.ops_of(found.pixels)
        patches = ops.patches(found.pixels, geometry.grid_thw, torch.float32)
        assert torch.equal(patches, expected.pixels)
        assert (found.num_patches, found.num_rows) == (expected.num_patches, expected.num_rows)


def test_times_are_those_of_transformers() -> None:
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    settings = settings_of("qwen3_vl", {})
    for frames, rate in (([0, 7, 15, 22, 30], 24.0), ([0, 1], 29.97), ([3], 2.0)):
        theirs = Qwen3VLProcessor._calculate_timestamps(None, list(frames), rate, 2)
        said = [(f"<{time:.1f} seconds>", "") for time in theirs]
        assert settings.texts(frames, rate) == said
    found = metadata(61, 29.97)
    found.frames_indices = list(range(0, 60, 10))
    assert second_per_grid(settings, 6, 61, 29.97) == 2 / found.sampled_fps


# --- which packets are decoded --------------------------------------------------------------------

H264: dict[str, dict[str, str]] = {
    "frames that nothing refers to": {"bf": "3", "b_strategy": "0"},
    "a pyramid": {"bf": "5", "b_strategy": "0", "x264-params": "b-pyramid=normal"},
    "short groups": {"bf": "0", "g": "10"},
    "open groups": {"bf": "3", "g": "10", "x264-params": "open-gop=1"},
    "interlaced": {"bf": "3", "x264-params": "tff=1"},
    "several slices": {"bf": "2", "g": "12", "x264-params": "slices=3"},
    "parameters in the packets": {"bf": "2", "g": "12", "x264-params": "repeat-headers=1"},
}


@pytest.mark.parametrize("container", ["mp4", "matroska"])
@pytest.mark.parametrize("options", H264.values(), ids=H264)
def test_frames_are_those_of_the_whole_film(options: dict[str, str], container: str) -> None:
    data = film(3, 48, 64, 48, container=container, **options)
    every = frames_of(data)
    name = container_of(data)
    for frames in ((0,), (47,), (3, 3, 31), (5, 15, 25), tuple(range(0, 48, 7)), tuple(range(48))):
        found = decode_clip(data, Clip(container=name, frames=frames), 48, 64, MAX_PIXELS)
        assert (found == every[list(frames)]).all(), frames


# Frames that are decoded for those of a clip whose last one is the 36th of the film, at most.
DECODED = {
    "frames that nothing refers to": 24,
    "a pyramid": 18,
    "short groups": 22,
    "several slices": 22,
    "each refers to the one before": 36,
}


@pytest.mark.parametrize("kind", DECODED)
def test_frames_that_the_clip_does_not_depend_on_are_not_decoded(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    decoded = video_file._decoded

    def counted(*asked: Any) -> Iterator[Any]:
        counts.append(0)
        for one in decoded(*asked):
            counts[-1] += 1
            yield one

    monkeypatch.setattr(video_file, "_decoded", counted)
    data = film(3, 48, 64, 48, **H264.get(kind, {"bf": "0"}))
    clip = Clip(container="mp4", frames=(0, 15, 25, 35))
    found = decode_clip(data, clip, 48, 64, MAX_PIXELS)
    assert (found == frames_of(data, clip.frames)).all()
    assert len(counts) == 1 and DECODED[kind] - 8 < counts[0] <= DECODED[kind]


# --- files that are not what they say -------------------------------------------------------------


def test_a_video_on_its_side_is_turned() -> None:
    data = film(6, 4, 64, 32, rotation=90)
    found = decode_clip(data, Clip(container="mp4", frames=(2,)), 64, 32, MAX_PIXELS)
    lying = frames_of(data, [2])
    assert (found[0] == np.rot90(lying[0])).all()


@pytest.mark.parametrize("container", ["mp4", "webm", "matroska", "avi"])
def test_containers_are_known_by_their_first_bytes(container: str) -> None:
    assert container_of(film(1, 4, container=container)) == container.replace("matroska", "webm")


@pytest.mark.parametrize("data", [b"", b"#EXTM3U\nfile:///etc/passwd", b"RIFF....WAVE", b"GIF89a"])
def test_nothing_else_is_one(data: bytes) -> None:
    assert container_of(data) == ""


def test_without_its_decoder_a_film_is_refused_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the gateway's part nothing needs it: `container_of`, `read_header`."""
    data = film(1)
    monkeypatch.setitem(sys.modules, "av", None)
    assert read_header(data, container_of(data)).num_frames > 0
    with pytest.raises(MediaError, match=r"the package av is not installed .*\(pip install av\)"):
        decode_clip(data, Clip(container="mp4", frames=(0,)), 48, 64, MAX_PIXELS)


def test_damaged_videos_fail_with_a_sentence() -> None:
    data = film(1)
    with pytest.raises(MediaError, match="has no frame 100"):
        decode_clip(data, Clip(container="mp4", frames=(0, 99)), 48, 64, MAX_PIXELS)
    for broken in (data[:200], b"\0\0\0\x18ftypisom" + bytes(100)):
        with pytest.raises(MediaError, match=r"the video (is cut off|has no header)"):
            decode_clip(broken, Clip(container="mp4", frames=(0,)), 48, 64, MAX_PIXELS)
    with pytest.raises(MediaError, match="64 x 48 pixels; send at most 100"):
        decode_clip(data, Clip(container="mp4", frames=(0,)), 48, 64, 100)
    good, clip = packed(1, 3, 40, 40)
    with pytest.raises(MediaError, match="frame 2 of the video"):
        second = good.index(b"PNG", good.index(b"IEND"))
        decode_clip(good[:second] + b"JPG" + good[second + 3 :], clip, 40, 40, MAX_PIXELS)
