"""What a command would start, and what it refuses before anything has been started."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.cli.configure import names
from epd.cli.configure.model_check import bundled_model, check_model
from epd.cli.configure.names import default_prefix
from epd.cli.configure.settings import build_settings
from epd.cli.main import main
from epd.cli.start.plan import LogOptions, Placing, StartPlan, plan_role, plan_topology
from epd.cli.start.ports import check_listen
from epd.cli.verbs import run
from epd.config import ConfigError, EngineConfig, LoraConfig, Settings
from epd.model_files.checkpoint import ModelError, read_config
from epd.transport.base import TransportError
from epd.transport.bus.curve import ClusterKey
from epd.transport.codec import check_instance_id
from tests.model_files.test_lora import write as adapter

LOG = LogOptions()


def topology(
    text: str, tmp_path: Path, settings: Settings | None = None, join: str = "", listen: str = ""
) -> StartPlan:
    return plan_topology(text, settings or Settings(), Placing(join, listen, str(tmp_path)), LOG)


def role(
    text: str, tmp_path: Path, join: str = "", listen: str = "", instance_id: str = ""
) -> StartPlan:
    return plan_role(text, instance_id, Settings(), Placing(join, listen, str(tmp_path)), LOG)


def with_adapters(*modules: str, **lora: object) -> Settings:
    engine = EngineConfig(lora=LoraConfig(**{"enabled": True, "modules": modules, **lora}))  # type: ignore[arg-type]
    return Settings(engine=engine)


def test_adapters_are_looked_at_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter(tmp_path / "pirate")
    monkeypatch.chdir(tmp_path)
    plan = topology("1e1p1d", tmp_path, with_adapters("a=pirate", runtime_dir="."))
    assert plan.gateway is not None
    for config in (plan.gateway, *plan.instances):
        assert config.engine.lora.modules == (f"a={tmp_path}/pirate",)
        assert config.engine.lora.runtime_dir == str(tmp_path)
    for wrong, match in (
        (with_adapters("a=pirate", enabled=False), "need --enable-lora"),
        (with_adapters(enabled=False, runtime_dir="."), "need --enable-lora"),
        (with_adapters("a=nowhere"), "nowhere does not exist"),
        (with_adapters("epd-tiny=pirate"), "the model itself has this name"),
        (with_adapters("a=pirate", "b=pirate", max_loras=1), "names 2 adapters"),
        (with_adapters("a=pirate", max_lora_rank=1), "raise --max-lora-rank"),
    ):
        with pytest.raises((ConfigError, ModelError), match=match):
            topology("1e1p1d", tmp_path, wrong)


def test_a_topology_is_a_gateway_and_an_instance_each(tmp_path: Path) -> None:
    plan = topology("2e1pd", tmp_path)
    gateway = f"ipc://{tmp_path}/8000/gateway.sock"
    assert plan.gateway is not None
    assert plan.gateway.endpoint == gateway
    assert plan.gateway.model_dir == str(bundled_model())
    assert [(i.instance_id, i.roles) for i in plan.instances] == [
        ("e0", ("encode",)),
        ("e1", ("encode",)),
        ("pd0", ("prefill", "decode")),
    ]
    assert {i.gateway_endpoint for i in plan.instances} == {gateway}
    assert plan.instances[2].endpoint == f"ipc://{tmp_path}/8000/pd0.sock"
    assert (tmp_path / "8000").stat().st_mode & 0o777 == 0o700


def test_processes_started_one_by_one_find_each_other_by_port(tmp_path: Path) -> None:
    gateway = role("gateway", tmp_path).gateway
    worker = role("prefill+decode", tmp_path).instances[0]
    assert gateway is not None
    assert worker.gateway_endpoint == gateway.endpoint


def test_all_has_a_gateway_and_every_role_in_one(tmp_path: Path) -> None:
    plan = role("all", tmp_path)
    assert plan.gateway is not None and plan.gateway.expected_instances == 1
    assert [i.roles for i in plan.instances] == [("encode", "prefill", "decode")]


@pytest.mark.parametrize("what", ["gateway", "all", "1epd"])
def test_a_gateway_knows_whether_its_command_starts_instances(what: str, tmp_path: Path) -> None:
    plan = topology(what, tmp_path) if what == "1epd" else role(what, tmp_path)
    assert plan.gateway is not None and plan.gateway.starts_instances == (what != "gateway")


def test_joining_brings_no_gateway(tmp_path: Path) -> None:
    plan = topology("1e1pd", tmp_path, join="tcp://127.0.0.1:7000")
    assert plan.gateway is None
    assert {i.endpoint for i in plan.instances} == {"tcp://127.0.0.1:*"}
    assert not [path for path in tmp_path.rglob("*") if not path.is_dir()]  # no socket lies here


@pytest.mark.parametrize("part", ["1e1p", "2d", "1e"])
def test_a_part_of_a_topology_joins_or_can_be_joined(part: str, tmp_path: Path) -> None:
    endpoint = "tcp://127.0.0.1:7000"
    assert topology(part, tmp_path, join=endpoint).gateway is None
    gateway = topology(part, tmp_path, listen=endpoint).gateway
    assert gateway is not None and gateway.endpoint == endpoint and gateway.starts_instances
    for listen in ("", f"ipc://{tmp_path}/8000/gateway.sock"):
        with pytest.raises(ConfigError, match="could answer nothing"):
            topology(part, tmp_path, listen=listen)


def test_where_a_process_cannot_listen_is_found_before_it_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"{endpoint} is in use.*--listen tcp://127.0.0.1:"):
            check_listen(endpoint)
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7 is no address of this host"):
        check_listen("tcp://203.0.113.7:*")
    with pytest.raises(TransportError, match="tcp://ADDRESS:7000"):
        check_listen("tcp://0.0.0.0:7000")
    for fine in ("tcp://127.0.0.1:*", "tcp://localhost:0", "ipc:///nowhere/gateway.sock"):
        check_listen(fine)


def test_between_hosts_the_instances_listen_where_the_gateway_does(tmp_path: Path) -> None:
    key = tmp_path / "key.json"
    ClusterKey.generate().save(str(key))
    settings = Settings(cluster_key=str(key))
    plan = topology("1e1pd", tmp_path, settings, listen="tcp://10.0.0.1:7000")
    assert plan.gateway is not None
    assert plan.gateway.endpoint == "tcp://10.0.0.1:7000"
    assert {i.endpoint for i in plan.instances} == {"tcp://10.0.0.1:*"}
    assert {i.cluster_key for i in plan.instances} == {str(key)}


def test_without_a_key_nothing_listens_beyond_this_host(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="--cluster-key"):
        topology("1e1pd", tmp_path, listen="tcp://10.0.0.1:7000")


@pytest.mark.parametrize(
    ("text", "join", "instance_id", "said"),
    [
        ("gateway", "tcp://127.0.0.1:1", "", "drop it"),
        ("all", "tcp://127.0.0.1:1", "", "joins none"),
        ("encode", "tcp://10.0.0.1:7000", "", "--listen tcp://ADDRESS-OF-THIS-HOST"),
        ("encode", "http://10.0.0.1", "", "write tcp://HOST:PORT"),
    ],
)
def test_contradictions_are_refused(
    tmp_path: Path, text: str, join: str, instance_id: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        role(text, tmp_path, join=join, instance_id=instance_id)


NAMED = """
import socket, sys
from unittest import mock
from epd.cli.configure.names import default_prefix
join, listen, host = sys.argv[1:]
with mock.patch.object(socket, "gethostname", lambda: host):
    print(default_prefix(join, listen), flush=True)
sys.stdin.read()
"""
LOOPBACK = "tcp://127.0.0.1:7000"


@contextmanager
def joins(host: str, listen: str = "", join: str = LOOPBACK) -> Iterator[str]:
    """The prefix of a command that runs meanwhile."""
    command = [sys.executable, "-c", NAMED, join, listen, host]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().decode().strip()
        finally:
            process.kill()


def test_names_of_who_joins_are_unique_and_stable() -> None:
    """F78: by host, by address where hosts are called alike, and by number on one host."""
    name = f"Rack-7_{os.getpid()}"
    for _ in range(2):
        with joins(f"{name}.example.org") as one, joins(f"{name}.example.org") as two:
            assert (one, two) == (name, f"{name}-2")
    prefixes = []
    for address in ("10.0.0.2", "10.0.0.3"):
        with joins(name, f"tcp://{address}:*", "tcp://10.0.0.1:7000") as prefix:
            prefixes.append(prefix)
    assert len(set(prefixes)) == 2 and all(one.startswith(f"{name}-") for one in prefixes)
    assert default_prefix("", "") == "", "with a gateway of its own it is e0, as ever"


@given(st.text(max_size=300))
def test_any_host_gives_a_name_that_can_be_one(host: str) -> None:
    names._take.cache_clear()
    with mock.patch.object(socket, "gethostname", lambda: host):
        try:
            check_instance_id(f"{default_prefix(LOOPBACK, '')}-epd63")
        finally:
            names._take.cache_clear()
            while names._taken:
                names._taken.pop().close()


def test_a_prefix_names_all_that_a_command_starts(tmp_path: Path) -> None:
    placing = Placing(LOOPBACK, "", str(tmp_path), "gpu1")
    plan = plan_topology("1e1pd", Settings(), placing, LOG)
    assert [i.instance_id for i in plan.instances] == ["gpu1-e0", "gpu1-pd0"]
    assert len({i.lineage for i in plan.instances}) == 1 and plan.instances[0].lineage
    other = plan_role("decode+prefill", "", Settings(), placing, LOG)
    assert [i.instance_id for i in other.instances] == ["gpu1-pd0"]
    assert other.instances[0].lineage != plan.instances[0].lineage
    for text, name, said in (("encode", "e7", "--id is the whole"), ("gateway", "", "--id-prefix")):
        with pytest.raises(ConfigError, match=said):
            plan_role(text, name, Settings(), Placing("", "", str(tmp_path), "gpu1"), LOG)


def test_an_id_that_is_no_file_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="instance id"):
        role("encode", tmp_path, instance_id="../e0")


# --- the model directory --------------------------------------------------------------------------


def broken(tmp_path: Path, *, remove: str = "", **config: str) -> Path:
    """A copy of the bundled model with a file less or another config."""
    copy = tmp_path / "model"
    shutil.copytree(bundled_model(), copy)
    if remove:
        (copy / remove).unlink()
    for key, value in config.items():
        text = (copy / "config.json").read_text()
        assert f'"{key}": "qwen3_vl"' in text
        (copy / "config.json").write_text(
            text.replace(f'"{key}": "qwen3_vl"', f'"{key}": "{value}"')
        )
    return copy


def test_a_tokenizer_that_must_be_made_first(tmp_path: Path) -> None:
    copy = broken(tmp_path, remove="tokenizer.json")
    (copy / "tiktoken.model").write_bytes(b"")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json.*make it of tiktoken\.model"):
        check_model(str(copy), ("encode",), with_gateway=True)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", "only safetensors are read"),
        ("preprocessor_config.json", "has no preprocessor_config.json"),
    ],
)
def test_a_half_copied_model_is_named_by_the_missing_file(
    tmp_path: Path, file: str, said: str
) -> None:
    copy = broken(tmp_path, remove=file)
    with pytest.raises(ModelError, match=said):
        check_model(str(copy), ("encode", "prefill"), with_gateway=True)


def test_an_unknown_family_is_named_with_the_known_ones(tmp_path: Path) -> None:
    copy = broken(tmp_path, model_type="kimi_k9")
    with pytest.raises(
        ModelError,
        match=r"'kimi_k9' model; supported are .*glm46v, glm4v, glm4v_moe, glm_ocr, idef",
    ):
        check_model(str(copy), (), with_gateway=True)


def test_an_encoder_has_nothing_to_do_for_a_text_model(tmp_path: Path) -> None:
    copy = broken(tmp_path, model_type="qwen3")
    with pytest.raises(ModelError, match="nothing to encode"):
        check_model(str(copy), ("encode",), with_gateway=False)


# --- a model of the hub ---------------------------------------------------------------------------

HUB_NAME = "Some-Org/tiny_1.5"


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundled model as `hf download` leaves it: links from a snapshot to blobs."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--Some-Org--tiny_1.5"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0123456789abcdef")
    directory = cached / "snapshots" / "0123456789abcdef"
    directory.mkdir(parents=True)
    blobs = shutil.copytree(bundled_model(), cached / "blobs")
    for file in blobs.iterdir():
        (directory / file.name).symlink_to(file)
    return directory


def test_a_downloaded_model_is_found_by_its_name(snapshot: Path, tmp_path: Path) -> None:
    settings = build_settings(flags={"model_dir": HUB_NAME})
    plan = topology("1e1pd", tmp_path, settings=settings)
    assert plan.gateway is not None
    assert {plan.gateway.model_dir, *(i.model_dir for i in plan.instances)} == {str(snapshot)}
    assert plan.gateway.model_name == HUB_NAME
    named = build_settings(flags={"model_dir": HUB_NAME, "model_name": "mine"})
    plan = topology("1e1pd", tmp_path, settings=named)
    assert plan.gateway is not None and plan.gateway.model_name == "mine"


def test_a_directory_wins_over_the_hub(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = shutil.copytree(bundled_model(), tmp_path / HUB_NAME)
    assert check_model(HUB_NAME, ("prefill",), with_gateway=True).directory == copy


@pytest.mark.parametrize("path", ["../none", "./none", "/no/such", "none", "a/b/c", "~/none"])
def test_a_path_is_not_taken_for_a_name(path: str) -> None:
    with pytest.raises(ModelError, match=r"model directory .* does not exist"):
        check_model(path, (), with_gateway=True)


def test_what_is_not_downloaded_is_answered_with_the_command(snapshot: Path) -> None:
    with pytest.raises(ModelError, match=r": hf download Qwen/Qwen3-VL-4B-Instruct$"):
        check_model("Qwen/Qwen3-VL-4B-Instruct", (), with_gateway=True)
    (snapshot / "model.safetensors").unlink()
    check_model(HUB_NAME, (), with_gateway=True)
    with pytest.raises(ModelError, match=f"not whole .*finish .*: hf download {HUB_NAME}$"):
        check_model(HUB_NAME, ("prefill",), with_gateway=True)


def test_a_new_key_file_is_private_and_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key.json"
    assert main(["run", "--new-key", str(key)]) == 0
    assert key.stat().st_mode & 0o777 == 0o600
    ClusterKey.load(str(key))
    capsys.readouterr()
    assert main(["run", "--new-key", str(key)]) == 1
    assert "exists" in capsys.readouterr().err


def test_devices_are_given_out_in_turn(tmp_path: Path) -> None:
    settings = build_settings(flags={"engine.device": "cuda:1,cuda:3"})
    plan = topology("2e1pd", tmp_path, settings=settings)
    assert [i.engine.device for i in plan.instances] == ["cuda:1", "cuda:3", "cuda:1"]


# --- the first layers -----------------------------------------------------------------------------


def first_layers(held: ExitStack, *arguments: str) -> StartPlan:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    given = ["--topology", "1e1pd", "--load-format", "dummy", *arguments]
    return run.make_plan(parser.parse_args(given), held)


def test_layers_are_cut_and_the_name_stays(tmp_path: Path) -> None:
    with ExitStack() as held:
        plan = first_layers(held, "--layers", "1", "--run-dir", str(tmp_path))
        assert plan.gateway is not None and plan.gateway.model_name == "epd-tiny"
        (directory,) = {one.model_dir for one in (plan.gateway, *plan.instances)}
        whole, config = read_config(bundled_model()), read_config(directory)
        assert config["text_config"]["num_hidden_layers"] == 1
        # A level's rows are added behind a layer; all blocks of the tower stay.
        assert config["vision_config"]["deepstack_visual_indexes"] == [1]
        assert config["vision_config"]["depth"] == whole["vision_config"]["depth"]
        assert (Path(directory) / "tokenizer.json").samefile(bundled_model() / "tokenizer.json")
    assert not Path(directory).exists()


@pytest.mark.parametrize("number", ["0", "5"])
def test_layers_that_are_not_there_are_refused(number: str, tmp_path: Path) -> None:
    with ExitStack() as held, pytest.raises(ModelError, match="has 4 layers; give 1 to 4"):
        first_layers(held, "--layers", number, "--run-dir", str(tmp_path))
