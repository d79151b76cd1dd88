"""Encoders of this project in front of an unpatched vLLM: one server, and encoders in turn.

What is right is vLLM's own answer: the same server encodes with its own tower where it is asked
directly (`encodes`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from epd.cli.start.ports import any_free
from epd.vllm.server import PATH
from epd_lab.bench.chaos.process import READY_S, Command, ServingCommand, wait_for
from tests.e2e.client import Body, question
from tests.with_vllm.client import (
    AT_ONCE,
    SAYS,
    ask,
    ask_all,
    bodies,
    longs,
    painted,
    said,
    streams,
)
from tests.with_vllm.server import DTYPE, VllmServer, model_for_vllm

pytestmark = pytest.mark.timeout(1200)

PACKAGES = {"shm": "epd", "tcp": "epd", "mooncake": "mooncake", "nixl": "nixl"}
TRANSPORTS = [name for name, package in PACKAGES.items() if find_spec(package) is not None]
HASTE = (
    "--set timing.suspect_after_s=1 --set timing.lost_after_s=2 --set timing.stall_timeout_s=6 "
    "--set timing.group_step_timeout_s=5"
)


@dataclass
class Cluster:
    gateway: ServingCommand
    vllm: VllmServer
    model: Path
    endpoint: str

    def encoders(self, topology: str, transport: str) -> contextlib.AbstractContextManager[Command]:
        """Beside the gateway, until the end of the block; ready then."""
        return self._encoders(topology, transport)

    @contextlib.contextmanager
    def _encoders(self, topology: str, transport: str) -> Iterator[Command]:
        count = int(topology.removesuffix("e"))
        flags = ("--join", self.endpoint, "--transport", transport, "--id-prefix", "test")
        model = ("--model", str(self.model), "--dtype", DTYPE, "--threads", "1")
        command = Command("run", "--topology", topology, *flags, *model)
        try:
            wait_for(lambda: len(self.serving()) == count, READY_S, "encoders serve")
            yield command
            command.stop()
            wait_for(lambda: not self.serving(), READY_S, "they are gone")
        finally:
            command.discard()

    def serving(self) -> list[str]:
        known = self.gateway.instances().items()
        return [n for n, one in known if one["state"] == "HEALTHY" and "encode" in one["roles"]]

    def num_encoded(self) -> float:
        metrics = self.gateway.metrics().items()
        return sum(value for name, value in metrics if name.startswith("epd_encodes_total"))

    def ask_all(self, those: list[Body], at_once: int = AT_ONCE) -> list[str]:
        return asyncio.run(ask_all(self.gateway.base_url, those, at_once))

    def own(self, those: list[Body]) -> list[str]:
        """vLLM's own answers, by its own tower."""
        return asyncio.run(ask_all(self.vllm.url, those))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = model_for_vllm(tmp_path_factory.mktemp("model"))
    endpoint = f"tcp://127.0.0.1:{any_free('127.0.0.1')}"
    gateway = ServingCommand("gateway", "--listen", endpoint, model=model)
    run_dir = gateway.run_dir.parent / f"{gateway.run_dir.name}-pd"
    flags = f"--join {endpoint} --id pd --run-dir {run_dir} --transport {','.join(TRANSPORTS)}"
    vllm = VllmServer(model, flags, encodes=True)
    try:
        vllm.wait_up()
        joined = lambda: "pd" in gateway.instances()  # noqa: E731
        wait_for(joined, READY_S, "vLLM has joined")
        yield Cluster(gateway, vllm, model, endpoint)
        assert vllm.get("/health") == 200, vllm.text[-4000:]
    finally:
        print(vllm.text[-3000:], gateway.text[-3000:])
        vllm.discard()
        gateway.discard()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_answers_are_vllms_own(cluster: Cluster, transport: str) -> None:
    those = bodies(70, seed=TRANSPORTS.index(transport))
    wanted = cluster.own(those)
    assert not [text for text in wanted if text[:3].isdigit() and ":" in text[:5]], wanted
    with cluster.encoders("2e", transport):
        before = cluster.num_encoded()
        found = cluster.ask_all(those)
        assert cluster.num_encoded() > before, "vLLM got no pixels"
        of_pair = cluster.gateway.instances()["pd"]["transports"]
        assert {of_pair[name] for name in cluster.serving()} == {transport}
    wrong = [(a, b) for a, b in zip(found, wanted, strict=True) if a != b]
    assert not wrong, wrong[:5]


def test_each_rank_of_a_server_gets_the_rows(cluster: Cluster) -> None:
    """They come with the orders of a step, to each of its workers.  Then one of these stops."""
    run_dir = f"{cluster.gateway.run_dir}-pd2"
    flags = f"--join {cluster.endpoint} --id pd2 --run-dir {run_dir} {HASTE}"
    those = bodies(40, seed=23)
    wanted = cluster.own(those)
    with cluster.encoders("1e", "shm"), contextlib.ExitStack() as held:
        second = VllmServer(cluster.model, flags, num_ranks=2)
        held.callback(second.discard)
        second.wait_up()
        wait_for(lambda: "pd2" in cluster.gateway.instances(), READY_S, "it has joined")
        assert cluster.ask_all(those, at_once=40) == wanted
        assert second.metric("vllm:request_success_total") > 0
        streams_leave_a_worker_that_stands_still(cluster, second)


def streams_leave_a_worker_that_stands_still(cluster: Cluster, server: VllmServer) -> None:
    """Its server's `/health` answers meanwhile, and the heart of its instance beats.  Two ranks add
    up in another order than one, so tokens may differ from there on; none is missing."""
    url, those = cluster.gateway.base_url, longs(12, seed=61)
    worker = next(one for one in server.processes() if "Worker" in " ".join(one.cmdline()))

    def is_healthy() -> bool:
        return cluster.gateway.instances().get("pd2", {}).get("state") == "HEALTHY"

    try:
        found = asyncio.run(streams(url, those, 6, worker.suspend))
        assert {len(tokens) for tokens in found} == {200}
        assert server.get("/health") == 200 and not is_healthy()
    finally:
        worker.resume()
    wait_for(is_healthy, READY_S, "it has joined again")


def shape(schema: Body) -> Body:
    return {
        "type": "object",
        "properties": schema,
        "required": [*schema],
        "additionalProperties": False,
    }


DIGIT = shape({"n": {"type": "integer", "minimum": 1, "maximum": 9}})
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": DIGIT}}
SHAPED: dict[str, Body] = {
    r'\{"n": [1-9]\}': {"response_format": SCHEMA},
    "yes|no": {"structured_outputs": {"choice": ["yes", "no"]}},
    "[0-9]{4}": {"structured_outputs": {"regex": "[0-9]{4}"}},
}
TOOLS = {
    "tools": [{"type": "function", "function": {"name": "note", "parameters": DIGIT}}],
    "tool_choice": "required",
}


def test_grammars_and_tools_are_followed(cluster: Cluster) -> None:
    (url,) = painted(1, 29)
    base = {**question(SAYS, url), "model": "tiny", "max_tokens": 60, "temperature": 0}
    with cluster.encoders("1e", "shm"):
        found = cluster.ask_all([{**base, **asked} for asked in SHAPED.values()])
        for pattern, text in zip(SHAPED, found, strict=True):
            assert re.fullmatch(pattern, text), text
        status, answer = asyncio.run(ask(cluster.gateway.base_url, {**base, **TOOLS}))
        assert status == 200, answer
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "note"
        assert json.loads(call["function"]["arguments"])["n"] in range(1, 10)


def test_sixty_pictures_at_once_are_encoded_once_each(cluster: Cluster) -> None:
    those = [{**body, "model": "tiny"} for body in (question(SAYS, u) for u in painted(60, 7))]
    with cluster.encoders("2e", "shm"):
        before = cluster.num_encoded()
        first = cluster.ask_all(those, at_once=60)
        wait_for(lambda: cluster.num_encoded() == before + 60, 5.0, "each once")
        again = cluster.ask_all(those[:10] * 2, at_once=20)
        assert again == first[:10] * 2 and cluster.num_encoded() == before + 60
    assert first == cluster.own(those)


async def under_load(
    url: str, those: list[Body], act: Callable[[], Coroutine[None, None, None]]
) -> list[str]:
    """`act` after a third of them."""
    answers: list[str] = []

    async def one(body: Body) -> None:
        answers.append(said(await ask(url, body)))

    async def some(part: list[Body]) -> None:
        for body in part:
            await one(body)

    async def at_a_third() -> None:
        while len(answers) < len(those) / 3:
            await asyncio.sleep(0.01)
        await act()

    parts = [those[start::6] for start in range(6)]
    await asyncio.gather(at_a_third(), *(some(part) for part in parts))
    return answers


def test_of_two_encoders_one_is_killed_and_nothing_is_lost(cluster: Cluster) -> None:
    those = [{**question(SAYS, url), "model": "tiny"} for url in painted(120, 11)]
    with cluster.encoders("2e", "shm"):
        pid = cluster.gateway.pid(cluster.serving()[0])

        async def kill() -> None:
            os.kill(pid, signal.SIGKILL)

        answers = asyncio.run(under_load(cluster.gateway.base_url, those, kill))
        assert len(answers) == 120
        assert not [text for text in answers if text[:1] in "45" and ": " in text], answers
        wait_for(lambda: len(cluster.serving()) == 2, READY_S, "it is back")


def test_the_only_encoder_is_killed_and_comes_back(cluster: Cluster) -> None:
    """One clear error within the deadline, text goes on, and vLLM is not restarted."""
    these = [{**question(SAYS, url), "model": "tiny"} for url in painted(4, 13)]
    with contextlib.ExitStack() as first:
        command = first.enter_context(contextlib.closing(_Killed(cluster)))
        assert command.serves(these[0])
    status, error = asyncio.run(ask(cluster.gateway.base_url, these[1]))
    assert status == 503 and "encode" in error, (status, error)
    text = {**question("Hello"), "model": "tiny", "max_tokens": 8}
    assert asyncio.run(ask(cluster.gateway.base_url, text))[0] == 200
    with cluster.encoders("1e", "shm"):
        assert cluster.ask_all(these) == cluster.own(these)


class _Killed:
    """An encoder whose supervisor and process are killed at the end."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._block = cluster.encoders("1e", "shm")
        self._command = self._block.__enter__()

    def serves(self, body: Body) -> bool:
        return asyncio.run(ask(self._cluster.gateway.base_url, body))[0] == 200

    def close(self) -> None:
        self._command.discard()
        wait_for(lambda: not self._cluster.serving(), READY_S, "it is lost")


def test_streams_of_a_killed_server_go_on_at_another(cluster: Cluster) -> None:
    """Token by token, pictures included."""
    run_dir = f"{cluster.gateway.run_dir}-pd1"
    flags = f"--join {cluster.endpoint} --id pd1 --run-dir {run_dir}"
    url, those = cluster.gateway.base_url, longs(40, seed=17)
    with cluster.encoders("1e", "shm"), contextlib.ExitStack() as held:
        second = VllmServer(cluster.model, flags)
        held.callback(second.discard)
        second.wait_up()
        wait_for(lambda: "pd1" in cluster.gateway.instances(), READY_S, "it has joined")
        wanted = asyncio.run(streams(url, those, 0, lambda: None))
        found = asyncio.run(streams(url, those, 20, second.kill))
        assert second.get("/health") == 0
    assert {len(tokens) for tokens in wanted} == {200}
    assert found == wanted


@pytest.mark.parametrize("kind", ["unknown", "too_many"])
def test_no_direct_request_ends_the_engine(cluster: Cluster, kind: str) -> None:
    """Metadata without rows, and a grid of more rows than lie there: 500, and it goes on."""
    from epd.vllm.connector import encode_grid

    grid = encode_grid((1, 4, 6) if kind == "unknown" else (1, 40, 60))
    length = 6 if kind == "unknown" else 600
    image = {"offset": 1, "length": length}
    body = {
        "token_ids": [1, *[2] * length, 3],
        "features": {
            "mm_hashes": {"image": ["0" * 64]},
            "mm_placeholders": {"image": [image]},
            "kwargs_data": {"image": [None]},
            "mm_metadata": {"image": [grid]},
        },
        "ec_transfer_params": {"any": {}},
        "sampling_params": {"max_tokens": 2},
    }
    counts = Counter(asyncio.run(ask(cluster.vllm.url, body, PATH))[0] for _ in range(3))
    assert counts == {500: 3} and cluster.vllm.get("/health") == 200
