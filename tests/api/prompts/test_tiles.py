"""Tiles in the gateway: the prompt of an image is transformers' to the token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor

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
    "three": ([(3, "which <row_1_col_1></img>\n\n?")], SIZES[5:8]),
    "two turns": ([(1, "first"), "yes", (2, "second")], SIZES[9:12]),
}


def processor(family: str) -> Any:
    directory = cached_model(family)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    template = (directory / "chat_template.jinja").read_text()
    images = reference_processor(directory)
    if family == "idefics3":
        return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    # Without a processor of videos, which needs torchvision.
    unchecked = {"check_argument_for_proper_class": lambda *_: None}
    plain = type("InternVLProcessor", (InternVLProcessor,), unchecked)
    return plain(images, tokenizer, image_seq_length=4, chat_template=template)


@pytest.mark.parametrize("how", ["keep", "escape"])
@pytest.mark.parametrize("family", ["idefics3", "internvl"])
async def test_prompts_are_the_processor_s(family: str, how: Any) -> None:
    directory, theirs = cached_model(family), processor(family)
    preprocess = Preprocessor(adapter_for(read_checkpoint(directory)))
    preparer = Preparer(GatewayConfig(model_dir=str(directory), special_tokens_in_content=how))
    for name, (turns, sizes) in list(PROMPTS.items())[-2 if how == "escape" else 0 :]:
        images = [drawn_image(i, *size) for i, size in enumerate(sizes)]
        messages = chat(*turns)
        prompt = await preparer.chat(sent(messages, images))  # type: ignore[arg-type]
        text = theirs.apply_chat_template(messages, add_generation_prompt=True)
        nested = [images] if family == "idefics3" else images
        expected = theirs(text=[text], images=nested, return_tensors="pt")
        equal = list(prompt.token_ids) == expected["input_ids"][0].tolist()
        assert equal is (how == "keep" or name != "three"), name  # that spells a special token
        tiles = [preprocess(item.image, item.grid_thw).pixels for item in prompt.items]
        assert torch.equal(torch.cat(tiles), expected["pixel_values"].flatten(0, -4))
        rows = [
            at + i
            for item in prompt.items
            for at in item.offsets or (item.offset,)
            for i in range(item.num_rows // max(1, len(item.offsets)))
        ]
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
    ("family", "file", "change", "wrong"),
    [
        ("idefics3", "config", {"scale_factor": 3}, "scale_factor: 3 does not divide"),
        ("idefics3", "config", {"text_config": {"model_type": "mistral"}}, "is not one of llama"),
        ("idefics3", "preprocessor_config", {"max_image_size": {"longest_edge": 64}}, "size is 64"),
        ("idefics3", "preprocessor_config", {"size": {"height": 64, "width": 64}}, "longest_edge"),
        ("idefics3", "preprocessor_config", {"max_image_size": 3}, "size: Expected object"),
        ("idefics3", "preprocessor_config", {"do_resize": False}, "do_resize"),
        ("internvl", "config", {"downsample_ratio": 0.3}, "0.3 is not one by"),
        (
            "internvl",
            "config",
            {"downsample_ratio": "half"},
            "downsample_ratio: .half. is not one",
        ),
        ("internvl", "config", {"text_config": {"model_type": "gpt_oss"}}, "is not one of qwen2"),
        ("internvl", "config", {"vision_config": {"image_size": [32, 48]}}, "size: Expected int"),
        ("internvl", "config", {"vision_config": {"patch_size": [8, 8, 8]}}, "size: Expected int"),
        ("internvl", "config", {"vision_config": {"use_mask_token": True}}, "use_mask_token"),
        ("internvl", "config", {"vision_feature_select_strategy": "full"}, "select_strategy"),
        ("internvl", "preprocessor_config", {"size": {"height": 64, "width": 64}}, "size is 64"),
        ("internvl", "preprocessor_config", {"size": {"height": 32, "width": 64}}, "no square"),
        ("internvl", "preprocessor_config", {"min_patches": "few"}, "no image can be prepared"),
        *(
            ("deepseek_ocr2", "config", {part: change}, wrong)
            for part, change, wrong in (
                ("text_config", {"mlp_layer_types": ["dense"]}, "has to name each layer"),
                ("text_config", {"mlp_layer_types": ["thin"] * 3}, "mlp_layer_types.*thin"),
                ("text_config", {"topk_method": "group_limited_greedy"}, "topk_method"),
                ("text_config", {"mlp_bias": True}, "mlp_bias"),
                ("vision_config", {"sam_config": {"use_rel_pos": False}}, "config.use_rel_pos"),
                ("vision_config", {"sam_config": {"output_channels": "x"}}, "output_channels"),
                ("vision_config", {"sam_config": 5}, "sam_config: Expected"),
                ("vision_config", {"encoder_config": {"hidden_size": 40}}, "downsample_channels"),
                ("vision_config", {"encoder_config": {"num_hidden_layers": 0}}, "num_hidden"),
            )
        ),
        ("deepseek_ocr2", "preprocessor_config", {"tile_size": 160}, "queries for"),
    ],
)
def test_what_tiles_cannot_be_cut_by(
    family: str, file: str, change: dict[str, Any], wrong: str, tmp_path: Path
) -> None:
    shutil.copytree(cached_model(family), tmp_path / "model")
    path = tmp_path / "model" / f"{file}.json"
    found = json.loads(path.read_text())
    inner = {name: v for name, v in change.items() if file == "config" and isinstance(v, dict)}
    change = change | {name: found[name] | v for name, v in inner.items()}
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
