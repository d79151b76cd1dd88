"""Slurm on two hosts, by Debian's packages: munge and slurmd on both, slurmctld on the first."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from epd_lab.bench.chaos.hosts import HostCable, MadeHost
from tests.e2e.server import wait_for

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
KILL_WAIT_S = 30
START_S = 60.0
CONF = """
ClusterName=two
SlurmctldHost={a.name}({a.address})
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=20
KillWait={kill_wait_s}
GresTypes=gpu
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
NodeName={a.name} NodeAddr={a.address} CPUs=2 Gres=gpu:2 State=UNKNOWN
NodeName={b.name} NodeAddr={b.address} CPUs=2 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# slurmd looks for cgroups, whatever it tracks processes by; a GPU is a file to it.
HOST = """
mkdir -m 755 /run/munge
mount -t tmpfs cgroup /sys/fs/cgroup && mkdir /sys/fs/cgroup/systemd
mount -t cgroup -o none,name=systemd systemd /sys/fs/cgroup/systemd
mknod /run/gpu0 c 1 3 && mknod /run/gpu1 c 1 3
munged --force --key-file={directory}/munge.key --pid-file=/run/munge/pid \
  --log-file=/run/munge/log --seed-file=/run/munge/seed
"""


def absent() -> str:
    """What is not installed; empty if all is there."""
    names = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
    return f"no {', '.join(names)} here (Debian: slurm-wlm, munge)" if names else ""


class Slurm:
    """Of two nodes, which are idle when it is made."""

    def __init__(self, cable: HostCable, directory: Path) -> None:
        self.directory = directory
        self.a, self.b = cable.hosts
        (directory / "state").mkdir()
        conf = CONF.format(a=self.a, b=self.b, directory=directory, kill_wait_s=KILL_WAIT_S)
        (directory / "slurm.conf").write_text(conf)
        (directory / "gres.conf").write_text("Name=gpu File=/run/gpu[0-1]\n")
        key = directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        for host in cable.hosts:
            (directory / f"spool-{host.name}").mkdir()
            self.call(host, "sh", "-ec", HOST.format(directory=directory))
        self.call(self.a, "slurmctld")
        for host in cable.hosts:
            self.call(host, "slurmd", "-N", host.name)
        wait_for(lambda: self.states() == {"idle"}, START_S, "both nodes are idle")

    def call(self, host: MadeHost, *command: str, more: Sequence[str] = ()) -> str:
        """`more`: variables, as NAME=VALUE.  Raises AssertionError."""
        own = ("env", f"SLURM_CONF={self.directory}/slurm.conf", f"PATH={PATH}", *more)
        words = [*host.enter, *own, *command]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.text}"
        return done.stdout

    def states(self) -> set[str]:
        """Of the nodes."""
        return set(self.call(self.a, "sinfo", "-h", "-N", "-o", "%T").split())

    def state_of(self, job: str) -> str:
        """`PENDING`, `RUNNING`, … or empty when it is gone."""
        rows = self.call(self.a, "squeue", "-h", "-t", "all", "-o", "%i %T").splitlines()
        return dict(row.split() for row in rows).get(job, "")

    @property
    def text(self) -> str:
        """Its logs."""
        logs = sorted(self.directory.glob("*.log"))
        return "".join(f"\n{path.name}:\n{path.read_text(errors='replace')}" for path in logs)
