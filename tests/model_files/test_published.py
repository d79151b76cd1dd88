"""No published checkpoint can be downloaded here; all that is known of one is loaded instead.

Names and shapes of every supported family and size are planned without a byte; each layout is
written in small, in shards, with the files around it, and loaded stage by stage beside
transformers.
"""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from epd import tiny
from epd.api.prompts.chat import ChatRenderer
from epd.engine.adapter import ModelAdapter, adapter_for
from epd.engine.sharding import Collectives, Shard
from epd.engine.weights.loading import load_stage, plan_stage
from epd.families.registry import ADAPTERS, CHECKPOINTS, DECLARED
from epd.groups.device.tensor_parallel import MULTIPLE
from epd.media_files.video import video_settings
from epd.model_files.checkpoint import ModelError, read_checkpoint
from epd.model_files.config_sizes import Sizes, parameters
from epd.model_files.geometry import image_geometry
from tests.engine.conftest import drawn_image
from tests.engine.hf_video import make_processor
from tests.engine.tiny_models import WITH_STATES, WITHOUT_VIDEOS
from tests.model_files.published_checkpoints import (
    LAYOUTS,
    PUBLISHED,
    Published,
    config_of,
    reduced,
)
from tests.model_files.published_files import write_headers
from tests.model_files.published_tensors import tensors_of
from tests.test_imports import FOLDERS

SMALLEST = {p.family: name for name, p in reversed(PUBLISHED.items())}
WITH_IMAGES = [name for name in SMALLEST.values() if PUBLISHED[name].layout.files]
TIED_AND_NOT = ["Qwen/Qwen2-VL-2B-Instruct", "Qwen/Qwen2-VL-7B-Instruct"]
HUGE = ("kimi_k25", "deepseek_v3")
UNREAD: dict[str, str | tuple[str, ...]] = {  # beginnings of names
    "glm_ocr": "model.language_model.layers.16.",
    "deepseek_v3": "model.layers.61.",
    "paddleocr_vl": ("visual.vision_model.head.", "visual.vision_model.embeddings.packing_"),
}
OF_OTHER_PARTS = ["OpenGVLab/InternVL3_5-1B-HF", "OpenGVLab/InternVL3_5-241B-A28B-HF"]


def stages(adapter: ModelAdapter) -> list[str]:
    return ["vision", "language"] if adapter.has_vision else ["language"]


def test_every_family_is_on_record() -> None:
    assert all(pkgutil.resolve_name(place).model_type == kind for kind, place in ADAPTERS.items())
    sizes = [importlib.import_module(f"epd.families.{name}.sizes") for name in FOLDERS]
    assert sorted(kind for module in sizes for kind in module.FAMILIES) == sorted(ADAPTERS)
    assert set(LAYOUTS) == set(ADAPTERS) == {p.family for p in PUBLISHED.values()}


def test_the_registry_names_what_loads() -> None:
    """Each family, and of it what is on record; other names only say which class they are of."""
    made = {kind: names.split() for kind, names in CHECKPOINTS.items()}
    assert made == {k: [n for n, p in PUBLISHED.items() if p.family == k] for k in ADAPTERS}
    assert DECLARED.keys() <= ADAPTERS.keys()
    assert not {n for names in DECLARED.values() for n in names.split()} & PUBLISHED.keys()


@pytest.mark.parametrize(
    "name",
    [
        # Each of these takes as long as all others; a small one is loaded below.
        name
        if name in SMALLEST.values() and PUBLISHED[name].family not in HUGE
        else pytest.param(name, marks=pytest.mark.long)
        for name in PUBLISHED
    ],
)
def test_every_tensor_is_taken_or_skipped_by_name(name: str, tmp_path: Path) -> None:
    """In its full size: what both stages take, and what is skipped, is all that is stored."""
    published = PUBLISHED[name]
    config = config_of(published)
    tensors = tensors_of(published, config)
    assert len(tensors) == published.num_tensors
    assert sum(map(math.prod, tensors.values())) == published.num_parameters
    write_headers(tmp_path, tensors, num_files=3)
    (tmp_path / "config.json").write_text(json.dumps(config))
    adapter = adapter_for(read_checkpoint(tmp_path))
    taken: set[str] = set()
    asked = parameters(adapter.family, Sizes(tmp_path, config, adapter.family))
    for stage in stages(adapter):
        plan = plan_stage(adapter, stage)
        assert all(parameter.is_meta for parameter in plan.model.parameters())
        assert all(asked.pop(held) == like.shape for held, like in plan.wanted.items())
        read = {piece.stored for held in plan.wanted for piece in plan.sources[held]}
        assert not read & taken
        taken |= read
    assert set(asked) <= {"lm_head.weight"}  # tied
    skipped = {n for n in tensors if any(re.search(p, n) for p in adapter.family.skipped)} - taken
    assert taken | skipped == tensors.keys() and not taken & skipped
    of_others = UNREAD.get(published.family, "mtp.")
    unread = {n for n in tensors if n.endswith("inv_freq") or n.startswith(of_others)}
    if published.family == "gemma4":  # of layers that read others' keys and values
        text = config["text_config"]
        first = text["num_hidden_layers"] - text["num_kv_shared_layers"]
        own = re.compile(r"model\.language_model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.")
        unread = {n for n in tensors if (m := own.match(n)) and int(m[1]) >= first}
    assert skipped == unread


def write_small(directory: Path, name: str) -> dict[str, torch.Tensor]:
    """A small checkpoint in the layout of a published one: two shards, and the files around it."""
    published = PUBLISHED[name]
    config = reduced(published)
    shapes = tensors_of(published, config)
    write_headers(directory, shapes, num_files=2)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    generator = torch.Generator().manual_seed(1)
    tensors = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    for file in set(index["weight_map"].values()):
        held = {n: t for n, t in tensors.items() if index["weight_map"][n] == file}
        save_file(held, directory / file, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    write_companions(directory, published)
    return tensors


def write_companions(directory: Path, published: Published) -> None:
    layout = published.layout
    for file, content in layout.files.items():
        (directory / file).write_text(json.dumps(content))
    for file in layout.others:
        (directory / file).write_text("{}")  # that of another loader, unless it is copied below
    settings = json.loads((tiny.CHECKPOINT / "tokenizer_config.json").read_text())
    shutil.copyfile(tiny.CHECKPOINT / "tokenizer.json", directory / "tokenizer.json")
    template = {"chat_template": (tiny.CHECKPOINT / "chat_template.jinja").read_text()}
    if layout.template == "tokenizer_config.json":
        settings |= template
    else:
        (directory / layout.template).write_text(json.dumps(template))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


# But for the family whose made checkpoints have the published names (tests/engine).
LOADED = [name for name in SMALLEST.values() if PUBLISHED[name].family != "deepseek_ocr2"]


@pytest.mark.parametrize("name", [*LOADED, *TIED_AND_NOT, *OF_OTHER_PARTS])
def test_each_layout_loads_as_in_transformers(name: str, tmp_path: Path) -> None:
    """Transformers' own mapping of old names, transposed experts and tied heads is the judge."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    write_small(tmp_path, name)
    adapter = adapter_for(read_checkpoint(tmp_path))
    auto: Any = AutoModelForImageTextToText if adapter.has_vision else AutoModelForCausalLM
    whole, report = auto.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    parameters = dict(whole.named_parameters(remove_duplicate=False))
    seen: set[str] = set()
    for stage in stages(adapter):
        for held, value in load_stage(adapter, stage, torch.float32, "cpu").named_parameters(
            remove_duplicate=False
        ):
            assert torch.equal(value, parameters[held]), held
            seen.add(held)
    assert seen == parameters.keys()


@pytest.mark.parametrize("name", SMALLEST.values())
def test_the_gateway_reads_the_files_around_it(name: str, tmp_path: Path) -> None:
    """Template and tokenizer from where this family keeps them."""
    write_small(tmp_path, name)
    renderer = ChatRenderer(tmp_path)
    content: Any = "Hello"
    if renderer.image_token_id is not None:
        content = [{"type": "image_url"}, {"type": "text", "text": "Hello"}]
    text = renderer.render([{"role": "user", "content": content}])
    assert "Hello" in text and text.endswith("<|im_start|>assistant\n")
    if renderer.image_token_id is not None:
        assert renderer.encode(text, add_special_tokens=False).count(262) == 1


@pytest.mark.parametrize(
    "name", [n for n in SMALLEST.values() if LAYOUTS[PUBLISHED[n].family].files]
)
@pytest.mark.parametrize(
    "size", [(640, 480), (31, 1000), pytest.param((2500, 1900), marks=pytest.mark.long)]
)
def test_rows_of_published_processors(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    """What the gateway counts with the published settings is what the processor makes with them."""
    published = PUBLISHED[name]
    write_headers(tmp_path, {}, num_files=1)
    (tmp_path / "config.json").write_text(json.dumps(config_of(published)))
    write_companions(tmp_path, published)
    checkpoint = read_checkpoint(tmp_path, weights=False)
    adapter = adapter_for(checkpoint)
    geometry = image_geometry(checkpoint.config, checkpoint.preprocessor, *size)
    patches, grid = adapter.to_patches(adapter.image_processor(), drawn_image(1, *size))
    assert grid == geometry.grid_thw
    if published.family in ("idefics3", "smolvlm"):
        assert len(patches) == geometry.num_runs
    elif published.family == "internvl":
        assert len(patches) * 32**2 == geometry.num_patches
    elif published.family != "llava_onevision":  # its rows are known after the tower
        assert len(patches) == geometry.num_patches


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_videos_under_published_settings(name: str, tmp_path: Path) -> None:
    """Older releases say it in the file of images, newer ones in one of its own."""
    published = PUBLISHED[name]
    write_headers(tmp_path, {}, num_files=1)
    (tmp_path / "config.json").write_text(json.dumps(config_of(published)))
    write_companions(tmp_path, published)
    checkpoint = read_checkpoint(tmp_path, weights=False)
    ours = video_settings(checkpoint.config, checkpoint.video_preprocessor)
    if published.family in WITHOUT_VIDEOS:
        assert ours is None
        return
    assert ours is not None
    theirs = make_processor(published.family, dict(checkpoint.video_preprocessor))
    if published.family == "internvl":
        assert ours.sizes == {"image": theirs.size["height"]}
    elif published.family == "gemma4":
        names = ("patch_size", "max_soft_tokens", "num_frames")
        assert [getattr(ours, n) for n in names] == [getattr(theirs, n) for n in names]
        assert ours.merge_size == theirs.pooling_kernel_size
    else:
        assert (ours.min_pixels, ours.max_pixels, ours.patch_size, ours.fps) == (
            theirs.size["shortest_edge"], theirs.size["longest_edge"], theirs.patch_size,
            theirs.fps,
        )  # fmt: skip
    assert list(ours.image_mean) == list(theirs.image_mean)


@pytest.mark.parametrize("section", ["image_processor", "video_processor"])
def test_newer_releases_keep_all_processors_in_one_file(section: str, tmp_path: Path) -> None:
    """A directory that was saved again has both; transformers takes the newer one, and so do we."""
    write_headers(tmp_path, {}, num_files=1)
    published = PUBLISHED[SMALLEST["qwen3_vl"]]
    (tmp_path / "config.json").write_text(json.dumps(config_of(published)))
    write_companions(tmp_path, published)
    (tmp_path / "processor_config.json").write_text(json.dumps({section: {"patch_size": 7}}))
    found = read_checkpoint(tmp_path, weights=False)
    sizes = {
        "image_processor": found.preprocessor["patch_size"],
        "video_processor": found.video_preprocessor["patch_size"],
    }
    assert sizes.pop(section) == 7 and set(sizes.values()) == {16}


def test_only_the_slow_tokenizer_is_refused(tmp_path: Path) -> None:
    write_small(tmp_path, SMALLEST["qwen3_vl"])
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        ChatRenderer(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [name for name, found in PUBLISHED.items() if found.family not in (*WITH_STATES, "gemma4")],
)
def test_eight_ranks_share_each_in_its_full_size(name: str, tmp_path: Path) -> None:
    """As evenly as its heads allow, in sizes that products of matrices take, but for a vocabulary
    that has none."""
    published = PUBLISHED[name]
    config = config_of(published)
    write_headers(tmp_path, tensors_of(published, config), num_files=1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    adapter = adapter_for(read_checkpoint(tmp_path), "sdpa")
    whole = {n: t.numel() for n, t in plan_stage(adapter, "language").wanted.items()}
    text = config.get("text_config", config)
    for rank in (0, 7):
        plan = plan_stage(adapter, "language", shard=Shard(rank, 8, Collectives()))
        held = dict(plan.model.named_parameters())
        odd = {n for n in plan.cuts if any(size % MULTIPLE for size in held[n].shape[-2:])}
        assert not odd or (odd == {"lm_head.weight"} and text["vocab_size"] % MULTIPLE)
        cut = plan.cuts.keys() & whole.keys()
        share = sum(held[n].numel() for n in cut) / sum(whole[n] for n in cut)
        assert 0.11 < share < 0.16, share
        left = sum(size for n, size in whole.items() if n not in cut)
        embeddings = sum(size for n, size in whole.items() if "embed_tokens" in n)
        assert left < 1.01 * embeddings + sum(
            size for n, size in whole.items() if ".mlp.gate." in n or "_a_proj" in n
        )
