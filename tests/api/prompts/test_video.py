"""Videos in a request: what is taken, under which hash, and what is refused by which name."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from epd.api.http.errors import ApiError
from epd.api.openai.validation import read_chat
from epd.api.prompts.film import read_film
from epd.api.prompts.prepare import Preparer
from epd.config import GatewayConfig, Limits
from epd.engine.vision.video_file import decode_clip
from epd.errors import MediaError
from epd.messages import Clip
from epd.tiny import CHECKPOINT
from tests.api.prompts.test_prepare import part as image_part
from tests.api.prompts.test_prepare import png, user
from tests.engine.vision.video_cases import url_of
from tests.media_files.videos import film

VIDEO_ID = 263
LIMITS = Limits(max_videos=2, max_video_frames=12, max_video_nbytes=40_000)
NAME = "messages[0].content[0]"


@pytest.fixture
async def preparer() -> AsyncIterator[Preparer]:
    made = Preparer(GatewayConfig(model_dir=str(CHECKPOINT), limits=LIMITS))
    yield made
    await made.close()


def part(data: bytes, mime: str = "video/mp4", **more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url_of(data, mime)}, **more}


def frames_part(*images: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "video", "video": [url_of(data) for data in images], **more}


async def prompt_of(preparer: Preparer, *parts: Any, **body: Any) -> Any:
    asked = read_chat({"messages": user(*parts), **body}, preparer, LIMITS)
    assert asked.messages is not None
    return await preparer.chat(asked.messages)


async def refusal(preparer: Preparer, *parts: Any, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await prompt_of(preparer, *parts, **body)
    assert caught.value.status == 400
    return caught.value


async def test_a_video_stands_frame_by_frame_behind_the_times(preparer: Preparer) -> None:
    prompt = await prompt_of(preparer, part(film(1)), "what?")  # 12 frames in 1.5 s: 4 are taken
    (item,) = prompt.items
    assert item.grid_thw == (2, 6, 8) and item.num_rows == 24
    assert item.clip.container == "mp4" and item.clip.frames == (0, 4, 7, 11)
    assert item.offset == item.offsets[0] and item.end == item.offsets[1] + 12
    for at in item.offsets:
        assert set(prompt.token_ids[at : at + 12]) == {VIDEO_ID}
    said = bytes(i for i in prompt.token_ids if i < 256).decode()
    assert "<0.2 seconds><1.1 seconds>what?" in said
    assert prompt.token_ids.count(VIDEO_ID) == 24


@pytest.mark.parametrize(
    ("part_field", "body", "num_frames"),
    [
        ({}, {}, 4),  # the processor's min_frames
        ({"fps": 4}, {}, 6),
        ({"num_frames": 7}, {}, 7),
        ({"min_frames": 5}, {}, 5),
        ({"max_frames": 2}, {}, 2),
        ({}, {"media_io_kwargs": {"video": {"num_frames": 8}}}, 8),
        ({}, {"media_io_kwargs": {"video": {"num_frames": -1}}}, 4),
        ({}, {"mm_processor_kwargs": {"fps": 4.0}}, 6),
        ({}, {"mm_processor_kwargs": {"do_sample_frames": False}}, 12),
        ({"num_frames": 3}, {"mm_processor_kwargs": {"fps": 8}}, 3),
    ],
)
async def test_who_may_say_how_many_frames(
    part_field: dict[str, Any], body: dict[str, Any], num_frames: int, preparer: Preparer
) -> None:
    prompt = await prompt_of(preparer, part(film(1), **part_field), "?", **body)
    assert len(prompt.items[0].clip.frames) == num_frames


async def test_frames_come_as_images_in_either_form(preparer: Preparer) -> None:
    shown = [png(40, 40, color) for color in ("red", "green", "blue")]
    listed = (await prompt_of(preparer, frames_part(*shown, fps=1.0), "?")).items[0]
    joined = ",".join(url_of(data).split(",")[1] for data in shown)
    url = {"url": f"data:video/jpeg;base64,{joined}"}
    as_in_vllm = {"type": "video_url", "video_url": url}
    other = (await prompt_of(preparer, as_in_vllm, "?", mm_processor_kwargs={"fps": 1})).items[0]
    assert listed == other
    assert listed.clip.container == "frames" and listed.grid_thw[0] == 2


async def test_identity_is_content_and_what_is_taken_of_it(preparer: Preparer) -> None:
    data, shown = film(1), [png(40, 40), png(40, 40, "red")]
    parts = [
        part(data),
        part(data, fps=4),
        part(data, max_frames=2),
        part(film(2)),
        frames_part(*shown),
        frames_part(*shown, fps=1),
        frames_part(*reversed(shown)),
        frames_part(shown[0]),
        image_part(shown[0]),
    ]
    hashes = [(await prompt_of(preparer, p, "?")).items[0].mm_hash for p in parts]
    assert len(set(hashes)) == len(parts)
    again = await prompt_of(preparer, part(data), "other text", part(data, num_frames=4))
    assert {item.mm_hash for item in again.items} == {hashes[0]}


async def test_images_and_videos_keep_their_order(preparer: Preparer) -> None:
    red = png(40, 40, "red")
    prompt = await prompt_of(
        preparer, part(film(1)), "a", image_part(red), frames_part(red, red), image_part(red)
    )
    kinds = [item.clip.container if item.clip else "image" for item in prompt.items]
    assert kinds == ["mp4", "image", "frames", "image"]
    ends = [item.end for item in prompt.items]
    assert all(end < item.offset for end, item in zip(ends, prompt.items[1:], strict=False))


@pytest.mark.parametrize(
    ("bad", "param", "words"),
    [
        (part(b"GIF89a" + bytes(50)), ".video_url", "not a video in a known container"),
        (part(b"#EXTM3U\nfile:///etc/passwd\n"), ".video_url", "not a video in a known container"),
        (part(film(1)[:300]), ".video_url", "cannot be read as a video"),
        (part(film(9, 60, 400, 300)), ".video_url", "limit for one video"),
        (part(film(1), num_frames=20, fps=1), ".num_frames", "exclude each other"),
        (part(film(3, 20), num_frames=20), ".video_url", "at most 12 are taken; ask for fewer"),
        (part(film(1), fps=0), ".fps", "above 0"),
        (part(film(1), speed=2), ".speed", "not supported"),
        ({"type": "video_url", "video_url": "x"}, ".video_url", "must be an object"),
        ({"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}, ".video_url", "data:"),
        ({"type": "video", "video": []}, ".video", "must not be empty"),
        ({"type": "video", "video": [3]}, ".video[0]", "must be a string"),
        (frames_part(png(40, 40), png(40, 48)), ".video[1]", "frames of one size"),
        (frames_part(png(40, 40), b"no image"), ".video[1]", "not an image"),
        (frames_part(png(40, 40), num_frames=1), ".num_frames", "not supported"),
        (frames_part(*[png(40, 40)] * 13), ".video", "has 13 frames; at most 12"),
        (frames_part(png(4000, 10)), ".video[0]", "200 times"),
        ({"type": "audio_url"}, ".type", "must be one of text, image_url, video_url, video"),
    ],
)
async def test_refusals_name_the_field(
    bad: dict[str, Any], param: str, words: str, preparer: Preparer
) -> None:
    error = await refusal(preparer, bad, "?")
    assert error.param == NAME + param
    assert words in error.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"media_io_kwargs": {"image": {}}}, "media_io_kwargs.image"),
        ({"media_io_kwargs": {"video": {"backend": "x"}}}, "media_io_kwargs.video.backend"),
        ({"mm_processor_kwargs": {"size": {}}}, "mm_processor_kwargs.size"),
        ({"mm_processor_kwargs": {"max_frames": 0}}, "mm_processor_kwargs.max_frames"),
        ({"mm_processor_kwargs": {"do_sample_frames": 1}}, "mm_processor_kwargs.do_sample_frames"),
    ],
)
async def test_what_is_not_known_of_a_whole_request(
    body: dict[str, Any], param: str, preparer: Preparer
) -> None:
    assert (await refusal(preparer, "hi", **body)).param == param


async def test_too_many_videos_and_too_much_work(preparer: Preparer) -> None:
    error = await refusal(preparer, *[part(film(1))] * 3)
    assert error.param == "messages[0].content[2].video_url" and "at most 2" in error.message
    with pytest.raises(ApiError, match="at most 20000 pixels are decoded"):
        read_film(film(1), Limits(max_video_pixels=20_000), "x")
    with pytest.raises(ApiError, match="64 x 48 pixels; at most 1000"):
        read_film(film(1), Limits(max_pixels=1000), "x")


async def test_a_spelled_placeholder_is_no_video(preparer: Preparer) -> None:
    error = await refusal(preparer, "see <|video_pad|>")
    assert "1 video placeholders for 0 videos" in error.message
    with pytest.raises(ApiError, match="1 video placeholders for 0 videos"):
        await preparer.completion("see <|video_pad|>")


async def test_a_model_without_videos_says_so(tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"video_token_id": None}))
    made = Preparer(GatewayConfig(model_dir=str(tmp_path / "model")))
    error = await refusal(made, part(film(1)))
    assert (error.param, "takes no videos" in error.message) == (f"{NAME}.video_url", True)
    await made.close()


@pytest.mark.parametrize("container", ["mp4", "webm", "matroska", "avi"])
def test_a_container_tells_its_frames(container: str) -> None:
    read = read_film(film(5, 9, 96, 64, 24, container), Limits(), "x")
    assert (read.num_frames, read.fps, read.width, read.height) == (9, 24.0, 96, 64)


def test_a_video_on_its_side_has_its_sides_swapped() -> None:
    read = read_film(film(6, 4, 64, 32, rotation=90), Limits(), "x")
    assert (read.width, read.height) == (32, 64)


def test_no_damage_is_more_than_a_refusal() -> None:
    """Bytes changed, cut out and cut off: at the gateway a 400, at the encoder a MediaError."""
    rng = random.Random(11)
    whole = [film(1), film(5, 9, 96, 64, 24, "webm"), film(5, 9, 96, 64, 24, "avi")]
    num_read = 0
    for _ in range(150):
        data = bytearray(rng.choice(whole))
        for _ in range(rng.choice([1, 3, 12])):
            at = rng.randrange(len(data))
            if rng.random() < 0.7:
                data[at] = rng.randrange(256)
            else:
                del data[at : at + rng.randrange(1, 40)]
        try:
            read = read_film(bytes(data), Limits(), "x")
            num_read += 1
            frames = tuple(range(0, min(read.num_frames, 8), 3))
            decode_clip(bytes(data), Clip(container=read.container, frames=frames), 48, 64, 100_000)
        except ApiError as error:
            assert error.status == 400 and error.param == "x"
        except MediaError:
            pass
    assert 10 < num_read < 140
