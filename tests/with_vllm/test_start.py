"""`epd run --start-vllm`: one command from nothing to E + PD, a vLLM server among its children."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from epd_lab.bench.chaos.process import READY_S, ServingCommand, wait_for
from tests.with_vllm.client import ask_all, bodies
from tests.with_vllm.server import DTYPE, START_S, VllmServer, model_for_vllm

pytestmark = pytest.mark.timeout(1200)
SMALL = (
    "--served-model-name tiny --max-model-len 1024 --enforce-eager --max-num-seqs 8 "
    "--gpu-memory-utilization 0.1"
)


class Started(ServingCommand):
    """Its vLLM server is of a session of its own, and writes over its environment."""

    def environment(self, program: tuple[str, ...]) -> dict[str, str]:
        return VllmServer.environment(self, program)  # type: ignore[arg-type]

    def keeper(self) -> psutil.Process:
        """Who keeps the server."""
        all_of_it = psutil.Process(self.process.pid).children(recursive=True)
        (server,) = (one for one in all_of_it if "serve" in one.cmdline())
        return server

    def is_whole(self) -> bool:
        known = self.instances().values()
        return [one["state"] for one in known].count("HEALTHY") == 2


def test_one_command_starts_keeps_and_ends_a_vllm_server(tmp_path: Path) -> None:
    those = bodies(12, seed=53)
    command = Started(
        "1e1pd",
        *("--for", "vllm", "--dtype", DTYPE, f"--start-vllm={SMALL}"),
        model=model_for_vllm(tmp_path),
    )
    try:
        command.wait_ready(START_S)
        wait_for(command.is_whole, READY_S, "encoder and server are healthy")
        first = asyncio.run(ask_all(command.base_url, those))
        assert not [text for text in first if text[:3].isdigit() and ":" in text[:5]], first
        server = command.keeper()
        group = [p for p in psutil.process_iter() if os.getsid(p.pid) == server.pid]
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: not [p for p in group if p.is_running()], READY_S, "all of it is gone")
        wait_for(lambda: not command.is_whole(), READY_S, "it is missed")
        wait_for(command.is_whole, START_S, "another is up")
        assert asyncio.run(ask_all(command.base_url, those)) == first
        server = command.keeper()
        group = [p for p in psutil.process_iter() if os.getsid(p.pid) == server.pid]
        assert command.stop() == 0
        wait_for(lambda: not [p for p in group if p.is_running()], READY_S, "all of it is reaped")
    finally:
        print(command.text[-6000:])
        command.discard()
