"""Embeddings of every layer in host memory: the same answers, and who holds the bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from epd.cli.start.preflight import check_memory, weights_nbytes
from epd.config import ConfigError, InstanceConfig
from epd.engine.device.memory_plan import held_nbytes
from epd.engine.factory import build_language, build_vision
from epd.engine.kernels import kernels_for
from epd.engine.weights.host_rows import HostEmbedding
from tests.engine.conftest import CONFIG
from tests.engine.driver import Driver
from tests.engine.language.test_gemma import LONG, PROMPT
from tests.engine.reference import reference_generate

HOSTED = structs.replace(CONFIG, per_layer_embeddings="host")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_what_the_module_of_transformers_gives(dtype: torch.dtype) -> None:
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextScaledWordEmbedding

    plain = Gemma4TextScaledWordEmbedding(50, 24, 0, embed_scale=8**0.5)
    plain = plain.to(dtype).requires_grad_(False)
    hosted, ids = HostEmbedding(plain, "cpu"), torch.tensor([[0, 3], [49, 3]], dtype=torch.int32)
    hosted.weight = torch.nn.Parameter(
        hosted.make(plain.weight.shape, dtype).copy_(plain.weight), requires_grad=False
    )
    assert torch.equal(hosted(ids), plain(ids))
    assert torch.equal(kernels_for("cpu").gather_rows(plain.weight, ids, 1.0), plain.weight[ids])


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
async def test_answers_are_those_of_a_table_on_the_device(
    load_format: Any, model_dir: Callable[[str], Path], driver: Callable[[str], Driver]
) -> None:
    """And of transformers, beside pictures, whose placeholders are read as padding."""
    directory = model_dir("gemma4")
    config = structs.replace(HOSTED, load_format=load_format)
    language = build_language(directory, config)
    table = language.model.model.language_model.embed_tokens_per_layer
    assert isinstance(table, HostEmbedding)
    serving = Driver(directory, build_vision(directory, CONFIG), language)
    if load_format == "dummy":
        plain = build_language(directory, structs.replace(CONFIG, load_format="dummy"))
        on_device = plain.model.model.language_model.embed_tokens_per_layer
        assert torch.equal(table.weight, on_device.weight)
        return
    golden = [reference_generate(directory, *case, 10) for case in (LONG, PROMPT)]
    for chunk in (7, 4096):
        requests = [
            await serving.request(str(i), *case, max_tokens=10)
            for i, case in enumerate((LONG, PROMPT))
        ]
        assert await serving.run(requests, chunk) == golden
        serving.release(requests)
    table.weight.data.mul_(-1)
    request = await serving.request("r", *LONG, max_tokens=10)
    assert await serving.run([request], 4096) != golden[:1]  # it is this table that is read
    serving.release([request])


@pytest.mark.parametrize("family", ["gemma4_moe", "qwen3_vl"])
def test_a_model_without_such_a_table_is_refused(
    family: str, model_dir: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=r"has no per-layer embeddings; leave"):
        build_language(model_dir(family), HOSTED)


def test_the_host_holds_what_the_device_does_not(model_dir: Callable[[str], Path]) -> None:
    """Before anything starts, of each rank."""
    engine = structs.replace(CONFIG, kv_nbytes=0, device="cuda:0")
    plain = InstanceConfig(
        instance_id="pd0", roles=("prefill", "decode"), model_dir=str(model_dir("gemma4")),
        engine=engine,
    )  # fmt: skip
    hosted = structs.replace(plain, engine=structs.replace(HOSTED, kv_nbytes=0, device="cuda:0"))
    model = build_language(model_dir("gemma4"), HOSTED).model
    whole = weights_nbytes(model_dir("gemma4"), 4)["language"]
    table = model.model.language_model.embed_tokens_per_layer.weight.nbytes
    assert table > whole // 40 and held_nbytes(model, "cpu") == held_nbytes(model)
    for one, least in ((plain, whole), (hosted, whole - table)):
        check_memory("cuda:0", [one], whole, 1.0)
        with pytest.raises(ConfigError, match="cuda:0 has"):
            check_memory("cuda:0", [one], least - 1, 1.0)
    check_memory("cuda:0", [hosted], whole - table, 1.0)
    check_memory("cpu", [hosted], table, 1.0)
    twice = [hosted, structs.replace(hosted, instance_id="pd1")]
    with pytest.raises(ConfigError, match="cpu has"):
        check_memory("cpu", twice, 2 * table - 1, 1.0)
    check_memory("cpu", twice, 2 * table, 1.0)  # though their KV pools are the device's
