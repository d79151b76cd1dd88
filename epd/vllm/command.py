"""Commands of vLLM servers that compute prompts and answers for encoders of this project."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import sys
from pathlib import Path

import msgspec

from epd.cli.start.plan import StartPlan
from epd.cli.start.ports import check_free
from epd.cli.start.rundir import base_dir
from epd.config import ConfigError, InstanceConfig
from epd.runtime.program import ServerCommand
from epd.topology import Roles, name_instances, parse_groups

HOST = "127.0.0.1"
PORT = 8100  # of the first server; the gateway has 8000
SIDE_PORT = 5600  # likewise, where another one asks it for its KV
GUIDES = '{"backend": "guidance"}'  # by llguidance, as here
LEASES = 1.5  # how much longer a lease is than the longest wait for a token
PREFILL_AND_DECODE: Roles = ("prefill", "decode")


def transfer_config(url: str, flags: str) -> dict[str, object]:
    """What `--ec-transfer-config` takes.  `flags`: of `epd run`, by which it finds its gateway."""
    return {
        "ec_connector": "EpdECConnector",
        "ec_connector_module_path": "epd.vllm.connector",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": {"url": url, "run": flags},
    }


def kv_transfer_config(device: str, token_timeout_s: float) -> dict[str, object]:
    """What `--kv-transfer-config` takes where prefill and decode are servers apart.

    A server reads KV by its ticket even when the lease at the other one is over, and the blocks are
    another prompt's.  So a lease outlives every stream that waits for its next token: its client
    has an error then, whatever is read."""
    lease = {"kv_lease_duration": math.ceil(LEASES * token_timeout_s)}
    config: dict[str, object] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    config["kv_connector_extra_config"] = lease
    return config | ({"kv_buffer_device": "cpu"} if device == "cpu" else {})


def servers_of(plan: StartPlan, topology: str, flags: str = "") -> dict[str, ServerCommand]:
    """For hosts that reach the gateway of this plan: each server of the topology that has another
    role than `encode`; without any of them, one that prefills and decodes.  By name."""
    named = name_instances([roles for roles, _ in parse_groups(topology, 1, whole=False)])
    servers = [(name, roles) for name, roles in named if "encode" not in roles]
    found = {}
    for number, (name, roles) in enumerate(servers or [("", PREFILL_AND_DECODE)]):
        found[name or "vllm"] = _server(plan, name, roles, number, shlex.split(flags))
    return found


def _server(
    plan: StartPlan, name: str, roles: Roles, number: int, flags: list[str]
) -> ServerCommand:
    (first, *_) = plan.instances
    run = _join_flags(plan, first)
    run += f" --id {name}" if name else ""
    environment, behind, port = {}, [], PORT + number
    if roles != PREFILL_AND_DECODE:
        run += f" --role {'+'.join(roles)}"
        config = kv_transfer_config(first.engine.device, first.timing.token_timeout_s)
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(SIDE_PORT + number)
        behind = ["--kv-transfer-config", json.dumps(config)]
    url = f"http://127.0.0.1:{port}"
    words = ["vllm", "serve", first.model_dir, "--port", str(port), "--enable-scale-out"]
    words += ["--dtype", first.engine.dtype, "--structured-outputs-config", GUIDES]
    words += ["--ec-transfer-config", json.dumps(transfer_config(url, run)), *behind, *flags]
    return ServerCommand(tuple(words), environment, url)


def _join_flags(plan: StartPlan, first: InstanceConfig) -> str:
    if not first.gateway_endpoint.startswith("ipc://"):
        return f"--join {first.gateway_endpoint}"
    base = Path(plan.run_dir).parent
    return f"--port {first.port}" + ("" if base == base_dir() else f" --run-dir {base}")


def in_words(server: ServerCommand) -> str:
    """As it is typed."""
    before = [f"{name}={value}" for name, value in server.environment.items()]
    return " ".join([*before, shlex.join(server.words)])


def check_startable(servers: dict[str, ServerCommand]) -> dict[str, ServerCommand]:
    """As they are started here, where nobody but the gateway asks them.  Raises ConfigError."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    program = shutil.which("vllm", path=os.pathsep.join(places))
    if program is None:
        raise ConfigError("there is no `vllm` to start: pip install vllm, before this project")
    found = {}
    for name, server in servers.items():
        check_free(HOST, int(server.url.rpartition(":")[2]))
        words = (program, *server.words[1:], "--host", HOST, "--shutdown-timeout", "10")
        words += ("--disable-uvicorn-access-log",)
        found[name] = msgspec.structs.replace(server, words=words)
    return found
