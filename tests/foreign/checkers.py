"""SPIN and tla-checker: where they are, and what they say of a model.

SPIN is Debian's package `spin` (with gcc): `apt-get install spin gcc`; or EPD_SPIN names the
program. tla-checker is the npm package: `npm install -g tla-checker`; or EPD_TLA_CHECKER names
its folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from epd_lab.formal.form import Model, Promise
from epd_lab.formal.promela import EVERY_LAW, promela
from epd_lab.formal.tla import tla, tla_config

TIMEOUT_S = 600
MAX_DEPTH = 1_000_000
MAX_STATES = 1_000_000
INSTALL_SPIN = "install it: apt-get install spin gcc; or name the program in EPD_SPIN"
INSTALL_TLA = "install it: npm install -g tla-checker; or name its folder in EPD_TLA_CHECKER"


@dataclass(frozen=True, slots=True)
class Found:
    """What a checker says: `error` is empty if all laws hold, and then all states were seen."""

    states: int
    error: str


class CheckerFailed(Exception):
    """The checker did not understand the model, or ran out of room."""


@cache
def spin_missing() -> str:
    """Why SPIN cannot be run, or an empty string."""
    lacking = [name for name in (_spin(), "gcc") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} not found; {INSTALL_SPIN}" if lacking else ""


def _spin() -> str:
    return os.environ.get("EPD_SPIN", "spin")


@cache
def tla_folder() -> Path | None:
    """The folder of the npm package."""
    if named := os.environ.get("EPD_TLA_CHECKER"):
        folders = [Path(named)]
    else:
        npm = shutil.which("npm")
        folders = [Path("node_modules") / "tla-checker"]
        if npm is not None:
            root = subprocess.run(
                [npm, "root", "-g"], check=False, capture_output=True, text=True, timeout=60
            )
            folders.append(Path(root.stdout.strip()) / "tla-checker")
    return next((f.resolve() for f in folders if (f / "tla_checker_bg.wasm").is_file()), None)


@cache
def tla_missing() -> str:
    """Why tla-checker cannot be run, or an empty string."""
    if shutil.which("node") is None:
        return "node not found; install Node.js 18 or later"
    return "" if tla_folder() is not None else f"tla-checker not found; {INSTALL_TLA}"


# --- SPIN -----------------------------------------------------------------------------------------


class Spin:
    """A model, compiled by SPIN once for each set of kinds that are fair."""

    def __init__(self, model: Model, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._built: dict[tuple[str, ...], Path] = {}

    def laws(self) -> Found:
        """Every law, over all states."""
        fair = self._model.promises[0].fair if self._model.promises else ()  # one build less
        return self._run(fair, "-N", EVERY_LAW)

    def promise(self, promise: Promise, *, fairly: bool = True) -> Found:
        """A promise, on fair paths or on all."""
        return self._run(promise.fair, "-a", *(("-f",) if fairly else ()), "-N", promise.name)

    def _run(self, fair: tuple[str, ...], *flags: str) -> Found:
        told = _told([str(self._pan(fair)), f"-m{MAX_DEPTH}", *flags], self._folder)
        states = re.search(r"(\d+) states, stored", told)
        errors = re.search(r"errors: (\d+)", told)
        if states is None or errors is None or "max search depth too small" in told:
            raise CheckerFailed(told[-2000:])
        error = re.search(r"pan:1: (.*)", told)
        return Found(int(states[1]), error[1] if error is not None else "")

    def _pan(self, fair: tuple[str, ...]) -> Path:
        if fair not in self._built:
            folder = self._folder / "-".join(("fair", *fair))
            folder.mkdir(parents=True)
            text = promela(self._model)
            (folder / "model.pml").write_text(text, encoding="utf-8")
            kinds = [f"-DFAIR_{kind.upper()}" for kind in fair]
            _told([_spin(), "-a", *kinds, "model.pml"], folder)
            # Words for as many processes as there are; no reduction, so that states can be counted.
            words = text.count("active proctype") // 3 + 2
            speed = "-O1" if len(self._model.parts) > 1 else "-O0"  # small ones: built sooner
            flags = [speed, "-DNOREDUCE", f"-DNFAIR={words}", "-DVECTORSZ=4096"]
            _told(["gcc", *flags, "-o", "pan", "pan.c"], folder)
            self._built[fair] = folder / "pan"
        return self._built[fair]


def _told(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, check=False, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise CheckerFailed(f"{command[0]}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


# --- tla-checker ----------------------------------------------------------------------------------


def check_tla(model: Model, folder: Path) -> Found:
    """Every law and the types of all variables, over all states."""
    package = tla_folder()
    assert package is not None
    folder.mkdir(parents=True, exist_ok=True)
    spec, config = folder / f"{model.name}.tla", folder / f"{model.name}.cfg"
    spec.write_text(tla(model), encoding="utf-8")
    config.write_text(tla_config(model), encoding="utf-8")
    runner = Path(__file__).with_name("checker.mjs")
    told = json.loads(
        _told(["node", str(runner), str(package), str(spec), str(config), str(MAX_STATES)], folder)
    )
    error = "" if told["success"] else f"{told['error_type']}: {told['error_message']}"
    if error and "nvariant" not in error:
        raise CheckerFailed(error)
    return Found(told["states_explored"] or 0, error)
