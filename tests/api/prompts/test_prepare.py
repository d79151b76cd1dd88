"""From messages with images to expanded ids, with the bundled model and without transformers."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from epd.api.http.body import Body, Intake
from epd.api.http.errors import ApiError
from epd.api.http.exchange import ClientGone, Exchange, count_fetched
from epd.api.http.identity import mm_hash
from epd.api.openai.validation import read_chat
from epd.api.prompts.prepare import INLINE_NBYTES, NUM_THREADS, Preparer
from epd.config import GatewayConfig, Limits
from epd.media_files.video import DEFAULT_SAMPLING
from epd.tiny import CHECKPOINT
from tests.patience import PATIENCE_S

IMAGE_ID = 262
LIMITS = Limits(max_images=3)


@pytest.fixture
async def preparer() -> AsyncIterator[Preparer]:
    made = Preparer(GatewayConfig(model_dir=str(CHECKPOINT), limits=LIMITS))
    yield made
    await made.close()


def png(width: int, height: int, color: str = "white", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), color).save(out, "PNG", **options)
    return out.getvalue()


def part(data: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: Any) -> list[dict[str, Any]]:
    texts = ({"type": "text", "text": p} if isinstance(p, str) else p for p in parts)
    return [{"role": "user", "content": list(texts)}]


async def refusal(preparer: Preparer, messages: list[dict[str, Any]]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await preparer.chat(messages)
    return caught.value


async def test_bad_words_are_found_at_a_start_and_behind_a_space() -> None:
    preparer = Preparer(GatewayConfig(model_dir=str(CHECKPOINT)))
    words = preparer.bad_words(["no", " a"])
    await preparer.close()
    assert words == ((110, 111), (97,))  # of bytes: a space is a token of its own


async def test_a_prompt_keeps_its_last_tokens_unless_images_would_be_cut() -> None:
    preparer = Preparer(GatewayConfig(model_dir=str(CHECKPOINT)))
    prompt = await preparer.completion([1, 2, 3])
    imaged = await preparer.chat(user(part(png(64, 64))))
    await preparer.close()
    assert prompt.truncated(2).token_ids == (2, 3)
    assert prompt.truncated(3) is prompt
    with pytest.raises(ApiError) as caught:
        imaged.truncated(4)
    assert caught.value.param == "truncate_prompt_tokens"


async def test_each_image_has_as_many_placeholders_as_transformers_gives_it_rows(
    preparer: Preparer,
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    processor = Qwen2VLImageProcessorPil.from_pretrained(str(CHECKPOINT))
    sizes = [(64, 48), (300, 500), (33, 97)]
    images = [Image.new("RGB", size) for size in sizes]
    grids = processor(images=images, return_tensors="np")["image_grid_thw"].tolist()
    prompt = await preparer.chat(user(*(part(png(*size)) for size in sizes), "What?"))
    assert [list(item.grid_thw) for item in prompt.items] == grids
    assert [item.num_rows for item in prompt.items] == [t * h * w // 4 for t, h, w in grids]
    for item in prompt.items:
        end = item.offset + item.num_rows
        assert set(prompt.token_ids[item.offset : end]) == {IMAGE_ID}
        assert IMAGE_ID not in (prompt.token_ids[item.offset - 1], prompt.token_ids[end])
    assert prompt.token_ids.count(IMAGE_ID) == sum(item.num_rows for item in prompt.items)


async def test_images_keep_their_order_and_bytes(preparer: Preparer) -> None:
    large = png(600, 600, "red", compress_level=0)  # goes through a thread
    small = png(40, 40)
    assert len(base64.b64encode(large)) > INLINE_NBYTES > len(small)
    prompt = await preparer.chat(
        [*user(part(large), "one"), {"role": "assistant", "content": "1"}, *user(part(small))]
    )
    assert [item.image for item in prompt.items] == [large, small]
    assert prompt.items[0].offset < prompt.items[1].offset


async def test_equal_images_have_one_hash(preparer: Preparer) -> None:
    prompt = await preparer.chat(user(part(png(64, 64)), part(png(64, 64)), part(png(64, 65))))
    first, second, third = (item.mm_hash for item in prompt.items)
    assert first == second != third
    assert len(first) == 64
    assert set(first) <= set("0123456789abcdef")


def test_identity_is_all_that_decides_the_rows() -> None:
    base = mm_hash("a", b"bc", "d", "e")
    assert base == mm_hash("a", b"bc", "d", "e")
    others = {
        mm_hash("x", b"bc", "d", "e"),
        mm_hash("a", b"xx", "d", "e"),
        mm_hash("a", b"bc", "x", "e"),
        mm_hash("a", b"bc", "d", "x"),
        mm_hash("", b"bc", "ad", "e"),
        mm_hash("a", b"bc", "de", ""),
    }
    assert len(others | {base}) == 7


async def test_refused_images_are_named(preparer: Preparer) -> None:
    error = await refusal(preparer, user("a", part(png(2000, 5))))
    assert (error.status, error.param) == (400, "messages[0].content[1].image_url")
    assert "200 times" in error.message
    assert "file:" in (await refusal(preparer, user(file_part()))).message
    error = await refusal(preparer, user(*[part(png(40, 40))] * 4))
    assert (error.param, "at most 3" in error.message) == ("messages[0].content[3].image_url", True)


def file_part() -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}


async def test_a_placeholder_in_text_is_not_an_image(preparer: Preparer) -> None:
    error = await refusal(preparer, user("look <|image_pad|>", part(png(40, 40))))
    assert "2 image placeholders for 1 images" in error.message
    with pytest.raises(ApiError) as caught:
        await preparer.completion("look <|image_pad|>")
    assert caught.value.param == "prompt"
    with pytest.raises(ApiError):
        await preparer.completion([1, IMAGE_ID])


async def test_text_that_cannot_fit_is_refused_at_once(preparer: Preparer) -> None:
    error = await refusal(preparer, user("a" * 4_000_000))
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert "holds 4096 tokens" in error.message
    with pytest.raises(ApiError, match="holds 4096 tokens, and this text needs 5000"):
        await preparer.completion("a" * 5000)


async def test_a_family_with_another_geometry_and_key(tmp_path: Path) -> None:
    """LLaVA-OneVision: `image_token_index`, and rows that depend on tiles and padding."""
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    config = {
        "model_type": "llava_onevision",
        "image_token_index": IMAGE_ID,
        "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56]],
        "vision_config": {"image_size": 28, "patch_size": 14},
        "text_config": {"max_position_embeddings": 512, "vocab_size": 272},
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    made = Preparer(GatewayConfig(model_dir=str(tmp_path / "model")))
    prompt = await made.chat(user(part(png(40, 20)), part(png(50, 50)), "?"))
    # 2 x 2 of the whole image, lines x columns of its tiles, and one newline for each line
    assert [item.num_rows for item in prompt.items] == [4 + 2 * 4 + 2, 4 + 4 * 4 + 4]
    assert [item.grid_thw for item in prompt.items] == [(1, 20, 40), (1, 50, 50)]
    assert prompt.token_ids.count(IMAGE_ID) == 14 + 24
    assert made.max_context == 512
    await made.close()


async def test_a_text_only_model_takes_no_images(tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    config = {"model_type": "qwen3", "vocab_size": 272, "max_position_embeddings": 128}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    made = Preparer(GatewayConfig(model_dir=str(tmp_path / "model"), model_name="text"))
    error = await refusal(made, user(part(png(40, 40))))
    assert "takes no images" in error.message
    assert error.param == "messages[0].content[0].image_url"
    assert (made.model_name, made.max_context, made.vocab_size) == ("text", 128, 272)
    assert (await made.chat(user("hi"))).items == ()
    await made.close()


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        ({"do_sample": False, "max_new_tokens": 128}, {"temperature": 0.0, "max_tokens": 128}),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": None},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "max_tokens": 4000},
        ),
        ({}, {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 4000}),
    ],
)
async def test_the_publisher_s_defaults(
    generation: dict[str, Any], defaults: dict[str, Any], tmp_path: Path
) -> None:
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    generation = {"eos_token_id": [258, 256], **generation}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(generation))
    made = Preparer(GatewayConfig(model_dir=str(tmp_path / "model")))
    asked = read_chat({"messages": user("hi")}, made, LIMITS)
    sampling = asked.sampling(0, 0, asked.max_new_tokens(96, made), made)
    assert {name: getattr(sampling, name) for name in defaults} == defaults
    assert sampling.stop_token_ids == (258, 256)
    explicit = read_chat({"messages": user("hi"), "temperature": 1.5, "top_p": 1}, made, LIMITS)
    assert (explicit.temperature, explicit.top_p) == (1.5, 1.0)
    assert explicit.max_new_tokens(4090, made) == min(6, defaults["max_tokens"])
    await made.close()


async def test_work_for_a_client_that_has_left_is_not_begun(
    preparer: Preparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image that waits for a thread, and its client leaves."""
    gone = asyncio.Event()
    held = threading.Event()
    measured: list[str] = []
    monkeypatch.setattr(preparer._measurer, "image", lambda source, *_: measured.append("it"))

    async def receive() -> dict[str, str]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        raise AssertionError("nobody is answered")

    scope = {"method": "POST", "path": "/", "headers": []}
    exchange = Exchange(scope, receive, send)
    exchange.on_disconnect(lambda: None)
    for _ in range(NUM_THREADS):
        preparer._threads.submit(held.wait)
    large = png(600, 600, "red", compress_level=0)
    asked = asyncio.create_task(preparer.chat(user(part(large))))
    await asyncio.sleep(0)
    gone.set()
    async with asyncio.timeout(PATIENCE_S):
        while not exchange.disconnected:
            await asyncio.sleep(0.001)
        held.set()
        with pytest.raises(ClientGone):
            await asked
    assert not measured


async def test_an_image_does_not_wait_for_films(
    preparer: Preparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, begun = threading.Event(), threading.Event()
    monkeypatch.setattr(preparer._measurer, "file", lambda *_: begun.set() or held.wait())
    video = {"type": "video_url", "urls": ["data:video/mp4;base64,AAAA"], "field": "video_url"}
    video |= {"is_file": True, "sampling": DEFAULT_SAMPLING}
    films = [asyncio.create_task(preparer.chat(user(video))) for _ in range(2 * NUM_THREADS)]
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert (await preparer.chat(user(part(png(600, 600, "red", compress_level=0))))).items
    finally:
        held.set()
        await asyncio.gather(*films, return_exceptions=True)


def test_nothing_large_is_left_to_import_for_the_first_request() -> None:
    """That would hold every thread, and with them all streams.  FFmpeg is the encoder's alone."""
    code = (
        "import sys; from epd.api.prompts.prepare import Preparer\n"
        "from epd.config import GatewayConfig\n"
        f"Preparer(GatewayConfig(model_dir={str(CHECKPOINT)!r}))\n"
        "assert {'PIL.Image', 'aiohttp'} <= set(sys.modules)\n"
        "import epd.api.prompts.film; assert 'av' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- what is fetched ------------------------------------------------------------------------------


class Fetches:
    """URLs that nobody answers, with "big" in them that are large."""

    def __init__(self) -> None:
        self.open = 0

    async def fetch(self, url: str, *_: object) -> bytes:
        self.open += 1
        try:
            if "big" in url:
                count_fetched(600)
            await asyncio.sleep(60)
        finally:
            self.open -= 1
        return b""

    async def close(self) -> None:
        pass


def pictures(*urls: str) -> list[dict[str, Any]]:
    return user(*({"type": "image_url", "image_url": {"url": url}} for url in urls))


@pytest.fixture
def fetches(preparer: Preparer, monkeypatch: pytest.MonkeyPatch) -> Fetches:
    made = Fetches()
    monkeypatch.setattr(preparer, "_fetcher", made)
    return made


async def test_nobody_fetches_for_a_request_that_is_refused(
    preparer: Preparer, fetches: Fetches
) -> None:
    error = await refusal(preparer, pictures("http://a/1", "http://a/2", "data:image/png,x"))
    await asyncio.sleep(0)
    assert error.status == 400 and fetches.open == 0


async def test_nobody_fetches_for_a_client_that_has_left(
    preparer: Preparer, fetches: Fetches
) -> None:
    gone = asyncio.Event()

    async def receive() -> dict[str, str]:
        await gone.wait()
        return {"type": "http.disconnect"}

    exchange = Exchange({"method": "POST", "path": "/", "headers": []}, receive, None)
    exchange.on_disconnect(lambda: None)
    asked = asyncio.create_task(preparer.chat(pictures("http://a/1", "http://a/2")))
    async with asyncio.timeout(PATIENCE_S):
        while fetches.open < 2:
            await asyncio.sleep(0.001)
        gone.set()
        with pytest.raises(ClientGone):
            await asked
    assert fetches.open == 0


async def test_what_is_fetched_counts_as_its_body_does(
    preparer: Preparer, fetches: Fetches
) -> None:
    intake = Intake(Limits(max_inflight_nbytes=1000), 100)
    exchange = Exchange({"method": "POST", "path": "/", "headers": []}, asyncio.Event().wait, None)
    exchange.on_disconnect(lambda: None)
    exchange.body = Body(intake)
    error = await refusal(preparer, pictures("http://big/1", "http://big/2"))
    assert error.status == 429 and intake.nbytes == 600
    exchange.close()
    await asyncio.sleep(0)
    assert intake.nbytes == 0 and fetches.open == 0
