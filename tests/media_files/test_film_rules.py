"""Frames, sizes and texts of GLM's, InternVL's and Gemma's videos are those of transformers."""

from __future__ import annotations

import random
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from epd.engine.vision.video_file import decode_clip
from epd.errors import MediaError
from epd.families.gemma4 import adapter as gemma4
from epd.families.gemma4.sizes import BUDGETS
from epd.families.internvl.adapter import FrameOps
from epd.media_files.film_rules import ByLength
from epd.media_files.video import Sampling, sample_frames, video_geometry, video_settings
from epd.messages import Clip
from epd.model_files.family import Geometry
from epd.model_files.geometry import images_of
from tests.engine.hf_video import make_processor
from tests.media_files.test_video import GLM, MAX_PIXELS, RATES, metadata, settings_of
from tests.media_files.videos import film, frames_of


@pytest.mark.parametrize("family", GLM)
def test_glm_takes_the_same_frames(family: str) -> None:
    """By the processor's rate, and by a request's where it may have one."""
    rng = random.Random(7)
    settings, processor = settings_of(family, {}), make_processor(family, {})
    kinds = set()
    for _ in range(500):
        total = rng.choice([rng.randint(1, 60), rng.randint(60, 4000), rng.randint(4000, 200000)])
        rate = rng.choice(RATES)
        fps = rng.choice([None, 0.1, 0.5, 2.0, 3.0, 7.5, 30.0, 90.0]) if family == "glm4v" else None
        expected = processor.sample_frames(metadata(total, rate), fps=fps)
        found = sample_frames(settings, total, rate, Sampling(fps=fps), 200_001)
        if len(expected) == 0:  # of a sixth of a second; theirs fails
            assert total / rate < 1 / 6 and found == (0, 0)
            continue
        assert list(found) == expected.tolist(), (total, rate, fps)
        kinds.add((total / rate > 300, total / rate > 30, found[-1] == found[-2]))
    assert len(kinds) >= 5


@pytest.mark.parametrize("config", [{}, {"initial_shift": False}, {"initial_shift": 0.7}])
def test_internvl_takes_the_same_frames(config: dict[str, Any]) -> None:
    """By rate and by number; torch's choice between two neighbours as for Qwen2-VL."""
    rng = random.Random(8)
    settings, processor = settings_of("internvl", config), make_processor("internvl", config)
    num_taken = num_other = 0
    for _ in range(600):
        total, rate = rng.choice([rng.randint(1, 60), rng.randint(60, 4000)]), rng.choice(RATES)
        fps = rng.choice([0.1, 0.5, 1.0, 2.0, 3.0, 4.0, 7.5])
        number = rng.randint(1, min(350, total))
        if not 1 <= int(total / rate * fps) <= total:  # theirs fails
            assert len(sample_frames(settings, total, rate, Sampling(fps=fps), 4000)) in (1, total)
            fps = rate
        for ask in ({"fps": fps}, {"num_frames": number}):
            expected = processor.sample_frames(metadata(total, rate), **ask)
            found = sample_frames(settings, total, rate, Sampling(**ask), 4000)
            off = np.abs(np.array(found) - expected.numpy())
            assert off.max(initial=0) <= 1, (total, rate, ask)
            num_taken += len(found)
            num_other += int(off.sum())
    assert num_other < num_taken / 1_000


def test_internvl_frames_are_tiles_with_numbers() -> None:
    settings = settings_of("internvl", {"size": {"height": 448, "width": 448}})
    assert video_geometry(settings, 5, 640, 360) == Geometry((5, 32, 32), 5 * 256, 5 * 1024)
    assert settings.texts((3, 9), 24.0) == [
        ("Frame1: <img>", "</img>"),
        ("\nFrame2: <img>", "</img>"),
    ]
    assert len(sample_frames(settings, 90_000, 30.0, Sampling(), 768)) == 768
    with pytest.raises(
        MediaError, match=r"max_frames cannot be asked for .* but fps and num_frames"
    ):
        sample_frames(settings, 90, 30.0, Sampling(max_frames=4), 768)


@pytest.mark.parametrize("processor", [{}, {"do_normalize": False}])
def test_internvl_frames_become_the_same_tiles(processor: dict[str, Any]) -> None:
    given = {"size": {"height": 448, "width": 448}} | processor
    settings, theirs = settings_of("internvl", given), make_processor("internvl", given)
    ops = FrameOps(settings)
    for data, clip in (
        (film(1), Clip(container="mp4", frames=(0, 3, 6, 9))),
        (film(2, 9, 100, 38, container="webm"), Clip(container="webm", frames=(4,))),
        (film(3, 3, 500, 460), Clip(container="mp4", frames=(0, 2))),
    ):
        frames = frames_of(data, clip.frames)
        expected = theirs(videos=[frames], return_tensors="pt")["pixel_values_videos"][0]
        grid = video_geometry(settings, len(frames), frames.shape[2], frames.shape[1]).grid_thw
        taken = decode_clip(data, clip, *ops.size_of(grid), MAX_PIXELS)
        found = ops.patches(torch.from_numpy(taken), grid, torch.float32)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_what_glm_does_not_take_is_refused() -> None:
    at_rate, by_length = (settings_of(family, {}) for family in GLM)
    with pytest.raises(MediaError, match=r"num_frames cannot be asked for .* but fps"):
        sample_frames(at_rate, 90, 30.0, Sampling(num_frames=4), 768)
    with pytest.raises(MediaError, match=r"fps cannot be asked for .* but nothing"):
        sample_frames(by_length, 90, 30.0, Sampling(fps=1.0), 768)
    with pytest.raises(MediaError, match="more than the 16 frames that are taken"):
        sample_frames(by_length, 90, 30.0, Sampling(), 16)
    for settings in (at_rate, by_length):
        assert sample_frames(settings, 4, 30.0, Sampling(every_frame=True), 16) == (0, 1, 2, 3)
    start_s = time.monotonic()
    assert len(sample_frames(at_rate, 700, 30.0, Sampling(fps=1e9), 768)) == 700
    with pytest.raises(MediaError):
        sample_frames(at_rate, 10**9, 1e7, Sampling(fps=1e6), 768)
    sample_frames(by_length, 10**9, 30.0, Sampling(), 768)
    assert time.monotonic() - start_s < 0.5


def test_the_name_of_the_processor_has_its_rules() -> None:
    """GLM-4.6V has the model type of GLM-4.5V."""
    for config, of_length in (
        ({}, False),
        ({"video_processor_type": "Glm46VVideoProcessor"}, True),
        ({"image_processor_type": "Glm46VImageProcessor"}, True),
    ):
        assert isinstance(settings_of("glm4v_moe", config), ByLength) == of_length


def test_gemma_takes_the_same_frames_and_writes_their_times() -> None:
    """A number of them; a shorter video, which theirs refuses, whole."""
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

    rng = random.Random(9)
    settings, processor = settings_of("gemma4", {}), make_processor("gemma4", {})
    writer: Any = SimpleNamespace(boi_token="<|image>", video_token="V", eoi_token="<image|>")
    for _ in range(500):
        total, rate = rng.choice([rng.randint(1, 60), rng.randint(60, 200_000)]), rng.choice(RATES)
        number = rng.choice([None, rng.randint(1, 350)])
        found = sample_frames(settings, total, rate, Sampling(num_frames=number), 4000)
        if total < (number or 32):
            with pytest.raises(ValueError, match="exceeds total_num_frames"):
                processor.sample_frames(metadata(total, rate), num_frames=number)
            assert found == tuple(range(total))
            continue
        shown = metadata(total, rate)
        shown.frames_indices = processor.sample_frames(shown, num_frames=number)
        assert list(found) == shown.frames_indices.tolist(), (total, rate, number)
        inputs = {"num_soft_tokens_per_video": [1], "video_metadata": [shown]}
        expected = Gemma4Processor.replace_video_token(writer, inputs, 0)
        assert "".join(a + "V" + b for a, b in settings.texts(found, rate)) == expected
    with pytest.raises(MediaError, match=r"fps cannot be asked for .* but num_frames"):
        sample_frames(settings, 90, 30.0, Sampling(fps=4.0), 768)
    assert len(sample_frames(settings, 90, 30.0, Sampling(), 16)) == 16


@pytest.mark.parametrize("budget", BUDGETS)
def test_gemma_frames_have_the_same_sizes(budget: int) -> None:
    theirs = sys.modules[type(make_processor("gemma4", {})).__module__]
    rng = random.Random(budget)
    settings = settings_of("gemma4", {"max_soft_tokens": budget})
    for _ in range(2_000):
        width, height = (rng.choice([rng.randint(1, 99), rng.randint(99, 4000)]) for _ in "ab")
        if max(width, height) > 200 * min(width, height):
            continue
        lines, columns = theirs.get_aspect_ratio_preserving_size(height, width, 16, 9 * budget, 3)
        found = video_geometry(settings, 3, width, height)
        assert found.grid_thw == (3, lines // 16, columns // 16), (width, height)
        assert found.num_rows * 9 == found.num_patches == 3 * (lines // 16) * (columns // 16)
        assert found.num_rows <= 3 * budget


@pytest.mark.parametrize("processor", [{}, {"do_normalize": False}, {"image_mean": [0.5] * 3}])
def test_gemma_frames_become_the_same_patches(processor: dict[str, Any]) -> None:
    settings, theirs = settings_of("gemma4", processor), make_processor("gemma4", processor)
    ops = gemma4.FilmOps(settings)
    for data, clip in (
        (film(1), Clip(container="mp4", frames=(0, 3, 6, 9))),
        (film(2, 9, 100, 38, container="webm"), Clip(container="webm", frames=(4,))),
        (film(3, 3, 336, 480), Clip(container="mp4", frames=(0, 2))),
    ):
        frames = frames_of(data, clip.frames)
        expected = theirs(videos=[frames], do_sample_frames=False, return_tensors="pt")
        grid = video_geometry(settings, len(frames), frames.shape[2], frames.shape[1]).grid_thw
        taken = decode_clip(data, clip, *ops.size_of(grid), MAX_PIXELS)
        found = ops.patches(torch.from_numpy(taken), grid, torch.float32)
        found = found.unflatten(0, (len(frames), -1))
        held = expected["pixel_values_videos"][:, : found.shape[1]]
        torch.testing.assert_close(found, held, atol=1e-5, rtol=0)
        ends = expected["video_position_ids"].amax((0, 1)) + 1
        assert ends.tolist() == [grid[2], grid[1]]
        assert expected["num_soft_tokens_per_video"].tolist() == [ops.num_rows(grid) // len(frames)]


def test_what_gemma_has_no_form_for_is_refused() -> None:
    images = images_of({"model_type": "gemma4"})
    assert images is not None
    for other in ({"fps": 2}, {"do_sample_frames": False}):
        assert "of a video, num_frames are taken" in str(images.processor(other))
    assert "an image has one of 70" in str(images.processor({"max_soft_tokens": 71}))
    # Where no file has settings of videos, those of images are read: transformers prepares none.
    assert video_settings({"model_type": "gemma4"}, {"image_processor_type": "Any"}) is None
