"""Commands of vLLM servers that compute prompts and answers for encoders of this project."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

from epd.cli.start.plan import StartPlan
from epd.topology import Roles, name_instances, parse_groups

PORT = 8100  # of the first server; the gateway has 8000
SIDE_PORT = 5600  # likewise, where another one asks it for its KV
GUIDES = '{"backend": "guidance"}'  # by llguidance, as here
PREFILL_AND_DECODE: Roles = ("prefill", "decode")


def transfer_config(url: str, flags: str) -> dict[str, object]:
    """What `--ec-transfer-config` takes.  `flags`: of `epd run`, by which it finds its gateway."""
    return {
        "ec_connector": "EpdECConnector",
        "ec_connector_module_path": "epd.vllm.connector",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": {"url": url, "run": flags},
    }


def kv_transfer_config(device: str) -> dict[str, object]:
    """What `--kv-transfer-config` takes where prefill and decode are servers apart."""
    config: dict[str, object] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    return config | ({"kv_buffer_device": "cpu"} if device == "cpu" else {})


def serve_commands(plan: StartPlan, topology: str) -> Iterator[str]:
    """For hosts that reach the gateway of this plan: of each server of the topology that has
    another role than `encode`; without any of them, of one that prefills and decodes."""
    named = name_instances([roles for roles, _ in parse_groups(topology, 1, whole=False)])
    servers = [(name, roles) for name, roles in named if "encode" not in roles]
    for number, (name, roles) in enumerate(servers or [("", PREFILL_AND_DECODE)]):
        yield _serve_command(plan, name, roles, number)


def _serve_command(plan: StartPlan, name: str, roles: Roles, number: int) -> str:
    (first, *_) = plan.instances
    is_near = first.gateway_endpoint.startswith("ipc://")
    flags = f"--port {first.port}" if is_near else f"--join {first.gateway_endpoint}"
    flags += f" --id {name}" if name else ""
    before, behind, port = "", [], PORT + number
    if roles != PREFILL_AND_DECODE:
        flags += f" --role {'+'.join(roles)}"
        config = kv_transfer_config(first.engine.device)
        before = f"VLLM_NIXL_SIDE_CHANNEL_PORT={SIDE_PORT + number} "
        behind = ["--kv-transfer-config", json.dumps(config)]
    of_rows = json.dumps(transfer_config(f"http://127.0.0.1:{port}", flags))
    words = ["vllm", "serve", first.model_dir, "--port", str(port), "--enable-scale-out"]
    words += ["--dtype", first.engine.dtype, "--structured-outputs-config", GUIDES]
    words += ["--ec-transfer-config", of_rows, *behind]
    return before + shlex.join(words)
