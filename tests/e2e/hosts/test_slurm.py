"""examples/slurm/epd.sbatch on a Slurm of two nodes: asked, with an instance killed, requeued and
cancelled."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from epd_lab.bench.chaos.hosts import two_hosts, unable
from tests.e2e.hosts.placed import LONG, PORT, ROOT, Placed, program
from tests.e2e.hosts.slurm import KILL_WAIT_S, Slurm, absent
from tests.e2e.server import READY_S, Failed, wait_for

SCRIPT = ROOT / "examples" / "slurm" / "epd.sbatch"
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(unable() or absent()), reason=unable() or absent()),
]


def submitted(slurm: Slurm, mark: str) -> str:
    """Its number."""
    flags = "--threads 1 --transport shm,tcp"
    given = {"FIRST": "1e1p", "FURTHER": "1d", "PORT": PORT, "FLAGS": flags, "MARK": mark}
    more = [f"EPD_{name}={value}" for name, value in given.items()]
    more.append(f"PATH={program(slurm.directory)}:{os.environ['PATH']}")
    where = ("--parsable", f"--chdir={slurm.directory}", f"--output={slurm.directory}/job.log")
    return slurm.call(slurm.a, "sbatch", *where, str(SCRIPT), more=more).strip()


def test_a_job_serves_is_requeued_and_cancelled(tmp_path: Path) -> None:
    with two_hosts(("node-a", "node-b")) as cable:
        slurm = Slurm(cable, tmp_path)
        began_s = time.monotonic()
        job, cluster = submitted(slurm, tmp_path.name), Placed(slurm.a, tmp_path.name)
        try:
            first = cluster.wait_ready()
        except Failed as failed:
            raise Failed(f"{failed}{slurm.text}") from None
        print(f"ready {time.monotonic() - began_s:.1f} s after the job was submitted")
        (decode,) = (name for name in first if name.startswith("node-b-"))
        assert cluster.instances()["p0"]["transports"] == {"e0": "shm", decode: "tcp"}
        cluster.check_answer()

        slurm.b.signal(signal.SIGKILL, cluster.instances()[decode]["pid"])
        second = cluster.wait_ready(first[decode])
        assert {name for name in second if second[name] != first[name]} == {decode}
        cluster.check_answer()

        slurm.call(slurm.a, "scontrol", "requeue", job)
        cluster.wait_gone(KILL_WAIT_S)
        wait_for(lambda: slurm.state_of(job) == "PENDING", READY_S, "it is queued again")
        slurm.call(slurm.a, "scontrol", "update", f"JobId={job}", "StartTime=now")
        cluster.wait_ready(*second.values())
        cluster.check_answer()

        began_s = time.monotonic()
        cancel = lambda: slurm.call(slurm.a, "scancel", job)  # noqa: E731
        reply = asyncio.run(cluster.end_while_it_answers(cancel, KILL_WAIT_S))
        print(f"cancelled: the answer came, and all was gone in {time.monotonic() - began_s:.1f} s")
        assert reply.status == 200 and reply.body["usage"]["completion_tokens"] == LONG
        assert "Traceback" not in (tmp_path / "job.log").read_text()
        wait_for(lambda: slurm.states() == {"idle"}, READY_S, "nodes are idle, and not drained")
