"""Layers of eight bits: the roundings, the layers that change, and what answers come to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from PIL import Image
from torch import nn

from epd.config import EngineConfig
from epd.engine.adapter import adapter_for
from epd.engine.factory import build_executor, build_language, build_vision
from epd.engine.kernels import kernels_for
from epd.engine.kernels.eight_bits import scaled
from epd.engine.language.kv_pool import SCALE_NBYTES, KvPart
from epd.engine.sharding import WHOLE, Collectives, Shard
from epd.engine.weights import fp8
from epd.engine.weights.fp8 import Fp8Linear
from epd.engine.weights.loading import load_stage
from epd.model_files.checkpoint import read_checkpoint
from epd.tiny import CHECKPOINT, RECEIPT, SAMPLES
from tests.engine.driver import Driver
from tests.engine.language.test_decoder import fuse
from tests.engine.test_equality import NEW_TOKENS, SLOWEST, cases
from tests.engine.tiny_models import VISION_FAMILIES

SPECIFIED = kernels_for("cpu")

CONFIG = EngineConfig(threads=1, kv_nbytes=16 << 20, quantization="fp8")
FAMILIES = ("qwen3_vl", "qwen2_5_vl", "llava_onevision", "qwen3_vl_moe", SLOWEST)


def eight_bits_of(plain: nn.Linear) -> Fp8Linear:
    layer = Fp8Linear.on_meta(plain, plain.weight.dtype)
    layer.take(plain.weight.data)
    return layer


def test_rows_keep_their_largest_and_round_the_rest() -> None:
    """Each row by itself; its largest number is exact, and the others are within half a step."""
    x = torch.randn(5, 64) * torch.tensor([1e-6, 1e-2, 1.0, 1e3, 0.0])[:, None]
    rows = SPECIFIED.scaled(x)
    assert rows.values.dtype == torch.float8_e4m3fn and rows.scales.shape == (5, 1)
    back = rows.values.float() * rows.scales
    peaks = x.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(back.gather(1, peaks), x.gather(1, peaks))
    error = (back - x).abs()
    # three bits of mantissa; below the smallest normal number a step has a fixed size
    assert bool((error <= (x.abs() / 16).maximum(rows.scales * 2**-10) * 1.001).all())
    assert not rows.values[4].float().any()
    alone = SPECIFIED.scaled(x[2:3])
    assert torch.equal(alone.values.float(), rows.values[2:3].float())


def test_what_is_not_finite_stays_so() -> None:
    x = torch.randn(3, 32)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    weight = SPECIFIED.scaled(torch.randn(16, 32))
    out = SPECIFIED.scaled_product(SPECIFIED.scaled(x), weight, None, torch.float32)
    assert out[0].isfinite().all()
    assert not out[1].isfinite().any() and not out[2].isfinite().any()


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_close_to_the_plain_one(bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(256, 96, bias=bias).requires_grad_(False)
    changed = eight_bits_of(plain)
    x = torch.randn(2, 7, 256)
    expected = plain(x)
    assert float((changed(x) - expected).norm() / expected.norm()) < 0.05
    torch.testing.assert_close(changed(x[:, :1]), changed(x)[:, :1])  # no row sees a neighbour
    exact = SPECIFIED.scaled(plain.weight.data)
    rows = SPECIFIED.scaled(x.flatten(0, 1))
    wide = (rows.values.double() * rows.scales) @ (exact.values.double() * exact.scales).t()
    wide = wide + plain.bias.double() if bias else wide
    torch.testing.assert_close(changed(x).flatten(0, 1), wide.float(), rtol=1e-5, atol=1e-5)


def test_side_by_side_is_the_same_and_held_once() -> None:
    torch.manual_seed(1)
    layers = [eight_bits_of(nn.Linear(64, size).requires_grad_(False)) for size in (32, 16, 16)]
    x = torch.randn(3, 64)
    expected = torch.cat([layer(x) for layer in layers], dim=-1)
    joined = Fp8Linear.side_by_side(layers)
    assert torch.equal(joined(x), expected)
    assert layers[1].weight.data_ptr() == joined.weight[32:].data_ptr()


def test_odd_sizes_and_strangers_stay() -> None:
    layer = nn.ModuleDict({"q_proj": nn.Linear(64, 40), "o_proj": nn.Linear(32, 64)})
    layer["gate"] = nn.Linear(64, 64)
    model = nn.ModuleDict({"stack": nn.ModuleDict({"layers": nn.ModuleList([layer])})})
    takers = fp8.exchange(model, model["stack"]["layers"], torch.float32)
    assert isinstance(layer["q_proj"], nn.Linear) and isinstance(layer["gate"], nn.Linear)
    assert takers == {"stack.layers.0.o_proj.weight": layer["o_proj"].take}


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 2, Collectives())], ids=["whole", "half"])
def test_weights_are_converted_one_by_one(
    load_format: str,
    shard: Shard,
    model_dir: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is read in more bits is let go before the next is."""
    adapter = adapter_for(read_checkpoint(model_dir("qwen3_vl")))
    taken: list[weakref.ref[torch.Tensor]] = []
    take = Fp8Linear.take

    def noted(self: Fp8Linear, weight: torch.Tensor) -> None:
        assert all(before() is None for before in taken)
        taken.append(weakref.ref(weight))
        take(self, weight)

    monkeypatch.setattr(Fp8Linear, "take", noted)
    plain, eight = (
        load_stage(
            adapter, "language", torch.bfloat16, "cpu", load_format, shard=shard, exchange=exchange
        )
        for exchange in (
            lambda model: {},
            lambda model: fp8.exchange(model, adapter.language_model(model).layers, torch.bfloat16),
        )
    )
    changed = {name: m for name, m in eight.named_modules() if isinstance(m, Fp8Linear)}
    assert len(changed) == len(taken) == 7 * len(adapter.language_model(eight).layers)
    for name, module in changed.items():
        expected = SPECIFIED.scaled(plain.get_submodule(name).weight)
        assert torch.equal(module.weight.view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(module.scales, expected.scales) and module.dtype == torch.bfloat16
    changed_weights = {f"{name}.weight" for name in changed}
    for name, parameter in plain.named_parameters():
        if name not in changed_weights:
            assert torch.equal(parameter, eight.get_parameter(name)), name


@pytest.mark.parametrize(
    "family",
    [
        "qwen2_5_vl",
        "qwen3_vl_moe",
        *(pytest.param(f, marks=pytest.mark.long) for f in ("qwen3_vl", "llava_onevision")),
        SLOWEST,
    ],
)
async def test_both_paths_say_the_same(family: str, model_dir: Callable[[str], Path]) -> None:
    """transformers' layers with exchanged modules, and the fused decoder with fused roundings; in
    chunks of any size, since no row depends on another."""
    directory = model_dir(family)
    executor = build_executor(CONFIG)
    vision = None
    if family in VISION_FAMILIES or family == "embedded":
        vision = build_vision(directory, CONFIG, executor)
    plain = Driver(directory, vision, build_language(directory, CONFIG, executor))
    language = build_language(directory, CONFIG, executor)
    changed = [m for m in language.model.modules() if isinstance(m, Fp8Linear)]
    assert len(changed) >= 4 * language.kv_layout.num_layers
    language.forward = fuse(language)
    fused = Driver(directory, vision, language)
    for prompt, images in cases(family):
        found: list[torch.Tensor] = []
        for serving in (plain, fused):
            request = await serving.request("r", prompt, images)
            found += serving.language.logits([request.next_step(4096)])
            serving.release([request])
        # a number next to the middle of two steps may go to either
        assert float((found[0] - found[1]).norm() / found[0].norm()) < 0.02
    texts = []
    for chunk in (4096, 16):
        requests = [
            await plain.request(str(i), prompt, images, max_tokens=NEW_TOKENS)
            for i, (prompt, images) in enumerate(cases(family))
        ]
        texts.append(await plain.run(requests, chunk))
        plain.release(requests)
    same = sum(a == b for a, b in zip(*texts, strict=True))
    assert same >= len(texts[0]) - 1


async def test_linear_attention_in_eight_bits(model_dir: Callable[[str], Path]) -> None:
    """Its large products are; what writes into states and what forgets is not.  Answers are near,
    and the same in chunks of any size."""
    directory, executor = model_dir("qwen3_5"), build_executor(CONFIG)
    languages = [
        build_language(directory, replace(CONFIG, quantization=kind), executor)
        for kind in ("", "fp8")
    ]
    names = [n.rpartition(".") for n, m in languages[1].model.named_modules() if _is_eight(m)]
    layers = {last for parent, _, last in names if parent.endswith(".linear_attn")}
    assert layers == {"in_proj_qkv", "in_proj_z", "out_proj"}
    plain, eight = (Driver(directory, None, language) for language in languages)
    for prompt, _ in cases("qwen3_5")[:2]:
        found = []
        for serving, chunk in ((plain, 4096), (eight, 4096), (eight, 5)):
            request = await serving.request("r", prompt, max_tokens=1)
            while request.computed + chunk < len(request.token_ids):
                await serving.step([request], chunk)
            found += serving.language.logits([request.next_step(chunk)])
            serving.release([request])
        # Wide random weights make more of a rounding than trained ones.
        assert 1e-3 < float((found[1] - found[0]).norm() / found[0].norm()) < 0.5
        assert float((found[2] - found[1]).norm() / found[1].norm()) < 0.02


def _is_eight(module: nn.Module) -> bool:
    return isinstance(module, Fp8Linear)


@pytest.mark.parametrize(
    "family", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.long), SLOWEST]
)
async def test_kv_in_eight_bits(family: str, model_dir: Callable[[str], Path]) -> None:
    """Near the plain pool; both paths alike; in chunks of any size, since what was stored is what
    is read; and half of the bytes."""
    directory = model_dir(family)
    config = EngineConfig(threads=1, kv_nbytes=16 << 20, kv_cache_dtype="fp8")
    executor = build_executor(config)
    vision = build_vision(directory, config, executor)
    languages = [
        build_language(directory, replace(config, kv_cache_dtype=kind), executor)
        for kind in ("auto", "fp8", "fp8")
    ]
    languages[2].forward = fuse(languages[2])
    plain, eight, fused = (Driver(directory, vision, language) for language in languages)
    layout, other = (language.kv_layout for language in languages[:2])
    assert other.dtype == "float8_e4m3fn" and layout != other  # who joins is asked for the same
    head = layout.head_dim
    assert other.block_nbytes * 4 * head == layout.block_nbytes * (head + SCALE_NBYTES)
    assert languages[1].num_blocks > 3 * languages[0].num_blocks  # of float32
    for prompt, images in cases(family):
        found = []
        for serving in (plain, eight, fused):
            request = await serving.request("r", prompt, images)
            found += serving.language.logits([request.next_step(4096)])
            serving.release([request])
        error = float((found[1] - found[0]).norm() / found[0].norm())
        assert 0 < error < 0.2, error
        assert float((found[2] - found[1]).norm() / found[1].norm()) < 0.02
    texts = []
    for chunk in (4096, 16):
        requests = [
            await eight.request(str(i), prompt, images, max_tokens=NEW_TOKENS)
            for i, (prompt, images) in enumerate(cases(family))
        ]
        texts.append(await eight.run(requests, chunk))
        eight.release(requests)
    same = sum(a == b for a, b in zip(*texts, strict=True))
    assert same >= len(texts[0]) - 1  # a number in the middle of two steps may go to either


@pytest.mark.parametrize(
    "family", ["kimi_k25", "gemma4", pytest.param("gemma4_moe", marks=pytest.mark.long)]
)
async def test_other_rows_in_eight_bits(
    family: str, model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent rows, and those of several kinds: what a pool of float32 says when rows that are put
    into it are rounded; in chunks, too."""
    directory = model_dir(family)
    config = EngineConfig(threads=1, kv_nbytes=16 << 20, kv_cache_dtype="fp8")
    executor = build_executor(config)
    vision = build_vision(directory, config, executor)
    eight, plain = (
        Driver(directory, vision, build_language(directory, replace(config, kv_cache_dtype=kind)))
        for kind in ("fp8", "auto")
    )
    assert eight.language.num_blocks > 3 * plain.language.num_blocks

    async def logits(serving: Driver, prompt: Any, images: Any) -> torch.Tensor:
        request = await serving.request("r", prompt, images)
        (found,) = serving.language.logits([request.next_step(4096)])
        serving.release([request])
        return found

    write = KvPart.write

    def rounding(part: KvPart, blocks: Any, offsets: Any, rows: torch.Tensor) -> torch.Tensor:
        values, scales = (rows, 1) if part.scales is not None else scaled(rows)
        return write(part, blocks, offsets, (values.float() * scales).to(rows.dtype))

    for case in cases(family)[::3]:
        found, unrounded = await logits(eight, *case), await logits(plain, *case)
        with monkeypatch.context() as patched:
            patched.setattr(KvPart, "write", rounding)
            expected = await logits(plain, *case)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert (found - unrounded).norm() > 0.01 * unrounded.norm()
        said = []
        for chunk in (4096, 48):
            request = await eight.request("r", *case, max_tokens=NEW_TOKENS)
            said += await eight.run([request], chunk)
            eight.release([request])
        assert said[0] == said[1]


def test_a_tower_stays_as_it_is() -> None:
    """Eight bits would take its rows more than twice as far from float32 as bfloat16 does: each of
    a layer's four products by itself, and all together more than five times."""
    picture = Image.open(SAMPLES / RECEIPT).convert("RGB")
    engines = {
        dtype: build_vision(CHECKPOINT, config, build_executor(config))
        for dtype in ("float32", "bfloat16")
        for config in (EngineConfig(dtype=dtype, threads=1, quantization="fp8"),)
    }
    patches = engines["float32"]._preprocess.patches(picture)

    def rows(dtype: str) -> torch.Tensor:
        (launched,) = engines[dtype]._run([patches])
        return launched[0].double()

    expected = rows("float32")
    usual = float((rows("bfloat16") - expected).norm())
    blocks = engines["bfloat16"].model.model.visual.blocks
    plain = {path: module for path, module in blocks.named_modules() if type(module) is nn.Linear}
    assert len(plain) == 4 * len(blocks)
    for ends, least in ("qkv", 2), ("proj", 2), ("linear_fc1", 2), ("linear_fc2", 2), ("", 5):
        for path, module in plain.items():
            exchanged = eight_bits_of(module) if path.endswith(ends) else module
            blocks.set_submodule(path, exchanged)
        assert float((rows("bfloat16") - expected).norm()) > least * usual, ends
