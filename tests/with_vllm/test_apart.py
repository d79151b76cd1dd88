"""Prefill and decode at servers apart: KV moves by vLLM's NixlConnector, tickets by ours.

Of prefill there is one server, and two of decode; then two of prefill, and one of decode.  What is
right is what the prefill server answers alone, with its own tower.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from epd.cli.start.ports import any_free
from epd_lab.bench.chaos.process import READY_S, Command, ServingCommand, wait_for
from tests.e2e.client import question
from tests.with_vllm.client import ask, ask_all, bodies, longs, said, streams
from tests.with_vllm.server import DTYPE, VllmServer, model_for_vllm

pytestmark = pytest.mark.timeout(1200)
pytest.importorskip("nixl", reason="KV moves by nixl")
ROLES = {"p": "prefill", "d": "decode"}
MANY = 40
BUSY_PERCENT = 40.0  # of a core: 3 with nothing to do, 97 where a thread polls


@dataclass
class Apart:
    gateway: ServingCommand
    model: Path
    endpoint: str
    servers: dict[str, VllmServer] = field(default_factory=dict)

    def begin(self, name: str) -> None:
        run_dir = f"{self.gateway.run_dir}-{name}"
        flags = f"--join {self.endpoint} --id {name} --role {ROLES[name[0]]} --run-dir {run_dir}"
        self.servers[name] = VllmServer(self.model, flags, moves_kv=True, encodes=True)

    def wait_for(self, *names: str) -> None:
        for name in names:
            self.servers[name].wait_up()
        wait_for(lambda: set(names) <= self.healthy(), READY_S, f"{names} have joined")

    def healthy(self) -> set[str]:
        known = self.gateway.instances().items()
        return {name for name, one in known if one["state"] == "HEALTHY"}

    def end(self, name: str) -> None:
        self.servers[name].kill()
        self.servers.pop(name).discard()

    @property
    def url(self) -> str:
        return self.gateway.base_url


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    model = model_for_vllm(tmp_path_factory.mktemp("model"))
    endpoint = f"tcp://127.0.0.1:{any_free('127.0.0.1')}"
    gateway = ServingCommand("gateway", "--listen", endpoint, model=model)
    flags = ("--join", endpoint, "--id-prefix", "test", "--model", str(model), "--dtype", DTYPE)
    encoder = Command("run", "--topology", "1e", *flags, "--threads", "1")
    at = Apart(gateway, model, endpoint)
    try:
        for name in ("p0", "d0", "d1"):
            at.begin(name)
        at.wait_for("p0", "d0", "d1")
        wait_for(lambda: "test-e0" in at.healthy(), READY_S, "the encoder serves")
        yield at
    finally:
        for server in at.servers.values():
            print(server.text[-3000:])
            server.discard()
        encoder.discard()
        print(gateway.text[-3000:])
        gateway.discard()


def test_idle_servers_leave_the_cores_to_others(apart: Apart) -> None:
    """NIXL's thread would take one for each of them."""
    for server in apart.servers.values():
        (engine,) = (one for one in server.processes() if "EngineCore" in one.cmdline()[0])
        rests = lambda e=engine: e.cpu_percent(interval=1.0) < BUSY_PERCENT  # noqa: E731
        wait_for(rests, READY_S, "it rests")


def test_answers_are_those_of_one_server(apart: Apart) -> None:
    """And decode computed no prompt: its KV came."""
    those = bodies(60, seed=31)
    wanted = asyncio.run(ask_all(apart.servers["p0"].url, those))
    found = asyncio.run(ask_all(apart.url, those))
    assert found == wanted
    came = [
        apart.servers[name].metric("vllm:external_prefix_cache_hits_total") for name in ("d0", "d1")
    ]
    assert all(came), came
    failed = "vllm:nixl_num_failed_transfers_total"
    assert not sum(apart.servers[name].metric(failed) for name in ("d0", "d1"))


def test_a_clients_own_parameters_do_not_pass(apart: Apart) -> None:
    body = {**question("Hello"), "model": "tiny", "max_tokens": 8}
    plain = said(asyncio.run(ask(apart.url, body)))
    forged = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [[1]]}
    forged |= {"remote_host": "127.0.0.1", "remote_port": 9, "remote_request_id": "x"}
    status, answer = asyncio.run(ask(apart.url, {**body, "kv_transfer_params": forged}))
    assert status == 400 or said((status, answer)) == plain
    for server in apart.servers.values():
        assert server.get("/health") == 200


def test_streams_of_a_killed_decode_server_go_on_at_another(apart: Apart) -> None:
    those = longs(MANY, 37)
    wanted = asyncio.run(streams(apart.url, those, 0, lambda: None))
    kill = apart.servers["d1"].kill
    found = asyncio.run(streams(apart.url, those, MANY // 2, kill))
    assert {len(tokens) for tokens in wanted} == {200} and found == wanted
    assert apart.servers["d1"].get("/health") == 0
    apart.end("d1")


@pytest.fixture(scope="module")
def second(apart: Apart) -> Apart:
    """One more of prefill, and one of decode less, since so many fit on a small machine."""
    if "d1" in apart.servers:
        apart.end("d1")
    apart.begin("p1")
    apart.wait_for("p1")
    return apart


@pytest.mark.parametrize("ends", [False, True], ids=["stands_still", "killed"])
def test_of_two_prefill_servers_one_costs_a_pause(second: Apart, ends: bool) -> None:
    """Streams that begin just before it ends or stands still are as right as the others."""
    those, server = longs(12, 43 + ends), second.servers["p1"]

    def stop() -> None:
        for process in server.processes():
            process.send_signal(signal.SIGKILL if ends else signal.SIGSTOP)

    wanted = asyncio.run(streams(second.url, those, 0, lambda: None))
    found = asyncio.run(streams(second.url, those, 3, stop, num_late=6))
    assert {len(tokens) for tokens in wanted} == {200} and found == wanted
    if ends:
        second.end("p1")
        return
    for process in server.processes():
        process.send_signal(signal.SIGCONT)
    second.wait_for("p1")


def test_without_a_prefill_server_it_is_one_clear_error(apart: Apart) -> None:
    """Streams that have begun end at their decode server."""
    those = longs(4, 47)
    wanted = asyncio.run(streams(apart.url, those, 0, lambda: None))
    found = asyncio.run(streams(apart.url, those, 4, apart.servers["p0"].kill))
    assert found == wanted
    apart.end("p0")
    status, error = asyncio.run(ask(apart.url, {**question("Hello"), "model": "tiny"}))
    assert status == 503 and "prefill" in error, (status, error)
    assert apart.servers["d0"].get("/health") == 200
