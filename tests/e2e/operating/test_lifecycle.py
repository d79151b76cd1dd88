"""Starting in any order and ending in any phase: nothing is left behind."""

from __future__ import annotations

import http.client
import json
import os
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.json import decode

from epd.api.watching.cluster_view import ClusterView
from epd.cli.look.top import TopView
from epd.cli.main import main
from epd.cli.start.ports import any_free
from epd.tiny import SAMPLES
from tests.e2e.client import Body, data_url, question
from tests.e2e.server import COLD, READY_S, SLOW, STOP_S, Command, Server, discarding, run, wait_for

pytestmark = pytest.mark.timeout(300)
LONG = pytest.mark.long

RECEIPT = question("What is the total?", data_url((SAMPLES / "receipt-cafe.png").read_bytes()))
ANSWER = "10.85"
UP = "ing on http"  # "listening" where all are up before the gateway has heard of it
BACK_WITHIN_S = 2.0  # of the cut's end, where no weights are read
WAITS = question("hello", max_tokens=3, stream=True)


def ask(server: Server, body: Body, timeout_s: float = 60.0 * SLOW) -> bytes:
    request = urllib.request.Request(
        f"{server.base_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return bytes(response.read())


def content(reply: bytes) -> str:
    return str(json.loads(reply)["choices"][0]["message"]["content"])


# --- any order ------------------------------------------------------------------------------------


def worker(server: Server, role: str, name: str) -> Command:
    """`epd run --role` by hand, of the cluster with this port."""
    arguments = ["run", "--role", role, "--id", name, *server.placing(), "--threads", "1"]
    return Command(*arguments, run_dir=server.run_dir)


def test_workers_before_the_gateway_and_a_new_gateway() -> None:
    """Faults F17, F18, F44: they wait for a gateway, and join a new one when it has died."""
    server = Server("--help")  # only its port and directory are used
    with discarding(server), DiscardingAll() as started:
        worker_ahead = started(worker(server, "prefill+decode", "late-pd"))
        time.sleep(1.0)
        arguments = ["run", "--role", "gateway", *server.placing()]
        gateway = started(Command(*arguments, run_dir=server.run_dir))
        encode = started(worker(server, "encode", "late-e"))
        wait_for(lambda: all_joined(server), READY_S, "everybody has joined")
        assert content(ask(server, RECEIPT)) == ANSWER
        gateway.send(signal.SIGKILL)
        gateway.wait()
        gateway = started(Command(*arguments, run_dir=server.run_dir))
        wait_for(lambda: server.get("/health")[0] == 200, READY_S, "HTTP again")
        assert content(ask(server, RECEIPT)) == ANSWER  # waits for who has not joined yet
        wait_for(lambda: all_joined(server), READY_S, "everybody has joined again")
        for command in (encode, worker_ahead, gateway):
            command.send(signal.SIGTERM)
        for command in (encode, worker_ahead, gateway):
            assert command.wait() == 0, command.text
            assert "Traceback" not in command.text
        gateway.check_nothing_left()


LOST_SOON = ("--set", "timing.suspect_after_s=1", "--set", "timing.lost_after_s=2")


def test_who_was_expelled_after_a_cut_joins_again(capsys: pytest.CaptureFixture[str]) -> None:
    """A worker by hand that stood still for too long: a new life of the same process, with the
    weights that it has, and nobody has to start it.  What waited for it is answered."""
    with DiscardingAll() as started:
        server = started(Server("gateway", *LOST_SOON))
        commands = [started(worker(server, "prefill+decode", "alone"))]
        commands.append(started(worker(server, "encode", "eye")))
        wait_for(lambda: all_joined(server), READY_S, "everybody has joined")
        assert content(ask(server, RECEIPT)) == ANSWER
        before = server.instances()["alone"]
        stopped = psutil.Process(int(before["pid"]))
        stopped.suspend()
        wait_for(lambda: server.instances()["alone"]["state"] == "LOST", READY_S, "it is lost")
        for kind in ([], ["--state", "LOST"]):
            assert main(["list", "instances", *kind, "--url", server.base_url]) == 0
            shown = capsys.readouterr().out
            assert "LOST" in shown and "alone" in shown
        told = decode(server.get("/state")[1].encode(), type=ClusterView)
        view = TopView("told")
        view.update(told, 1.0)
        assert any("LOST, last heard" in text and "silent" in text for _, text in view.lines(40))
        waits: list[str] = []
        asking = threading.Thread(target=lambda: waits.append(content(ask(server, RECEIPT))))
        asking.start()
        stopped.resume()
        resumed_s = time.monotonic()
        wait_for(lambda: server.get("/ready")[0] == 200, READY_S, "it has joined again")
        took_s = time.monotonic() - resumed_s
        print(f"it served again after {took_s:.2f} s")
        assert took_s < BACK_WITHIN_S * SLOW
        after = server.instances()["alone"]
        assert after["epoch"] > before["epoch"] and after["pid"] == before["pid"]
        asking.join()
        assert [*waits, content(ask(server, RECEIPT))] == [ANSWER] * 2
        assert server.text.count("join refused") == 1, server.text
        for command in (*commands, server):
            command.send(signal.SIGTERM)
            assert command.wait() == 0, command.text
        server.check_nothing_left()


def all_joined(server: Server) -> bool:
    return server.get("/ready")[0] == 200 and len(server.instances()) == 2


def test_two_commands_are_one_cluster() -> None:
    """A part of the topology each, as on two hosts.  Consoles show what is missing meanwhile, and
    that of the one that joins its gateway, and the transport of each pair."""
    endpoint = f"tcp://127.0.0.1:{any_free('127.0.0.1')}"
    with DiscardingAll() as started:
        server = started(Server("1e1p", "--listen", endpoint))
        server.says(f"{endpoint}; no healthy instance has the role decode", READY_S)
        rest = started(Command("run", "--topology", "1d", "--join", endpoint, "--threads", "1"))
        server.wait_ready()
        assert content(ask(server, RECEIPT)) == ANSWER
        rest.says("serving", READY_S)
        rest.says("rows and KV move over", READY_S)
        assert endpoint in rest.text
        for command in (rest, server):
            assert command.stop(signal.SIGINT) == 130, command.text


@pytest.mark.long
def test_join_over_tcp_with_a_key(tmp_path: Path) -> None:
    """As between hosts: who has the key is a member, who has another one is not heard."""
    key, other_key = str(tmp_path / "key.json"), str(tmp_path / "other.json")
    for path in (key, other_key):
        assert run("run", "--new-key", path)[0] == 0
    endpoint = f"tcp://127.0.0.1:{any_free('127.0.0.1')}"
    join = ("--join", endpoint, "--threads", "1")
    roles = ("run", "--role", "encode+prefill+decode", *join)
    with DiscardingAll() as started:
        server = started(Server("gateway", "--listen", endpoint, "--cluster-key", key))
        stranger = started(Command(*roles, "--id", "stranger", "--cluster-key", other_key))
        member = started(Command(*roles, "--id", "member", "--cluster-key", key))
        server.wait_ready()
        assert content(ask(server, RECEIPT)) == ANSWER
        stranger.says("joining", READY_S)
        time.sleep(1.0)
        assert list(server.instances()) == ["member"]
        for command in (member, stranger, server):
            assert command.stop(signal.SIGINT) == 130, command.text
            assert "Traceback" not in command.text


class DiscardingAll:
    """Discards every command given to it."""

    def __enter__(self) -> Any:
        self._commands: list[Command] = []
        return self._keep

    def _keep(self, command: Command) -> Command:
        self._commands.append(command)
        return command

    def __exit__(self, *_: object) -> None:
        for command in self._commands:
            command.discard()


# --- ending ---------------------------------------------------------------------------------------


# tests/runtime/test_worker.py sends each within one process.
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=LONG)])
def test_open_requests_are_finished_first(number: signal.Signals) -> None:
    """The supervisor drains: what has begun ends whole, who comes later is refused in words, then
    everything stops.  So does what is on its way between the gateway and a worker that stands
    still, and has not heard of it.  All that is said meanwhile, also of an encoder that died, is
    JSON."""
    body = RECEIPT | {"max_tokens": 600, "ignore_eos": True, "stream": True}
    patient = {"timing__drain_timeout_s": 30 * SLOW}
    with discarding(Server("1e1p1d", "--log-json", **patient).wait_ready()) as server:
        server.says(UP, READY_S)
        psutil.Process(server.pid("e0")).kill()
        server.says("e0 is restarting", READY_S)
        server.wait_ready()
        replies: list[bytes] = []
        prefill = server.pid("p0")
        open_ones = [threading.Thread(target=lambda: replies.append(ask(server, body)))]
        open_ones[0].start()
        wait_for(lambda: server.metrics().get("epd_output_tokens_total", 0) > 5, 60, "it answers")
        os.kill(prefill, signal.SIGSTOP)
        open_ones.append(threading.Thread(target=lambda: replies.append(ask(server, WAITS))))
        open_ones[1].start()
        wait_for(lambda: server.metrics().get("epd_open_requests", 0) == 2, 60, "both are open")
        for _ in range(2 if number is signal.SIGHUP else 1):  # a shell says it, then the kernel
            server.send(number)
        wait_for(lambda: "shutting down" in server.get("/ready")[1], STOP_S, "it drains")
        os.kill(prefill, signal.SIGCONT)
        with pytest.raises(urllib.error.HTTPError) as refusal:
            ask(server, RECEIPT)
        with refusal.value as answer:
            assert (answer.code, answer.headers["retry-after"]) == (503, "1")
        assert server.get("/health")[0] == 200 and len(replies) < 2, "this was during the answer"
        assert server.wait() == 0
        server.check_nothing_left()
        for asking in open_ones:
            asking.join(STOP_S)
        whole = [reply.endswith(b"data: [DONE]\n\n") for reply in replies]
        assert whole == [True, True] and b'"error"' not in b"".join(replies), server.text
        assert "Traceback" not in server.text
        assert all(isinstance(json.loads(line), dict) for line in server.text.splitlines())
        for said in (UP, "gateway is draining", "d0 is stopped"):
            assert said in server.text


@pytest.mark.long
def test_a_second_interrupt_ends_at_once() -> None:
    body = RECEIPT | {"max_tokens": 3500, "ignore_eos": True, "stream": True}
    with discarding(Server("1e1p1d").wait_ready()) as server:
        asking = threading.Thread(target=ask_to_the_end, args=(server, body))
        asking.start()
        wait_for(lambda: server.metrics().get("epd_output_tokens_total", 0) > 5, 60, "it answers")
        server.send(signal.SIGINT)
        time.sleep(0.5)
        assert server.process.poll() is None, "it did not wait for the open request"
        began_s = time.monotonic()
        assert server.stop(signal.SIGINT) == 130
        print(f"ended {time.monotonic() - began_s:.1f} s after the second one")
        assert time.monotonic() - began_s < 4.0 * SLOW
        asking.join(STOP_S)
        assert "Traceback" not in server.text


def ask_to_the_end(server: Server, body: Body) -> None:
    try:
        ask(server, body)
    except (OSError, http.client.HTTPException):  # the connection was cut
        return


PHASES = [(topology, after_s) for topology in ("1e1p1d", "all") for after_s in (0.3, 0.7, 1.5, 4)]
OFTEN = [("1e1p1d", 4), ("all", 1.5)]


@pytest.mark.parametrize(
    ("topology", "after_s"), [pytest.param(*p, marks=() if p in OFTEN else LONG) for p in PHASES]
)
def test_ctrl_c_in_every_phase(topology: str, after_s: float) -> None:
    """Before, while and after loading: no process, no segment, no socket stays, no traceback."""
    with discarding(Server(topology, program=COLD)) as server:
        time.sleep(after_s)
        status = server.stop(signal.SIGINT)
        assert status == 130, server.text
        assert "Traceback" not in server.text, server.text


@pytest.mark.parametrize("words", [pytest.param("loading", marks=LONG), "Ctrl-C stops it"])
def test_ctrl_c_of_the_demo(words: str) -> None:
    """While its cluster starts, and when its three answers are there and it waits."""
    with discarding(command_in_own_dir("demo", "--keep")) as demo:
        demo.says(words, READY_S)
        if words != "loading":
            children = psutil.Process(demo.process.pid).children()
            (zygote,) = [p for p in children if "epd.runtime.zygote" in p.cmdline()]
            assert zygote.num_threads() == 1, "others would be lost in its forks"
        assert demo.stop(signal.SIGINT) == 130, demo.text
        assert "Traceback" not in demo.text, demo.text
        assert "WRONG" not in demo.text
        assert demo.text.count("(right)") == (0 if words == "loading" else 3)


def test_ask_of_a_temporary_server() -> None:
    """The answer on stdout, the status lines on stderr, nothing afterwards."""
    image = str(SAMPLES / "receipt-cafe.png")
    arguments = ["ask", "What is the total?", "--image", image, "--topology", "1epd", "--json"]
    with discarding(command_in_own_dir(*arguments)) as asking:
        assert asking.wait(READY_S) == 0, asking.text
        asking.check_nothing_left()
        answer = next(line for line in asking.text.splitlines() if line.startswith("{"))
        found = json.loads(answer)
        assert (found["answer"], found["finish_reason"]) == (ANSWER, "stop")
        states = [(e["machine"].partition("@")[0], e["state"]) for e in found["timeline"]]
        assert ("ENCODING", "RESIDENT") in states and ("GENERATION", "FINISHED") in states


def command_in_own_dir(*arguments: str) -> Command:
    run_dir = Path(tempfile.mkdtemp(prefix="epd-e2e-", dir="/tmp"))
    arguments += ("--run-dir", str(run_dir), "--threads", "1")
    return Command(*arguments, run_dir=run_dir, program=COLD)


@pytest.mark.long  # test_supervision.py kills one, too
def test_kill_of_the_supervisor_leaves_nothing() -> None:
    with discarding(Server("1e1p1d", program=COLD).wait_ready()) as server:
        assert len(server.processes()) == 6  # supervisor, gateway, zygote, three workers
        server.send(signal.SIGKILL)
        server.wait()
        server.check_nothing_left()


@pytest.mark.long
def test_kill_of_the_supervisor_while_loading_leaves_nothing() -> None:
    with discarding(Server("1e1p1d", program=COLD)) as server:
        wait_for(lambda: len(server.processes()) == 6, READY_S, "six processes")
        server.send(signal.SIGKILL)
        server.wait()
        server.check_nothing_left(READY_S)
