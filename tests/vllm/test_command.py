"""`epd run --for vllm`: what it starts, and what it prints for vLLM."""

from __future__ import annotations

import json
import shlex
from contextlib import ExitStack
from pathlib import Path

import pytest

from epd.cli.main import parser_of
from epd.cli.parser import UsageError
from epd.cli.start.plan import StartPlan
from epd.cli.verbs.run import make_plan
from epd.config import ConfigError
from epd.model_files.checkpoint import ModelError
from epd.vllm import instance
from epd.vllm.command import check_startable, in_words, servers_of
from epd.vllm.instance import contract_of, plan


def planned(*flags: str) -> StartPlan:
    with ExitStack() as held:
        return make_plan(parser_of("run").parse(flags), held)


@pytest.mark.parametrize(
    ("flags", "encoders"),
    [
        (("--role", "encode"), ["e0"]),
        (("--topology", "2e"), ["e0", "e1"]),
        (("--topology", "1e2p1d"), ["e0"]),
    ],
)
def test_encoders_and_a_gateway_are_planned(
    tmp_path: Path, flags: tuple[str, ...], encoders: list[str]
) -> None:
    found = planned(*flags, "--for", "vllm", "--run-dir", str(tmp_path))
    assert found.gateway is not None
    assert [one.instance_id for one in found.instances] == encoders
    assert {one.roles for one in found.instances} == {("encode",)}


@pytest.mark.parametrize(
    "flags",
    [("--topology", "1epd"), ("--topology", "1pd"), ("--role", "prefill"), ("--role", "all")],
)
def test_encoders_are_apart(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--for goes with encoders apart"):
        planned(*flags, "--for", "vllm", "--run-dir", str(tmp_path))


def test_the_printed_command_joins_the_gateway(tmp_path: Path) -> None:
    found = planned(
        "--role", "encode", "--for", "vllm", "--port", "8123", "--run-dir", str(tmp_path)
    )
    (command,) = map(in_words, servers_of(found, "1e").values())
    words = shlex.split(command)
    assert words[:2] == ["vllm", "serve"] and "--enable-scale-out" in words
    extra = json.loads(words[words.index("--ec-transfer-config") + 1])["ec_connector_extra_config"]
    assert extra["run"] == f"--port 8123 --run-dir {tmp_path}"
    config = plan(extra["run"], words[2], words[words.index("--dtype") + 1])
    assert found.gateway is not None and config.gateway_endpoint == found.gateway.endpoint
    assert config.roles == ("prefill", "decode")
    assert config.model_dir == found.instances[0].model_dir


def test_prefill_and_decode_apart_have_a_command_each(tmp_path: Path) -> None:
    """Each reads back as an instance with its roles and name, and with ports of its own."""
    found = planned("--topology", "1e1p2d", "--for", "vllm", "--run-dir", str(tmp_path))
    configs, ports = [], set()
    for command in map(in_words, servers_of(found, "1e1p2d").values()):
        side, *words = shlex.split(command)
        kv = json.loads(words[words.index("--kv-transfer-config") + 1])
        assert kv["kv_connector"] == "NixlConnector" and kv["kv_buffer_device"] == "cpu"
        ec = json.loads(words[words.index("--ec-transfer-config") + 1])
        extra = ec["ec_connector_extra_config"]
        port = words[words.index("--port") + 1]
        assert extra["url"].endswith(f":{port}")
        ports |= {port, side}
        configs.append(plan(extra["run"], words[2], "bfloat16"))
    assert [one.roles for one in configs] == [("prefill",), ("decode",), ("decode",)]
    assert [one.instance_id for one in configs] == ["p0", "d0", "d1"]
    assert len(ports) == 6


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


def test_servers_to_start_are_for_this_host_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = planned("--topology", "1e1p1d", "--for", "vllm", "--run-dir", str(tmp_path))
    servers = servers_of(found, "1e1p1d", "--max-model-len 4096")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install vllm"):
        check_startable(servers)
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    started = check_startable(servers)
    assert set(started) == {"p0", "d0"}
    for server in started.values():
        assert server.words[0] == str(program)
        words = " ".join(server.words)
        assert "--max-model-len 4096" in words and "--host 127.0.0.1" in words
        assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in server.environment


def test_servers_are_started_beside_encoders_only(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--for vllm"):
        planned("--topology", "1e1pd", "--start-vllm", "--run-dir", str(tmp_path))
