"""Connector configurations of the ecosystem: mapped, or refused by name with what is known."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from typing import Any

import pytest

from epd.cli.configure.connectors import apply, read_transfer_configs
from epd.cli.configure.settings import build_settings
from epd.cli.start.plan import StartPlan
from epd.cli.verbs import run
from epd.config import ConfigError, Settings


def ec(role: str = "ec_producer", connector: str = "SHMConnector", **more: Any) -> str:
    return json.dumps({"ec_connector": connector, "ec_role": role, **more})


def kv(role: str = "kv_both", connector: str = "SHMConnector", **more: Any) -> str:
    return json.dumps({"kv_connector": connector, "kv_role": role, **more})


def settings(roles: str, ec_text: str | None = None, kv_text: str | None = None) -> Settings:
    names = {"e": "encode", "p": "prefill", "d": "decode"}
    applied = read_transfer_configs(ec_text, kv_text, tuple(names[r] for r in roles))
    return apply(Settings(), applied)


PATH = {"shared_storage_path": "/mnt/rows"}
RDMA = {"mooncake_protocol": "rdma", "device_name": "mlx5_0,mlx5_1"}


def test_each_key_becomes_its_setting() -> None:
    made = settings(
        "e", ec(connector="ECExampleConnector", ec_connector_extra_config=PATH, ec_buffer_size=3e6)
    )
    assert (made.transport, made.transport_directory) == ("file", "/mnt/rows")
    assert made.encode.cache_dir == "/mnt/rows", "rows stay there, for whoever looks"
    alone = ec("ec_consumer", "ECSharedStorageConnector", ec_connector_extra_config=PATH)
    assert settings("pd", alone).encode.cache_dir == "/mnt/rows"
    kv_alone = kv("kv_both", "SharedStorageConnector", kv_connector_extra_config=PATH)
    assert settings("d", None, kv_alone).encode.cache_dir == ""
    assert made.encode.send_buffer_nbytes == 3_000_000
    assert settings("p", ec("ec_consumer", ec_buffer_size=1e9)).prefill.pool_nbytes == 10**9
    assert settings("d", None, kv("kv_consumer", kv_buffer_size=5e8)).engine.kv_nbytes == 5 * 10**8
    assert settings("p", None, kv("kv_producer", "MooncakeConnector")).transport == "mooncake"
    assert settings("p", None, kv("kv_producer", "NixlConnector")).transport == "nixl"


def test_rdma_and_its_devices_are_chosen_as_mooncake_spells_them() -> None:
    text = ec(connector="ECMooncakeConnector", ec_connector_extra_config=RDMA, ec_buffer_size=1e9)
    made = settings("e", text).mooncake
    assert (made.protocol, made.devices) == ("rdma", "mlx5_0,mlx5_1")
    taker = settings("p", ec("ec_consumer", "ECMooncakeConnector", ec_connector_extra_config=RDMA))
    assert taker.mooncake == made


def test_hops_of_one_instance_may_differ() -> None:
    made = settings("p", ec("ec_consumer", "ECMooncakeConnector"), kv("kv_producer"))
    assert made.transport == "mooncake,shm"
    assert settings("p", ec("ec_consumer", "auto"), kv("kv_producer", "auto")).transport == "auto"


OTHERS = {"connector": "MappedFiles", "connector_module_path": "tests.contract.example_backend"}


def test_a_connector_of_others_is_named_by_its_module() -> None:
    own = {"directory": "/mnt/mapped", "depth": {"any": [1, 2]}}
    given = {f"ec_{key}": value for key, value in OTHERS.items()}
    text = json.dumps({**given, "ec_role": "ec_consumer", "ec_connector_extra_config": own})
    made = settings("p", text, kv("kv_producer"))
    assert made.transport == "tests.contract.example_backend:MappedFiles,shm"
    assert json.loads(made.transport_options) == own


def test_harmless_values_are_accepted_and_addresses_become_the_endpoint() -> None:
    text = ec(
        ec_rank=0, ec_parallel_size=1, ec_buffer_device="cpu", engine_id="enc-7", ec_ip="10.0.0.2",
        ec_port=14579, ec_connector_module_path=None,
    )  # fmt: skip
    applied = read_transfer_configs(text, None, ("encode",))
    assert applied.instance_id == "enc-7"
    assert applied.listen == "tcp://10.0.0.2:14579"
    port_alone = read_transfer_configs(ec(ec_port=14579), None, ("encode",))
    assert port_alone.listen == "tcp://127.0.0.1:14579"


@pytest.mark.parametrize(
    ("roles", "ec_text", "kv_text", "words"),
    [
        ("e", ec(ec_conector_extra_config={}), None, "ec_conector_extra_config is unknown; did"),
        ("e", ec(kv_port=1), None, "kv_port is unknown.*known are ec_connector, ec_role"),
        ("e", ec("ec_consumer"), None, "ec_role ec_consumer contradicts an instance of encode"),
        ("ep", ec("ec_producer"), None, "which is ec_both"),
        ("e", ec("producer"), None, "choose ec_producer, ec_consumer, ec_both"),
        ("d", ec("ec_both"), None, "has no part in this hop, from encode to prefill"),
        ("e", None, kv(), "has no part in this hop, from prefill to decode"),
        ("", ec("ec_both"), None, "no role has no part"),
        ("e", ec(connector="StrangeOne"), None, "there are ECExampleConnector .file., "),
        ("e", ec(connector="ECCPUConnector"), None, "rows stay in host memory anyway: write auto"),
        ("e", ec(connector="SHMConector"), None, "did you mean SHMConnector"),
        ("e", ec(ec_connector_extra_config=PATH), None, "shared_storage_path is unknown; this"),
        ("e", ec(connector="ECExampleConnector"), None, "extra_config lacks shared_storage_path"),
        (
            "e",
            ec(connector="ECMooncakeConnector", ec_connector_extra_config={"protocol": "rdma"}),
            None,
            "registered memory only: give the encoders a ring",
        ),
        (
            "p",
            ec("ec_consumer", "ECMooncakeConnector", ec_connector_extra_config=RDMA),
            kv("kv_producer", "MooncakeConnector", kv_connector_extra_config={"protocol": "tcp"}),
            "wants mooncake.protocol 'rdma' and --kv-transfer-config 'tcp': an instance has one",
        ),
        (
            "p",
            None,
            kv("kv_producer", "MooncakeConnector", kv_connector_extra_config={"protocol": "efa"}),
            "mooncake.protocol is 'efa'; it must be one of tcp, rdma",
        ),
        ("e", ec(ec_parallel_size=0), None, "ec_parallel_size must be a number above zero"),
        ("e", ec(ec_rank=2, ec_parallel_size=2), None, "ec_rank must be a number from 0 to below"),
        ("p", None, kv(kv_rank=1), "to below kv_parallel_size, not 1; or drop both"),
        ("p", None, kv(kv_rank=0, kv_parallel_size="two"), "kv_rank must be a number"),
        ("p", None, kv(kv_load_failure_policy="fail"), 'computed again; write "recompute"'),
        ("e", ec(kv_load_failure_policy="recompute"), None, "kv_load_failure_policy is unknown"),
        ("e", ec(ec_port="http"), None, "ec_port must be a port, not 'http'"),
        ("e", ec(ec_buffer_size="nan"), None, "must be a number of bytes, not 'nan'"),
        ("e", ec(ec_connector_module_path="no.such"), None, "there is no module no.such: install"),
        ("e", ec(ec_connector_module_path="../x"), None, "must be a module and what makes a conn"),
        ("e", ec(ec_connector_module_path=7), None, "must be a module and what makes a connector"),
        ("e", ec(ec_buffer_size=-1), None, "must be a number of bytes"),
        ("e", ec(ec_buffer_device="tpu"), None, "ec_buffer_device must be one of cpu, cuda"),
        ("p", ec("ec_consumer", ec_port=1), kv("kv_producer", kv_port=2), "share the instance's"),
        ("e", "{", None, "is not JSON"),
        ("e", "[]", None, "holds no object"),
        ("e", '{"ec_role": "ec_producer"}', None, "has no ec_connector"),
    ],
)  # fmt: skip
def test_what_is_refused(roles: str, ec_text: str | None, kv_text: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(roles, ec_text, kv_text)


def test_a_buffers_device_is_not_the_engines() -> None:
    for device in ("cpu", "cuda"):
        assert settings("e", ec(ec_buffer_device=device)).engine.device == "cpu"
        gpu = build_settings(assignments=["engine.device=cuda:1"])
        applied = read_transfer_configs(None, kv(kv_buffer_device=device), ("decode",))
        assert apply(gpu, applied).engine.device == "cuda:1"


# What the pages on disaggregated prefilling and encoding of vLLM give to paste.
FILES = {"connector_extra_config": PATH}
PASTED: list[tuple[str, str, str, dict[str, Any]]] = [
    ("p", "kv_producer", "SHMConnector", {"rank": 0, "parallel_size": 2}),
    ("d", "kv_consumer", "SHMConnector", {"rank": 1, "parallel_size": 2}),
    ("d", "kv_both", "SharedStorageConnector", FILES),
    ("p", "kv_both", "ExampleConnector", FILES),
    ("p", "kv_producer", "MooncakeConnector", {"buffer_device": "cuda"}),
    ("d", "kv_consumer", "auto", {"buffer_size": "8e9", "port": "22001"}),
    ("e", "ec_producer", "ECExampleConnector", FILES),
    ("pd", "ec_consumer", "ECSharedStorageConnector", FILES),
    ("epd", "ec_both", "ECExampleConnector", FILES),
    ("p", "ec_consumer", "ECMooncakeConnector", {"ip": "127.0.0.1", "port": 14579}),
]
WITHOUT_LIKENESS = [
    ("P2pNcclConnector", "no NCCL transport: write auto"),
    ("PyNcclConnector", "no NCCL transport: write auto"),
    ("LMCacheConnectorV1", "found by its content in each instance anyway: write auto"),
    ("OffloadingConnector", "give the pool more, --kv-nbytes"),
    ("MultiConnector", "an instance offers several ways"),
    ("MooncakeStoreConnector", "write MooncakeConnector to move it"),
]


@pytest.mark.parametrize(("roles", "role", "connector", "more"), PASTED)
def test_what_their_pages_give_to_paste_is_taken(
    roles: str, role: str, connector: str, more: dict[str, Any]
) -> None:
    hop = role[:2]
    given = {f"{hop}_{key}": value for key, value in {"connector": connector, **more}.items()}
    settings(roles, **{f"{hop}_text": json.dumps({f"{hop}_role": role, **given})})


@pytest.mark.parametrize(("connector", "remedy"), WITHOUT_LIKENESS)
def test_or_it_is_refused_by_name_with_what_to_do(connector: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"connector '{connector}' is not supported: .*{remedy}"):
        settings("p", None, kv("kv_producer", connector))


def test_a_flag_that_says_otherwise_is_not_overruled() -> None:
    own = build_settings(assignments=["transport=tcp"])
    applied = read_transfer_configs(ec(), None, ("encode",))
    with pytest.raises(ConfigError, match="transport is 'tcp' by a setting or flag and 'shm'"):
        apply(own, applied)


def plan(*arguments: str) -> StartPlan:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    return run.make_plan(parser.parse_args(arguments), ExitStack())


def test_the_command_line_takes_them(tmp_path: Any) -> None:
    place = ("--run-dir", str(tmp_path), "--port", "18999")
    made = plan("--role", "encode", "--ec-transfer-config", ec(engine_id="enc-7"), *place)
    assert made.instances[0].instance_id == "enc-7"
    assert made.instances[0].transport == "shm"
    with pytest.raises(ConfigError, match="--id is mine and the connector's engine_id enc-7"):
        plan("--role", "encode", "--id", "mine", "--ec-transfer-config", ec(engine_id="enc-7"))
    both = plan("--topology", "1e1pd", "--ec-transfer-config", ec("ec_both"), *place)
    assert {instance.transport for instance in both.instances} == {"shm"}
    with pytest.raises(ConfigError, match="contradicts an instance of encode"):
        plan("--topology", "1e1pd", "--ec-transfer-config", ec("ec_producer"), *place)
