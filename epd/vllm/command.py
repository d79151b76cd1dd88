"""The command of a vLLM server that computes prompts and answers for encoders of this project."""

from __future__ import annotations

import json
import shlex

from epd.cli.start.plan import StartPlan

PORT = 8100  # of the server; the gateway has 8000


def transfer_config(url: str, flags: str) -> dict[str, object]:
    """What `--ec-transfer-config` takes.  `flags`: of `epd run`, by which it finds its gateway."""
    return {
        "ec_connector": "EpdECConnector",
        "ec_connector_module_path": "epd.vllm.connector",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": {"url": url, "run": flags},
    }


def serve_command(plan: StartPlan) -> str:
    """For a host that reaches the gateway of this plan."""
    (first, *_) = plan.instances
    by_port = f"--port {first.port}"
    is_near = first.gateway_endpoint.startswith("ipc://")
    flags = by_port if is_near else f"--join {first.gateway_endpoint}"
    config = json.dumps(transfer_config(f"http://127.0.0.1:{PORT}", flags))
    words = ["vllm", "serve", first.model_dir, "--port", str(PORT), "--enable-scale-out"]
    words += ["--dtype", first.engine.dtype, "--ec-transfer-config", config]
    return shlex.join(words)
