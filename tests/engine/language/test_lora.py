"""Adapters mixed in one batch answer as each of them merged into the model, and as PEFT."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from epd.config import ConfigError, EngineConfig, LoraConfig
from epd.engine.base import StepFailure
from epd.engine.factory import build_executor, build_language
from epd.engine.language.forward import FusedForward
from epd.engine.sharding import WHOLE, Shard
from epd.model_files.checkpoint import ModelError
from epd.model_files.lora import read_adapter
from tests.engine.adapters import LAYERS, make_adapter, merge
from tests.engine.conftest import CONFIG, chat, drawn_image
from tests.engine.driver import Driver, Request
from tests.engine.language.test_decoder import fuse
from tests.engine.language.test_graphs import Again
from tests.engine.reference import reference_generate, reference_inputs, reference_model

NEW_TOKENS = 8
KINDS: tuple[dict[str, Any], ...] = (
    {"targets": LAYERS + "(q_proj|v_proj)"},
    {"targets": LAYERS + r"\w+_proj", "rank": 8, "alpha": 24},
    {"targets": LAYERS + "(o_proj|down_proj)", "rank": 2, "alpha": 6, "use_rslora": True},
    {"targets": r".*layers\.1\.(self_attn|mlp)\.(k_proj|up_proj)", "rank": 3, "alpha": 7.5},
)
OTHERS = ("qwen3", "qwen2_5_vl", "qwen3_vl", "internvl", "mistral3", "glm_ocr")
FAMILIES = ["llama", "qwen2_vl", *(pytest.param(f, marks=pytest.mark.long) for f in OTHERS)]


@pytest.fixture(scope="module")
def adapters(
    model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[Path]]:
    made: dict[str, list[Path]] = {}

    def of(family: str) -> list[Path]:
        if family not in made:
            place = tmp_path_factory.mktemp(family)
            made[family] = [
                make_adapter(place / str(seed), model_dir(family), seed, **kind)
                for seed, kind in enumerate(KINDS)
            ]
        return made[family]

    return of


def serving(
    plain: Driver,
    *modules: Path,
    config: EngineConfig = CONFIG,
    is_fused: bool = False,
    shard: Shard = WHOLE,
    **lora: Any,
) -> Driver:
    """The same vision engine, and a language engine with these adapters."""
    texts = tuple(f"a{i}={path}" for i, path in enumerate(modules))
    config = msgspec.structs.replace(config, lora=LoraConfig(enabled=True, modules=texts, **lora))
    language = build_language(plain.model_dir, config, build_executor(config), 16, shard=shard)
    if is_fused:
        bank, language.forward = language.bank, fuse(language)
        language.forward.bank = bank
    return Driver(plain.model_dir, plain.vision, language)


def adapted(request: Request, adapter: str) -> Request:
    """Each of its steps names the adapter."""
    plain = request.next_step
    request.next_step = lambda chunk: replace(plain(chunk), adapter=adapter)  # type: ignore[method-assign]
    return request


def prompts_of(*, sees: bool) -> list[tuple[Any, list[Any]]]:
    """For each adapter, and for who has none; the first two are equal."""
    texts = ["hello there", "hello there", "What is 2 + 2?", "and 3 + 3?", "hello there"]
    prompts: list[tuple[Any, list[Any]]] = [(chat(text), []) for text in texts]
    if sees:
        prompts[2] = chat((1, "what is it?")), [drawn_image(1, 64, 64)]
    return prompts


def merged(directory: Path, made: list[Path], place: Path, *, sees: bool) -> list[list[int]]:
    """What each says merged into the weights, by transformers; the last one has none."""
    models = [merge(place / f"m{i}", directory, adapter) for i, adapter in enumerate(made)]
    asked = zip([*models, directory], prompts_of(sees=sees), strict=True)
    return [reference_generate(model, *prompt, NEW_TOKENS) for model, prompt in asked]


async def ask_all(mixed: Driver, chunk: int) -> list[list[int]]:
    names = [*mixed.language.adapters, ""]
    requests = [
        adapted(await mixed.request(str(i), prompt, images, max_tokens=NEW_TOKENS), names[i])
        for i, (prompt, images) in enumerate(prompts_of(sees=mixed.vision is not None))
    ]
    answers = await mixed.run(requests, chunk)
    mixed.release(requests)
    return answers


@pytest.mark.parametrize("is_fused", [False, True], ids=["seam", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_four_in_one_batch_equal_each_alone(
    family: str,
    is_fused: bool,
    driver: Callable[[str], Driver],
    adapters: Callable[[str], list[Path]],
    tmp_path: Path,
) -> None:
    """The fifth has none.  In chunks and in one; what is fused is captured, too."""
    if is_fused and family == "glm_ocr":
        pytest.skip("its layers have no fused form")
    plain = driver(family)
    sees = plain.vision is not None
    golden = merged(plain.model_dir, adapters(family), tmp_path, sees=sees)
    assert golden[0] != golden[1] != golden[4] != golden[0]  # of one prompt
    mixed = serving(plain, *adapters(family), is_fused=is_fused)
    for chunk in (5, 4096):
        assert await ask_all(mixed, chunk) == golden, f"chunks of {chunk}"
    if isinstance(forward := mixed.language.forward, FusedForward):
        again = Again()
        forward.capture(again, max_running=8, max_prompt_tokens=256)
        assert await ask_all(mixed, 16) == golden, "captured"
        assert again.replays > NEW_TOKENS


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # by PEFT itself
@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
async def test_they_equal_peft(
    family: str, driver: Callable[[str], Driver], tmp_path: Path
) -> None:
    """Its own files, names, patterns and sums."""
    peft = pytest.importorskip("peft")
    plain = driver(family)
    golden, places = [], []
    for seed, kind in enumerate(KINDS):
        model = _with_peft(peft, plain.model_dir, seed, kind, tmp_path / str(seed))
        places.append(tmp_path / str(seed))
        inputs = reference_inputs(plain.model_dir, chat("hello there"), [], ())
        with torch.inference_mode():
            said = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        golden.append(said[0, inputs["input_ids"].shape[1] :].tolist())
    mixed = serving(plain, *places)
    requests = [
        adapted(await mixed.request(name, chat("hello there"), max_tokens=NEW_TOKENS), name)
        for name in mixed.language.adapters
    ]
    assert await mixed.run(requests, 7) == golden


def _with_peft(peft: Any, model_dir: Path, seed: int, kind: dict[str, Any], place: Path) -> Any:
    import copy

    config = peft.LoraConfig(
        r=kind.get("rank", 4),
        lora_alpha=kind.get("alpha", 8),
        target_modules=kind["targets"],
        use_rslora=kind.get("use_rslora", False),
        alpha_pattern={"v_proj": 20},
        rank_pattern={"q_proj": 5},
    )
    model = peft.get_peft_model(copy.deepcopy(reference_model(model_dir)), config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    model.save_pretrained(place)
    return model


@pytest.mark.parametrize("quantization", ["", "fp8"])
async def test_a_bystander_has_the_same_bits(
    quantization: Any, driver: Callable[[str], Driver], adapters: Callable[[str], list[Path]]
) -> None:
    """In one batch with adapters or without, and in an engine that knows none."""
    config = msgspec.structs.replace(CONFIG, quantization=quantization)
    mixed = serving(driver("llama"), *adapters("llama"), config=config, is_fused=True)
    plain = serving(driver("llama"), config=config, is_fused=True)
    plain.language.forward.bank = None
    one = await mixed.request("one", chat("hello there"))
    other = await mixed.request("other", chat("and 3 + 3?"))
    first = mixed.language.adapters[1]
    steps = [one.next_step(4096), replace(other.next_step(4096), adapter=first)]
    alone = [one.next_step(4096), other.next_step(4096)]
    with_adapter, without = mixed.language.logits(steps), mixed.language.logits(alone)
    assert torch.equal(with_adapter[0], without[0])
    assert not torch.equal(with_adapter[1], without[1])
    assert torch.equal(without, plain.language.logits(alone))


async def test_an_adapter_that_is_not_held_fails_alone(
    driver: Callable[[str], Driver], adapters: Callable[[str], list[Path]]
) -> None:
    mixed = serving(driver("llama"), *adapters("llama")[:1])
    requests = [await mixed.request(name, chat("hello")) for name in ("one", "other")]
    steps = [requests[0].next_step(99), replace(requests[1].next_step(99), adapter="0" * 32)]
    fine, wrong = mixed.language.run(steps).outcomes
    assert not isinstance(fine, StepFailure)
    assert wrong == StepFailure("its adapter is not held here")
    plain = driver("llama").language.run(steps[1:]).outcomes
    assert plain == [wrong]


async def test_one_is_dropped_and_another_held(
    driver: Callable[[str], Driver], adapters: Callable[[str], list[Path]]
) -> None:
    """In the same place; what the first one was cannot be read any more."""
    first, second = adapters("llama")[:2]
    bank = serving(driver("llama"), first, max_loras=1).language.bank
    assert bank is not None
    (digest,) = bank.held
    with pytest.raises(ModelError, match="--max-loras"):
        bank.hold(*bank.read(second))
    bank.drop(digest)
    assert bank.held == ()
    bank.hold(*bank.read(second))
    assert len(bank.held) == 1 and bank.held != (digest,)


# --- refused --------------------------------------------------------------------------------------


@pytest.fixture
def damaged(adapters: Callable[[str], list[Path]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(adapters("llama")[0], tmp_path / "damaged"))


def test_another_models_adapter_is_refused(
    driver: Callable[[str], Driver], adapters: Callable[[str], list[Path]]
) -> None:
    with pytest.raises(ModelError, match="none of the decoder's linear layers"):
        serving(driver("llama"), adapters("qwen2_vl")[0])


def test_another_size_is_refused(driver: Callable[[str], Driver], damaged: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = damaged / "adapter_model.safetensors"
    save_file({n: t.repeat(1, 2) if "_A" in n else t for n, t in load_file(file).items()}, file)
    with pytest.raises(ModelError, match="another model's adapter"):
        serving(driver("llama"), damaged)


def test_numbers_that_are_not_finite_are_refused(
    driver: Callable[[str], Driver], damaged: Path
) -> None:
    from safetensors.torch import load_file, save_file

    file = damaged / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, file)
    with pytest.raises(ModelError, match="not finite"):
        serving(driver("llama"), damaged)


@pytest.mark.parametrize(
    ("family", "match"), [("qwen3_vl_moe", "has experts"), ("qwen3_5", "common attention")]
)
def test_a_model_that_is_not_dense_is_refused(
    family: str, match: str, driver: Callable[[str], Driver]
) -> None:
    with pytest.raises(ConfigError, match=match):
        serving(driver(family))


def test_its_config_is_read_by_name(damaged: Path, driver: Callable[[str], Driver]) -> None:
    path = damaged / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_dora": True}))
    with pytest.raises(ModelError, match="use_dora True is not served"):
        serving(driver("llama"), damaged)


async def test_adapters_come_and_go_while_it_serves(
    driver: Callable[[str], Driver], adapters: Callable[[str], list[Path]], tmp_path: Path
) -> None:
    """What comes later answers as what was there at the start; what goes fails alone, and its
    memory is given back; a file that changes afterwards changes nothing."""
    plain = driver("llama")
    places = adapters("llama")
    root = tmp_path / "root"
    for name, place in zip("abcd", places, strict=True):
        shutil.copytree(place, root / name)
    golden = await ask_all(serving(plain, *places), 4096)
    mixed = serving(plain, places[0], runtime_dir=str(root))
    language = mixed.language
    (first,) = language.adapters
    digests = [first, *(read_adapter(root / name, 16).digest for name in "bcd")]
    paths = dict(zip(digests, ("", "b", "c", "d"), strict=True))
    assert await language.hold_adapters(paths) == {}
    assert language.adapters == tuple(digests)
    for name in "bcd":
        (root / name / "adapter_model.safetensors").write_bytes(b"")
    assert await ask_all(mixed, 4096) == golden
    going = language.hold_adapters({digests[1]: "b"})
    assert language.adapters == (digests[1],)  # for new requests, before anything has gone
    assert await going == {}
    requests = [await mixed.request(str(i), chat("hello"), [], max_tokens=2) for i in range(2)]
    steps = [replace(r.next_step(99), adapter=a) for r, a in zip(requests, digests, strict=False)]
    wrong, right = (await language.step(steps)).outcomes
    assert wrong == StepFailure("its adapter is not held here")
    assert not isinstance(right, StepFailure)
    assert language.bank is not None
    taken = [(layer.low.ranks > 0).any(-1) for layer in language.bank._linears.values()]
    assert max(int(places.sum()) for places in taken) == 1  # the others are free again


async def test_what_cannot_be_held_is_said_and_the_rest_is_held(
    driver: Callable[[str], Driver], adapters: Callable[[str], list[Path]], tmp_path: Path
) -> None:
    places, root = adapters("llama"), tmp_path / "root"
    for name, place in zip("abc", places, strict=False):
        shutil.copytree(place, root / name)
    shutil.copytree(adapters("qwen2_vl")[0], root / "other")
    language = serving(driver("llama"), max_loras=2, runtime_dir=str(root)).language
    a, b, c, other = (read_adapter(root / name, 16).digest for name in ("a", "b", "c", "other"))
    told = await language.hold_adapters({other: "other", a: "a", "0" * 32: "", b: "a"})
    assert language.adapters == (a,)
    assert "none of the decoder's linear layers" in told[other]
    assert told["0" * 32] == "this instance does not have the adapter from its start"
    assert told[b] == "a has other files at this instance than at the gateway"
    assert str(root) not in " ".join(told.values())
    full = await language.hold_adapters({a: "a", b: "b", c: "c"})
    assert list(full) == [c] and "--max-loras" in full[c]
    assert language.adapters == (a, b)


async def test_lists_are_applied_in_their_order(
    driver: Callable[[str], Driver], adapters: Callable[[str], list[Path]], tmp_path: Path
) -> None:
    """Whatever is read when the next one comes."""
    root = tmp_path / "root"
    for name, place in zip("ab", adapters("llama"), strict=False):
        shutil.copytree(place, root / name)
    language = serving(driver("llama"), runtime_dir=str(root)).language
    a, b = (read_adapter(root / name, 16).digest for name in "ab")
    lists = [{a: "a", b: "b"}, {}, {b: "b"}, {a: "a"}]
    assert await asyncio.gather(*map(language.hold_adapters, lists)) == [{}] * 4
    assert language.adapters == (a,)
