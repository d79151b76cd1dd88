"""`epd run --for vllm`: what it starts, and what it prints for vLLM."""

from __future__ import annotations

import json
import shlex
from contextlib import ExitStack
from pathlib import Path

import pytest

from epd.cli.main import parser_of
from epd.cli.start.plan import StartPlan
from epd.cli.verbs.run import make_plan
from epd.config import ConfigError
from epd.model_files.checkpoint import ModelError
from epd.vllm import instance
from epd.vllm.command import serve_command
from epd.vllm.instance import contract_of, plan


def planned(*flags: str) -> StartPlan:
    with ExitStack() as held:
        return make_plan(parser_of("run").parse(flags), held)


@pytest.mark.parametrize(
    ("flags", "encoders"), [(("--role", "encode"), ["e0"]), (("--topology", "2e"), ["e0", "e1"])]
)
def test_encoders_and_a_gateway_are_planned(
    tmp_path: Path, flags: tuple[str, ...], encoders: list[str]
) -> None:
    found = planned(*flags, "--for", "vllm", "--run-dir", str(tmp_path))
    assert found.gateway is not None
    assert [one.instance_id for one in found.instances] == encoders
    assert {one.roles for one in found.instances} == {("encode",)}


@pytest.mark.parametrize(
    "flags", [("--topology", "1e1pd"), ("--role", "prefill"), ("--role", "all")]
)
def test_who_computes_prompts_is_vllm(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--for goes with encoders"):
        planned(*flags, "--for", "vllm", "--run-dir", str(tmp_path))


def test_the_printed_command_joins_the_gateway(tmp_path: Path) -> None:
    found = planned(
        "--role", "encode", "--for", "vllm", "--port", "8123", "--run-dir", str(tmp_path)
    )
    words = shlex.split(serve_command(found))
    assert words[:2] == ["vllm", "serve"] and "--enable-scale-out" in words
    extra = json.loads(words[words.index("--ec-transfer-config") + 1])["ec_connector_extra_config"]
    assert extra["run"] == "--port 8123"
    flags = f"{extra['run']} --run-dir {tmp_path}"
    config = plan(flags, words[2], words[words.index("--dtype") + 1])
    assert found.gateway is not None and config.gateway_endpoint == found.gateway.endpoint
    assert config.roles == ("prefill", "decode")
    assert config.model_dir == found.instances[0].model_dir


def test_the_contract_is_that_of_the_encoder(tmp_path: Path) -> None:
    config = plan(f"--run-dir {tmp_path}", "", "bfloat16")
    contract = contract_of(config)
    assert contract.dtype == "bfloat16"
    assert contract.row_nbytes == 2 * contract.row_width == 2 * 3 * contract.hidden


def test_models_that_a_grid_does_not_describe_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance, "GRID_FAMILIES", "epd.families.of_others")
    config = plan(f"--run-dir {tmp_path}", "", "float32")
    with pytest.raises(ModelError, match="Qwen2-VL"):
        contract_of(config)
