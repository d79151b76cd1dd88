"""The Containerfile as far as it goes without a container runtime: its steps, in bare
environments."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from epd.cli.parser import Parser
from epd.cli.verbs import run

ROOT = Path(__file__).parents[2]
STEP_S = 900
CPU_INDEX = "EPD_TORCH_FLAGS"  # of who runs the tests, as make's TORCH_FLAGS


@dataclass
class Stage:
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)  # instruction, the rest of its line


def stages() -> list[Stage]:
    lines = (ROOT / "Containerfile").read_text().replace("\\\n", " ").splitlines()
    found: list[Stage] = []
    for line in lines:
        instruction, _, rest = line.strip().partition(" ")
        if instruction == "FROM":
            found.append(Stage(rest.partition(" AS ")[2]))
        elif instruction and instruction != "#":
            found[-1].steps.append((instruction, rest.strip()))
    return found


class Bench:
    """Stages as directories, each with an environment that has nothing but pip."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def make(self, stage: Stage) -> Path:
        """Runs the steps; returns the environment's programs.  Skips where there is no index."""
        base = self.root / (stage.name or "last")
        environment = base / "environment"
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        programs, where = environment / "bin", base
        (programs / "useradd").symlink_to("/bin/true")  # not on this host
        for instruction, rest in stage.steps:
            if instruction == "WORKDIR":
                where = base / rest.lstrip("/")
                where.mkdir(parents=True, exist_ok=True)
            elif instruction == "COPY":
                self.copy(rest, where)
            elif instruction == "RUN":
                self.do(rest.replace(" /dist", f" {base}/dist"), where, programs)
        return programs

    def copy(self, rest: str, where: Path) -> None:
        words = shlex.split(rest)
        source = ROOT
        if words[0].startswith("--from="):
            source = self.root / words.pop(0).removeprefix("--from=")
        *names, to = words
        for name in names:
            path, target = source / name.lstrip("/"), where / to
            if path.is_dir():
                shutil.copytree(path, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(path, target)

    def do(self, command: str, where: Path, programs: Path) -> None:
        kept = ("HOME", "LANG", "SSL_CERT_FILE")
        environment = {
            name: value
            for name, value in os.environ.items()
            if name in kept or name.startswith("PIP_")
        }
        environment |= {
            "PATH": f"{programs}:/usr/bin:/bin",
            "TORCH_FLAGS": os.environ.get(CPU_INDEX, ""),
        }
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=where,
            env=environment,
            capture_output=True,
            text=True,
            timeout=STEP_S,
            check=False,
        )
        if "No matching distribution" in done.stderr or "Connection" in done.stderr:
            pytest.skip(f"no index here: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_what_it_copies_is_there_and_its_command_is_one_of_epd_run() -> None:
    build, last = stages()
    for instruction, rest in (*build.steps, *last.steps):
        if instruction == "COPY" and "--from" not in rest:
            assert all((ROOT / name).exists() for name in rest.split()[:-1]), rest
    steps = dict(last.steps)
    assert json.loads(steps["ENTRYPOINT"]) == ["epd"] and steps["USER"] == "1000:1000"
    parser = Parser("epd run")
    run.add_arguments(parser)
    verb, *flags = json.loads(steps["CMD"])
    assert verb == "run" and parser.parse(flags).host == "0.0.0.0"


@pytest.mark.long
@pytest.mark.timeout(STEP_S * 3)
def test_its_steps_make_an_epd_that_answers(tmp_path: Path) -> None:
    """From an empty environment, with the pinned packages and no checkout beside it."""
    bench = Bench(tmp_path)
    programs = [bench.make(stage) for stage in stages()][-1]
    image = ROOT / "epd" / "tiny" / "samples" / "receipt-cafe.png"
    done = subprocess.run(
        [programs / "epd", "ask", "What is the total?", "--image", image, "--topology", "1epd"],
        cwd=tmp_path,
        env={"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=STEP_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "10.85"
