"""The checks behind `epd doctor`.

Each check is a function that returns a `Check` and never raises: `examine` turns what escapes into
a failed check of that name. Libraries that may be broken are looked at from outside (metadata, a
child process), so that a bad installation is reported and not suffered.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import importlib.metadata
import json
import os
import platform
import resource
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd.cli.ask import tls
from epd.cli.configure.model_check import bundled_model, check_model
from epd.cli.start import leftovers
from epd.cli.start.ports import any_free, is_free
from epd.cli.start.preflight import memory_nbytes
from epd.cli.start.rundir import base_dir, cluster_dir
from epd.config import ConfigError, EngineConfig
from epd.engine.weights import stored as stored_weights
from epd.model_files.checkpoint import weight_files
from epd.model_files.geometry import images_of
from epd.scheduling.slots import POOL_ROWS
from epd.transport.endpoint import is_answered
from epd.transport.shm.segment import free_nbytes

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    "aiohttp", "av", "httptools", "huggingface-hub", "jinja2", "msgspec", "numpy", "pillow",
    "prompt-toolkit", "pyzmq", "safetensors", "tokenizers", "torch", "transformers", "transitions",
    "uvicorn", "uvloop",
)  # fmt: skip
INSTALL = "make env, or: pip install -c constraints.txt -e ."
MIN_FREE_MEMORY_NBYTES = 2 << 30  # three processes with torch, and the tiny model
MIN_OPEN_FILES = 1024
BUNDLED_ROW_NBYTES = 3072
SHM = Path("/dev/shm")
READY_TIMEOUT_S = 5.0

Ask = Callable[[], list[dict[str, Any]]]  # what a gateway at the port says of its instances

_ASK_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda,
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    "available": cuda,
}))
"""
_ASK_TRANSPORTS = """
import json
from epd.transport.backends import BACKENDS
print(json.dumps({name: backend.lacks() for name, backend in BACKENDS.items()}))
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; `remedy` is what to do about it, if anything."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


def examine(
    model: str, host: str, port: int, run_dir: str, cacert: str = "", *, fix: bool = False
) -> list[Check]:
    """All checks, in the order in which a person would fix things."""
    runtime = Path(run_dir).absolute() if run_dir else base_dir()
    instances = functools.cache(lambda: _instances(host, port))  # asked once, when first needed
    looks: list[tuple[str, Callable[[], Check]]] = [
        ("python", check_python),
        ("packages", check_packages),
        ("torch", check_torch),
        ("machine", check_machine),
        ("open-files", check_open_files),
        ("shared-memory", check_shared_memory),
        ("port", lambda: check_port(host, port, runtime, instances)),
        ("tls", lambda: check_tls(host, port, cacert)),
        ("run-dir", lambda: check_run_dir(runtime)),
        ("running", lambda: check_running(runtime, port, instances)),
        ("pairs", lambda: check_pairs(host, port, instances)),
        ("leftovers", lambda: check_leftovers(runtime, fix=fix)),
        ("tiny-model", lambda: check_checkpoint("tiny-model", "")),
        ("transports", check_transports),
    ]
    if model:
        looks.append(("model", lambda: check_checkpoint("model", model)))
    return [_look(name, look) for name, look in looks]


def _look(name: str, look: Callable[[], Check]) -> Check:
    from epd.errors import explain

    try:
        return look()
    except Exception as error:
        return Check(name, ok=False, detail=explain(error)[1])


def check_python() -> Check:
    version = platform.python_version()
    ok = (3, 11) <= sys.version_info < (3, 14)
    remedy = "" if ok else "make clean, then make env PYTHON=python3.11 (3.11 to 3.13 work)"
    return Check("python", ok, f"{version} at {sys.executable}", remedy)


def pins(text: str) -> dict[str, str]:
    """Name to version from the lines of a constraints file."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pairs = (line.split("==", 1) for line in lines if "==" in line)
    return {name.lower().replace("_", "-"): version for name, version in pairs}


def check_packages() -> Check:
    file = ROOT / "constraints.txt"
    tested = pins(file.read_text(encoding="utf-8")) if file.is_file() else {}
    missing, differing = [], []
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if tested.get(name, version) != version:
            differing.append(f"{name} {version} (tested with {tested[name]})")
    if missing:
        return Check("packages", ok=False, detail=f"missing: {', '.join(missing)}", remedy=INSTALL)
    if differing:
        return Check("packages", ok=True, detail=f"differ: {', '.join(differing)}", remedy=INSTALL)
    known = "as in constraints.txt" if tested else "no constraints.txt to compare with"
    return Check("packages", ok=True, detail=f"{len(PACKAGES)} installed, {known}")


def _asked(code: str) -> tuple[dict[str, Any], str]:
    """The last line that a child process prints; or the last one before it fails."""
    asked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    if asked.returncode:
        return {}, (asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"])[-1]
    return json.loads(asked.stdout.splitlines()[-1]), ""


def check_torch() -> Check:
    answer, fault = _asked(_ASK_TORCH)
    if fault:
        return Check("torch", ok=False, detail=f"it cannot be imported: {fault}", remedy=INSTALL)
    devices = ", ".join(answer["devices"])
    if answer["available"]:
        return Check("torch", ok=True, detail=f"{answer['version']}, CUDA devices: {devices}")
    if answer["cuda"]:
        return Check(
            "torch", ok=True, detail=f"{answer['version']}, a CUDA build that sees no GPU",
            remedy="use --device cpu; if there is a GPU, nvidia-smi tells what its driver lacks",
        )  # fmt: skip
    return Check("torch", ok=True, detail=f"{answer['version']}, CPU only")


def check_machine() -> Check:
    cores = len(os.sched_getaffinity(0))
    there_nbytes = memory_nbytes()
    detail = f"{cores} cores, {there_nbytes / 2**30:.1f} GiB of memory available"
    if there_nbytes < MIN_FREE_MEMORY_NBYTES:
        needed = f"{MIN_FREE_MEMORY_NBYTES / 2**30:g} GiB"
        remedy = f"free memory until {needed} are there, or use a topology of fewer processes: 1epd"
        return Check("machine", ok=False, detail=detail, remedy=remedy)
    return Check("machine", ok=True, detail=detail)


def check_open_files() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft >= MIN_OPEN_FILES or soft == resource.RLIM_INFINITY
    remedy = "" if enough else f"ulimit -n {MIN_OPEN_FILES} or more, before epd run"
    return Check("open-files", enough, f"up to {soft} per process", remedy)


def check_shared_memory() -> Check:
    if not SHM.is_dir() or not os.access(SHM, os.W_OK):
        return Check(
            "shared-memory", ok=False, detail=f"{SHM} is not there or not writable",
            remedy=f"mount -t tmpfs tmpfs {SHM}",
        )  # fmt: skip
    there_nbytes = free_nbytes(str(SHM))
    needed_nbytes = POOL_ROWS * BUNDLED_ROW_NBYTES + EngineConfig().kv_nbytes
    detail = (
        f"{SHM} has {there_nbytes / 2**20:.0f} MiB free; 1e1p1d takes {needed_nbytes >> 20} MiB"
    )
    if there_nbytes < needed_nbytes:
        remedy = (
            f"mount -o remount,size=1g {SHM} (docker run --shm-size=1g), or lower engine.kv_nbytes"
        )
        return Check("shared-memory", ok=False, detail=detail, remedy=remedy)
    return Check("shared-memory", ok=True, detail=detail)


def check_port(host: str, port: int, run_dir: Path, instances: Ask) -> Check:
    """Free, or used by a gateway of epd; anything else there is in the way of one."""
    try:
        free = is_free(host, port)
    except ConfigError as error:
        return Check("port", ok=False, detail=str(error))
    if free:
        return Check("port", ok=True, detail=f"{port} of {host} is free")
    if is_answered(str(cluster_dir(port, run_dir) / "gateway.sock")) or instances():
        return Check("port", ok=True, detail=f"{port} of {host} is served by epd's own gateway")
    return Check(
        "port", ok=False, detail=f"{port} of {host} is in use",
        remedy=f"stop what listens there, or use another: --port {any_free(host)}",
    )  # fmt: skip


def check_tls(host: str, port: int, cacert: str) -> Check:
    """Whether clients that trust the same CAs take the certificate of what listens there."""
    context = tls.trusting(cacert)
    try:
        with (
            socket.create_connection((host, port), READY_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as spoken,
        ):
            until = (spoken.getpeercert() or {}).get("notAfter")
    except ssl.SSLCertVerificationError as error:
        detail, _, remedy = tls.distrust(error).partition("; ")
        return Check("tls", ok=False, detail=f"{host}:{port}: {detail}", remedy=remedy)
    except OSError:
        return Check("tls", ok=True, detail=f"none is spoken at {host}:{port}")
    return Check("tls", ok=True, detail=f"the certificate at {host}:{port} is good until {until}")


def check_run_dir(directory: Path) -> Check:
    if not directory.exists():
        return Check("run-dir", ok=True, detail=f"{directory} will be made")
    info = directory.stat()
    if info.st_uid != os.getuid():
        remedy = "give a directory of your own with --run-dir"
        return Check("run-dir", False, f"{directory} belongs to another user", remedy)
    if info.st_mode & 0o077:
        return Check("run-dir", False, f"{directory} is open to others", f"chmod 700 {directory}")
    return Check("run-dir", ok=True, detail=f"{directory} is private")


def check_running(directory: Path, port: int, instances: Ask) -> Check:
    """By sockets, and, as `--role all` has none between its stages, by what answers at the port."""
    found = leftovers.sockets(directory)
    clusters: dict[str, list[str]] = {}
    for path in found.live:
        clusters.setdefault(path.parent.name, []).append(path.stem)
    for instance in instances():
        names = clusters.setdefault(str(port), ["gateway"])
        if instance["instance"] not in names:
            names.append(instance["instance"])
    detail = "; ".join(f"{name}: {', '.join(ids)}" for name, ids in clusters.items())
    return Check("running", ok=True, detail=detail or "no instance of epd in this run directory")


def check_pairs(host: str, port: int, instances: Ask) -> Check:
    """Which transport each pair of instances uses that runs behind this port."""
    if not instances():
        return Check("pairs", ok=True, detail=f"no instance of epd behind {host}:{port}")
    pairs = {
        f"{min(one, other)}-{max(one, other)} {transport}{_why(instance, other)}"
        for instance in instances()
        for one in (instance["instance"],)
        for other, transport in instance["transports"].items()
    }
    return Check("pairs", ok=True, detail=", ".join(sorted(pairs)) or "no two instances exchange")


def _why(instance: dict[str, Any], other: str) -> str:
    reason = instance.get("fallbacks", {}).get(other)
    return f" ({reason})" if reason else ""


def _instances(host: str, port: int) -> list[dict[str, Any]]:
    """The instances that a gateway lists, with or without TLS; empty if none answers."""
    answer = None
    for connection in (
        http.client.HTTPConnection(host, port, timeout=READY_TIMEOUT_S),
        http.client.HTTPSConnection(host, port, timeout=READY_TIMEOUT_S, context=tls.unverified()),
    ):
        with contextlib.closing(connection):
            try:
                connection.request("GET", "/ready")
                answer = json.load(connection.getresponse())
                break
            except (OSError, http.client.HTTPException):
                continue
            except ValueError:
                break
    found = answer.get("instances") if isinstance(answer, dict) else None
    return found if isinstance(found, list) else []


def check_leftovers(directory: Path, *, fix: bool) -> Check:
    dead = [*leftovers.sockets(directory).dead, *leftovers.segments(SHM)]
    if not dead:
        return Check("leftovers", ok=True, detail="none")
    names = ", ".join(path.name for path in dead[:5]) + (", ..." if len(dead) > 5 else "")
    if fix:
        leftovers.remove(directory, SHM)
        return Check("leftovers", ok=True, detail=f"removed {len(dead)}: {names}")
    detail = f"{len(dead)} of dead processes: {names}"
    return Check("leftovers", ok=False, detail=detail, remedy="epd doctor --fix removes them")


def check_checkpoint(name: str, model: str) -> Check:
    checkpoint = check_model(model)
    directory = checkpoint.directory
    where = "bundled" if directory == bundled_model() else str(directory)
    images = images_of(checkpoint.config)
    takes = "text" if images is None else "text, images" + ", videos" * (images.video is not None)
    gigabytes = sum(path.stat().st_size for path in weight_files(directory)) / 1e9
    detail = f"{where}, {checkpoint.model_type}, takes {takes}, {len(checkpoint.tensors)} tensors"
    few = stored_weights.sizes(checkpoint, checkpoint.tensors)
    told = [f"{nbytes / 1e9:.3g} in {name}" for name, nbytes in few.items()]
    detail += f", {gigabytes:.3g} GB" + (f" ({', '.join(told)})" if told else "")
    return Check(name, ok=True, detail=detail)


def check_transports() -> Check:
    """How rows and KV can move here; what a broken library does to its importer is not ours."""
    lacks, fault = _asked(_ASK_TRANSPORTS)
    if fault:
        return Check("transports", ok=False, detail=f"they cannot be imported: {fault}")
    usable = ", ".join(name for name, reason in lacks.items() if not reason)
    detail = f"{usable} (auto: the first of them by which a pair reaches each other)"
    return Check(
        "transports", ok=True, detail=detail, remedy="; ".join(filter(None, lacks.values()))
    )
