"""Equal plans give equal traces: in other processes, under other hash seeds, by other Pythons; and
nothing in roles, fsm and scheduling can break that."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.sim.determinism_lint import problems
from tests.test_tidy import PURE

ROOT = Path(__file__).parents[2]
NEEDED = ("msgspec", "transitions", "six")  # all that `epd sim` takes from outside
SCRIPT = """
from epd_lab.sim.drills import by_name
from epd_lab.sim.run import run
from epd_lab.sim.swarm.plans import draw_plan
plans = [draw_plan(11), draw_plan(132), by_name("slow-bytes").plan(3)]
print([run(plan).digest for plan in plans])
"""


def run_python(python: str, script: str, hash_seed: str = "0") -> str:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    command = [python, "-W", "ignore", "-c", script]
    found = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


@functools.cache
def digests(hash_seed: str, python: str = sys.executable) -> str:
    return run_python(python, SCRIPT, hash_seed)


def test_digests_are_equal_over_hash_seeds() -> None:
    assert digests("1") == digests("4711")


# --- other Pythons --------------------------------------------------------------------------------


def interpreter(version: str) -> str:
    """A Python of this version, or an empty string."""
    installed = Path.home().glob(f".pyenv/versions/{version}*/bin/python")
    named = shutil.which(f"python{version}")
    for python in (*([named] if named else []), *map(str, sorted(installed))):
        probe = f"import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
        if not subprocess.call([python, "-c", probe], stderr=subprocess.DEVNULL):
            return python
    return ""


def environment(version: str) -> str:
    """The Python of an environment with what `epd sim` needs: made once, and kept.

    Skips the test, and says why, if it cannot be made here.
    """
    base = interpreter(version)
    if not base:
        pytest.skip(f"no Python {version} here")
    cache = Path(tempfile.gettempdir()) / f"epd-tests-{os.getuid()}"
    python = cache / f"python{version}" / "bin" / "python"
    probe = [str(python), "-c", "import msgspec, transitions"]
    if python.exists() and not subprocess.call(probe, stderr=subprocess.DEVNULL):
        return str(python)
    cache.mkdir(exist_ok=True)
    make = [base, "-m", "venv", "--clear", "--without-pip", str(python.parents[1])]
    subprocess.run(make, check=True, timeout=60)
    wanted = rf"^(?:{'|'.join(NEEDED)})==.*$"
    pins = re.findall(wanted, (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    command = [*pip, "install", "-q", "--disable-pip-version-check", *pins]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if installed.returncode:
        pytest.skip(f"{' and '.join(pins)} cannot be had: {installed.stderr.strip()[-200:]}")
    return str(python)


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_digests_are_equal_over_python_versions(version: str) -> None:
    assert digests("1") == digests("2", environment(version))


# --- a bare machine -------------------------------------------------------------------------------

BARE = """
import builtins, sys
real = builtins.__import__
allowed = {*sys.stdlib_module_names, "epd", "epd_lab", "tests", "msgspec", "transitions", "six"}
def bare(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and name.split(".")[0] not in allowed:
        raise ModuleNotFoundError(f"a bare machine has no {name}", name=name)
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = bare
from epd.cli.main import main
for line in (
    "list", "drill quiet --seeds 1 --jobs 1", "swarm --seeds 1 --jobs 1", "model instance",
    "mutants drop_parked_bytes --jobs 1",
):
    status = main(["sim", *line.split()])
    assert status == 0, (line, status)
assert not {"torch", "numpy", "zmq", "transformers"} & set(sys.modules)
"""


def test_everything_runs_on_a_bare_machine() -> None:
    """No torch, no numpy, no zmq: only msgspec and transitions may be imported."""
    assert "caught by" in run_python(sys.executable, BARE)


# --- the lint -------------------------------------------------------------------------------------


def _is_pure(path: Path) -> bool:
    return str(path.relative_to(ROOT)).startswith(PURE)


SOURCES = sorted(path for path in (ROOT / "epd").rglob("*.py") if _is_pure(path))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_undetermined(path: Path) -> None:
    assert problems(ast.parse(path.read_text())) == []


PLANTED = [
    "import time",
    "from time import monotonic",
    "from random import random",
    "def f(now=time.monotonic):\n    import time",
    "asyncio.TaskGroup()",
    "from asyncio import TaskGroup",
    "asyncio.wait(tasks)",
    "from asyncio import wait",
    "asyncio.as_completed(tasks)",
    "asyncio.to_thread(f)",
    "order = id(x)",
    "for x in {1, 2}: f(x)",
    "[f(x) for x in set(names)]",
    "for x in a.keys() | set(b): f(x)",
    "names: set[str] = g()\nfor x in names: f(x)",
    "def f(names: set[str]):\n    return list(names)",
    "def f(names: frozenset[str] | None):\n    for x in names: g(x)",
    "class A:\n    def f(self):\n        self.lost = set()\n        for x in self.lost: g(x)",
    "class A:\n    lost: set[str]\n    def f(self):\n        return tuple(self.lost)",
    "lost = set()\nfirst = lost.pop()",
    "lost = set()\nf(*lost)",
    "lost = {1}\n','.join(lost)",
    "lost = {1}\nnext(iter(lost))",
    "def f():\n    lost = {1}\n    def g():\n        for x in lost: h(x)",
]

HARMLESS = [
    "lost = {1}\nfor x in sorted(lost): f(x)",
    "a = {1}\nb = {f(x) for x in a}",
    "a = {1}\nok = any(x > 1 for x in a)",
    "x in {1, 2}",
    "asyncio.wait_for(f(), 3)",
    "def f():\n    a = {1}\ndef g(a):\n    for x in a: h(x)",
    "d = {}\nd.pop(1)",
    "len(set(names))",
]


@pytest.mark.parametrize("source", PLANTED)
def test_the_lint_finds_what_it_is_for(source: str) -> None:
    assert problems(ast.parse(source))


@pytest.mark.parametrize("source", HARMLESS)
def test_the_lint_leaves_alone_what_is_determined(source: str) -> None:
    assert problems(ast.parse(source)) == []
