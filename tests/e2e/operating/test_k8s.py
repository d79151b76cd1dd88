"""What `epd k8s render` writes, as processes of this host: each pod's command line, one address."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from epd.cli.k8s.manifests import INSTANCE_PORT
from epd.cli.k8s.pods import JOIN_PORT, KEY_DIR, KEY_FILE
from epd.cli.main import main
from epd.cli.start.ports import any_free
from epd.tiny import SAMPLES
from tests.e2e.client import data_url, in_session, post, question
from tests.e2e.server import READY_S, Command, wait_for

LOCAL = "127.0.0.1"
IMAGE = data_url((SAMPLES / "receipt-cafe.png").read_bytes())
BODY = question("What is the total?", IMAGE)


def command_line(deployment: Any, key: str, ports: dict[str, int], name: str) -> list[str]:
    """As a pod's, with this host's address for every other."""
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    own = {
        "$(POD_NAME)": name,
        "$(POD_IP)": LOCAL,
        "epd-join": LOCAL,
        "0.0.0.0": LOCAL,
        f":{JOIN_PORT}": f":{ports['join']}",
        f":{INSTANCE_PORT}": f":{ports[name]}",
        f"{KEY_DIR}/{KEY_FILE}": key,
    }
    words = [*container["args"], "--threads", "1"]
    for there, here in own.items():
        words = [word.replace(there, here) for word in words]
    return words


def is_open(port: int) -> bool:
    """As the kubelet asks: connect and leave."""
    with contextlib.suppress(OSError), socket.create_connection((LOCAL, port), 1.0):
        return True
    return False


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


@pytest.mark.long
@pytest.mark.parametrize("form", [("1e1pd:tp2",), ("1e1pd", "--pod-per-node")])
def test_rendered_command_lines_serve_and_drain(
    form: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They join over TCP with the cluster's key, one of them a group of ranks, or all of a pod,
    answer who has an API key, and end in order.  Probes find them."""
    key, port = str(tmp_path / "key.json"), any_free(LOCAL)
    assert main(["run", "--new-key", key]) == 0
    capsys.readouterr()
    flags = ["--topology", *form, "--image", "I", "--port", str(port), "--transport", "tcp"]
    assert main(["k8s", "render", *flags]) == 0
    rendered = list(yaml.safe_load_all(capsys.readouterr().out))
    pods = {one["metadata"]["name"]: one for one in rendered if one["kind"] == "Deployment"}
    ports = {name: any_free(LOCAL) for name in ("join", *pods)}
    monkeypatch.setenv("EPD_API_KEY", "open sesame")
    url = f"http://{LOCAL}:{port}"
    with contextlib.ExitStack() as stack:
        started = {}
        for name, pod in pods.items():
            started[name] = Command(*command_line(pod, key, ports, name))
            stack.callback(started[name].discard)
        instances = [name for name in pods if name != "epd-gateway"]
        for name in instances if len(form) == 1 else ():
            wait_for(lambda name=name: is_open(ports[name]), READY_S, f"{name} is ready")
        wait_for(lambda: status_of(f"{url}/ready") == 200, READY_S, "the gateway is ready")
        assert status_of(f"{url}/health") == 200
        replies = asyncio.run(in_session(lambda session: ask(session, url)))
        assert [reply.status for reply in replies] == [401, 200]
        assert replies[1].text == "10.85"
        with urllib.request.urlopen(f"{url}/ready", timeout=5.0) as response:
            told = json.load(response)["instances"]
        if len(form) == 1:
            assert {one["instance"] for one in told} == set(instances)
        count = str(len(told) // len(instances))
        for name in instances:
            where = ("--gateway", f"{LOCAL}:{port}", "--pod", name, "--instances", count)
            assert main(["k8s", "probe", *where]) == 0, told
        for command in started.values():
            command.send(signal.SIGTERM)
        for name in pods:
            assert started[name].wait() == 0, started[name].text
            assert "Traceback" not in started[name].text
        for command in started.values():
            command.check_nothing_left()


async def ask(session: Any, url: str) -> list[Any]:
    return [await post(session, url, BODY), await post(session, url, BODY, x_api_key="open sesame")]
