"""examples/slurm/epd.sbatch on a Slurm of two nodes: asked, with an instance killed, requeued and
cancelled."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.client import Reply, post_all, question
from tests.e2e.faults.test_kill import ANSWER, HEALTHY
from tests.e2e.hosts.network import two_hosts, unable
from tests.e2e.hosts.slurm import KILL_WAIT_S, Slurm, absent
from tests.e2e.server import READY_S, wait_for

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "slurm" / "epd.sbatch"
PORT = 8000
LONG = 1500  # tokens
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(unable() or absent()), reason=unable() or absent()),
]


class Job:
    """As a client sees it."""

    def __init__(self, slurm: Slurm, mark: str) -> None:
        self.slurm = slurm
        self.url = f"http://{slurm.a.client_address}:{PORT}"
        self._mark = mark
        program = slurm.directory / "bin" / "epd"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m epd "$@"\n')
        program.chmod(0o755)
        flags = "--threads 1 --transport shm,tcp"
        given = {"FIRST": "1e1p", "FURTHER": "1d", "PORT": PORT, "FLAGS": flags, "MARK": mark}
        more = [f"EPD_{name}={value}" for name, value in given.items()]
        more += [f"PATH={program.parent}:{os.environ['PATH']}", f"PYTHONPATH={ROOT}"]
        where = ("--parsable", f"--chdir={slurm.directory}", f"--output={slurm.directory}/job.log")
        self.id = slurm.call(slurm.a, "sbatch", *where, str(SCRIPT), more=more).strip()

    def instances(self) -> dict[str, dict[str, Any]]:
        """Of those that serve, if every stage does; else none."""
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5.0) as response:
                told = json.load(response)["instances"]
        except OSError:
            return {}
        return {one["instance"]: one for one in told if one["state"] == "HEALTHY"}

    def epochs(self) -> dict[str, int]:
        return {name: one["epoch"] for name, one in self.instances().items()}

    def wait_ready(self, *but: int) -> dict[str, int]:
        """Until three instances serve, none of them in one of these epochs."""

        def ready() -> dict[str, int]:
            found = self.epochs()
            return found if len(found) == 3 and not {*but} & {*found.values()} else {}

        try:
            found: dict[str, int] = wait_for(ready, READY_S, "the job serves")
        except AssertionError as error:
            raise AssertionError(f"{error}{self.slurm.text}") from None
        return found

    def answer(self) -> str:
        (reply,) = asyncio.run(post_all(self.url, [HEALTHY]))
        return reply.text

    async def cancel_while_it_answers(self) -> tuple[Reply, float]:
        """The answer that was open then, and the time until nothing of the job ran any more."""
        body = question("Tell me about it.", max_tokens=LONG, ignore_eos=True)
        answer = asyncio.create_task(post_all(self.url, [body]))
        await asyncio.sleep(0)
        await asyncio.to_thread(wait_for, self.is_busy, READY_S, "the question is open")
        began_s = time.monotonic()
        self.slurm.call(self.slurm.a, "scancel", self.id)
        ended = lambda: not self.processes()  # noqa: E731
        await asyncio.to_thread(wait_for, ended, KILL_WAIT_S, "the job's processes end")
        return (await answer)[0], time.monotonic() - began_s

    def is_busy(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5.0) as response:
            return b"epd_open_requests 1.0" in response.read()

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("EPD_MARK") == self._mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found


def test_a_job_serves_is_requeued_and_cancelled(tmp_path: Path) -> None:
    with two_hosts(("node-a", "node-b")) as cable:
        slurm = Slurm(cable, tmp_path)
        job = Job(slurm, tmp_path.name)
        began_s = time.monotonic()
        first = job.wait_ready()
        print(f"ready {time.monotonic() - began_s:.1f} s after the job was submitted")
        (decode,) = (name for name in first if name.startswith("node-b-"))
        assert job.instances()["p0"]["transports"] == {"e0": "shm", decode: "tcp"}
        assert job.answer() == ANSWER

        slurm.b.signal(signal.SIGKILL, job.instances()[decode]["pid"])
        second = job.wait_ready(first[decode])
        assert {name for name in second if second[name] != first[name]} == {decode}
        assert job.answer() == ANSWER

        slurm.call(slurm.a, "scontrol", "requeue", job.id)
        wait_for(lambda: not job.processes(), KILL_WAIT_S, "the job's processes end")
        wait_for(lambda: slurm.state_of(job.id) == "PENDING", READY_S, "it is queued again")
        slurm.call(slurm.a, "scontrol", "update", f"JobId={job.id}", "StartTime=now")
        job.wait_ready(*second.values())
        assert job.answer() == ANSWER

        reply, took_s = asyncio.run(job.cancel_while_it_answers())
        print(f"cancelled: the answer came, and all was gone after {took_s:.1f} s")
        assert reply.status == 200 and reply.body["usage"]["completion_tokens"] == LONG
        assert "Traceback" not in (tmp_path / "job.log").read_text()
        wait_for(lambda: slurm.states() == {"idle"}, READY_S, "nodes are idle, and not drained")
