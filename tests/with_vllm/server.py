"""A vLLM server on the CPU, with the connector; and a copy of the bundled model that it reads."""

from __future__ import annotations

import json
import os
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, ClassVar

import psutil

from epd.cli.configure.model_check import bundled_model
from epd.cli.start.ports import any_free
from epd.config import Timing
from epd.vllm.command import GUIDES, kv_transfer_config, transfer_config
from epd_lab.bench.chaos.process import Command, wait_for

START_S = 600.0  # alone about 30 s
SITE = Path(__file__).parent / "cpu"
ROOT = SITE.parent.parent.parent
DTYPE = "bfloat16"
TIMING = Timing()


def model_for_vllm(directory: Path) -> Path:
    """vLLM looks for the language model's architecture by a name that config.json need not have."""
    copy = directory / "tiny"
    shutil.copytree(bundled_model(), copy)
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["architectures"] = ["Qwen3ForCausalLM"]
    (copy / "config.json").write_text(json.dumps(config))
    return copy


class VllmServer(Command):
    program: ClassVar[tuple[str, ...]] = ("-m", "vllm.entrypoints.cli.main", "serve")

    def __init__(
        self, model: Path, flags: str, *, moves_kv: bool = False, num_ranks: int = 1, **extra: Any
    ) -> None:
        """`flags` and `extra` are the connector's.  `moves_kv`: by vLLM's own connector."""
        port = any_free("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        config = transfer_config(self.url, flags)
        config["ec_connector_extra_config"] |= extra  # type: ignore[operator]
        arguments: tuple[str, ...] = (
            *(str(model), "--served-model-name", "tiny", "--host", "127.0.0.1"),
            *("--port", str(port), "--dtype", DTYPE, "--max-model-len", "1024"),
            *("--enforce-eager", "--max-num-seqs", "40", "--gpu-memory-utilization", "0.1"),
            *("--limit-mm-per-prompt", '{"image": 16, "video": 0}', "--enable-scale-out"),
            *("--ec-transfer-config", json.dumps(config), "--structured-outputs-config", GUIDES),
        )
        if num_ranks > 1:
            arguments += ("--tensor-parallel-size", str(num_ranks))
        if moves_kv:
            arguments += (
                "--kv-transfer-config",
                json.dumps(kv_transfer_config("cpu", TIMING.token_timeout_s)),
            )
        super().__init__(*arguments)

    def environment(self, program: tuple[str, ...]) -> dict[str, str]:
        return {
            "PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(any_free("127.0.0.1")),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",  # idle ones spin, and many servers share two cores
            # One process for engine and worker, as on a GPU: signs between the two get lost when
            # all cores are busy, and each costs 5 s (SHM_READER_RECHECK_INTERVAL_MS).
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }

    def has_mark(self, process: psutil.Process) -> bool:
        """vLLM writes its titles over the environment of its processes; all are of one session."""
        return os.getsid(process.pid) == self.process.pid or super().has_mark(process)

    def get(self, path: str) -> int:
        """Its status; 0: nobody answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10.0) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0

    def metric(self, name: str) -> float:
        """Of all its labels."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10.0) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def kill(self) -> None:
        """All of it, at once."""
        for process in self.processes():
            process.kill()

    def wait_up(self) -> VllmServer:
        def is_up() -> bool:
            assert self.process.poll() is None, self.text[-4000:]
            return self.get("/health") == 200

        wait_for(is_up, START_S, "vLLM is up")
        return self
