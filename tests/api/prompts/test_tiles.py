"""Idefics3 and SmolVLM in the gateway: the prompt of an image is transformers' to the token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from epd.api.http.errors import ApiError
from epd.api.prompts.prepare import Preparer
from epd.config import GatewayConfig
from epd.engine.adapter import adapter_for
from epd.engine.vision.preprocess import Preprocessor
from epd.families.registry import family_named
from epd.media_files.video import DEFAULT_SAMPLING
from epd.messages import PixelBounds
from epd.model_files.checkpoint import ModelError, read_checkpoint
from epd.model_files.model_directory import check_config, check_processors
from tests.e2e.goldens import sent
from tests.engine.conftest import chat, drawn_image
from tests.engine.reference import reference_processor
from tests.engine.tiny_models import cached_model

IMAGE, AROUND = 262, "<fake_token_around_image>"
SIZES = (
    *((1, 1), (64, 64), (65, 64), (200, 1), (3, 600), (33, 47), (640, 480), (31, 1000)),
    *((500, 499), (77, 1200), (1023, 511), (90, 50)),
)
PROMPTS = {
    **{f"{width} x {height}": ([(1, "?")], [(width, height)]) for width, height in SIZES},
    "three": ([(3, "which <row_1_col_1>\n\n?")], SIZES[5:8]),
    "two turns": ([(1, "first"), "yes", (2, "second")], SIZES[9:12]),
}


@pytest.fixture(scope="module")
def processor() -> Any:
    directory = cached_model("idefics3")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    template = (directory / "chat_template.jinja").read_text()
    images = reference_processor(directory)
    return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)


@pytest.mark.parametrize("how", ["keep", "escape"])
async def test_prompts_are_the_processor_s(how: Any, processor: Any) -> None:
    directory = cached_model("idefics3")
    preprocess = Preprocessor(adapter_for(read_checkpoint(directory)))
    preparer = Preparer(GatewayConfig(model_dir=str(directory), special_tokens_in_content=how))
    for name, (turns, sizes) in list(PROMPTS.items())[-2 if how == "escape" else 0 :]:
        images = [drawn_image(i, *size) for i, size in enumerate(sizes)]
        messages = chat(*turns)
        prompt = await preparer.chat(sent(messages, images))  # type: ignore[arg-type]
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
        expected = processor(text=[text], images=[images], return_tensors="pt")
        equal = list(prompt.token_ids) == expected["input_ids"][0].tolist()
        assert equal is (how == "keep" or name != "three"), name  # that spells the name of a tile
        tiles = [preprocess(item.image, item.grid_thw).pixels for item in prompt.items]
        assert torch.equal(torch.cat(tiles), expected["pixel_values"][0])
        places = [at for item in prompt.items for at in item.offsets or (item.offset,)]
        rows = [at + i for at in places for i in range(4)]
        assert rows == [at for at, token in enumerate(prompt.token_ids) if token == IMAGE]
        assert len(rows) == sum(item.num_rows for item in prompt.items)
    await preparer.close()


async def test_what_is_not_taken_is_refused() -> None:
    """A placeholder in text, frames of a video, bounds of the Qwen families."""
    preparer = Preparer(GatewayConfig(model_dir=str(cached_model("idefics3"))))
    image = sent(chat((1, "?")), [drawn_image(1, 40, 30)])[0]["content"][0]
    video = {"type": "video", "urls": [image["image_url"]["url"]], "field": "video"}
    bounded = image | {"bounds": PixelBounds(min_pixels=100)}
    for parts, wrong in (
        ([image, {"type": "text", "text": "<image>"}], "2 image placeholders for 1 images"),
        ([video | {"is_file": False, "sampling": DEFAULT_SAMPLING}], "takes no videos"),
        ([bounded], "not resized between bounds"),
    ):
        with pytest.raises(ApiError, match=wrong):
            await preparer.chat([{"role": "user", "content": parts}])  # type: ignore[typeddict-item]
    await preparer.close()


@pytest.mark.parametrize(
    ("file", "change", "wrong"),
    [
        ("config.json", {"scale_factor": 3}, "scale_factor: 3 does not divide"),
        ("config.json", {"text_config": {"model_type": "mistral"}}, "is not one of llama"),
        ("preprocessor_config.json", {"max_image_size": {"longest_edge": 64}}, "image size is 64"),
        ("preprocessor_config.json", {"size": {"height": 64, "width": 64}}, "longest_edge"),
        ("preprocessor_config.json", {"max_image_size": 3}, "max_image_size: Expected object"),
        ("preprocessor_config.json", {"do_resize": False}, "do_resize"),
    ],
)
def test_what_tiles_cannot_be_cut_by(
    file: str, change: dict[str, Any], wrong: str, tmp_path: Path
) -> None:
    shutil.copytree(cached_model("idefics3"), tmp_path / "model")
    path = tmp_path / "model" / file
    found = json.loads(path.read_text())
    if "text_config" in change:
        change = {"text_config": found["text_config"] | change["text_config"]}
    path.write_text(json.dumps(found | change))
    checkpoint = read_checkpoint(tmp_path / "model")
    with pytest.raises(ModelError, match=wrong):
        check_config(checkpoint)
        check_processors(checkpoint)


def test_an_image_may_stay_whole(tmp_path: Path) -> None:
    """`do_image_splitting` false, which SmolVLM2 is often run with: one tile, one run of rows."""
    shutil.copytree(cached_model("idefics3"), tmp_path / "model")
    path = tmp_path / "model" / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_image_splitting": False}))
    image = drawn_image(1, 300, 41)
    found = Preprocessor(adapter_for(read_checkpoint(tmp_path / "model"))).patches(image)
    expected = reference_processor(tmp_path / "model")(images=[[image]], return_tensors="pt")
    assert torch.equal(found.pixels, expected["pixel_values"][0])
    assert (found.num_rows, found.grid_thw) == (4, (1, 4, 4))
    family = family_named("smolvlm")
    assert family
    assert family.images
    assert family.images.tile_text
    assert (
        family.images.tile_text((0, 0), "<image>")
        == "<fake_token_around_image><global-img><image>" + AROUND
    )
