"""examples/ray/epd_on_ray.py on a Ray of two nodes: asked, with an actor killed, and ended."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from epd.transport.bus.curve import ClusterKey
from epd_lab.bench.chaos.hosts import MadeHost, two_hosts, unable
from tests.e2e.hosts.placed import LONG, ROOT, Placed, program
from tests.e2e.server import READY_S, STOP_S, Failed, wait_for

SCRIPT = ROOT / "examples" / "ray" / "epd_on_ray.py"
RAY = os.environ.get("EPD_RAY") or shutil.which("ray")
RAY_PORT = 6379
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(unable()), reason=unable()),
    pytest.mark.skipif(not RAY, reason="no ray in the PATH, and none in EPD_RAY"),
]


class Ray:
    """`ray start` on both, each with a /tmp/ray of its own."""

    def __init__(self, hosts: tuple[MadeHost, ...], directory: Path, mark: str) -> None:
        self.directory = directory
        path = f"{program(directory)}:{os.environ['PATH']}"
        self._variables = (f"PATH={path}", f"EPD_MARK={mark}", "RAY_DISABLE_IMPORT_WARNING=1")
        self.a, _ = hosts
        for host in hosts:
            own = directory / f"ray-{host.name}"
            own.mkdir()
            Path("/tmp/ray").mkdir(exist_ok=True)
            host.run("mount", "--bind", str(own), "/tmp/ray")
            what = ("--head", f"--port={RAY_PORT}", "--include-dashboard=false")
            if host is not self.a:
                what = (f"--address={self.a.address}:{RAY_PORT}",)
            words = ("start", *what, f"--node-ip-address={host.address}", "--num-cpus=2")
            host.run("env", *self._variables, str(RAY), *words, "--disable-usage-stats")

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """The example, on the first host."""
        python = Path(str(RAY)).with_name("python")
        own = (*self._variables, f"RAY_ADDRESS={self.a.address}:{RAY_PORT}")
        words = [*self.a.enter, "env", *own, str(python), str(SCRIPT), *arguments]
        with (self.directory / "example.log").open("wb") as log:
            return subprocess.Popen(words, stdout=log, stderr=log)


def test_actors_keep_a_cluster(tmp_path: Path) -> None:
    key = tmp_path / "key.json"
    ClusterKey.generate().save(str(key))
    with two_hosts(("ray-a", "ray-b")) as cable:
        ray = Ray(cable.hosts, tmp_path, tmp_path.name)
        began_s = time.monotonic()
        parts = ("--first", "1e1p", "--further", "1d", "--key", str(key))
        example = ray.start(*parts, "--", "--threads", "1", "--transport", "shm,tcp")
        log = tmp_path / "example.log"
        try:
            wait_for(lambda: "/v1" in log.read_text(), READY_S, "the first node has its command")
            (head,) = (host for host in cable.hosts if f"http://{host.address}:" in log.read_text())
            cluster = Placed(head, tmp_path.name)
            first = cluster.wait_ready()
        except Failed as failed:
            raise Failed(f"{failed}\n{log.read_text()}") from None
        print(f"ready after {time.monotonic() - began_s:.1f} s")
        cluster.check_answer()
        commands = {p.ppid(): p for p in cluster.processes() if "--join" in p.cmdline()}
        actors = [pid for pid in commands if psutil.Process(pid).name().startswith("ray::")]
        psutil.Process(*actors).kill()
        second = cluster.wait_ready(first["node1-d0"])
        assert {name for name in second if second[name] != first[name]} == {"node1-d0"}
        cluster.check_answer()

        driver = psutil.Process(example.pid).children()[0]  # `example` is what entered the host
        end = lambda: driver.send_signal(signal.SIGTERM)  # noqa: E731
        reply = asyncio.run(cluster.end_while_it_answers(end, STOP_S))
        assert reply.status == 200 and reply.body["usage"]["completion_tokens"] == LONG
        assert example.wait(READY_S) == 0, log.read_text()
        wait_for(lambda: not cluster.instances(), READY_S, "nothing answers")
