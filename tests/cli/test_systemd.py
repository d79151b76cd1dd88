"""examples/systemd/epd@.service: as systemd reads it, and its command line as `epd run` does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from epd.cli.parser import Parser
from epd.cli.verbs import run
from epd.config import Timing
from epd.errors import USAGE

UNIT = Path(__file__).parents[2] / "examples" / "systemd" / "epd@.service"
PROGRAM = "/opt/epd/bin/epd"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("slip", ["", "RestartSecs=2"])
def test_systemd_takes_it(slip: str, tmp_path: Path) -> None:
    made = tmp_path / "epd@part.service"
    made.write_text(UNIT.read_text().replace(PROGRAM, sys.executable) + slip)
    command = ["systemd-analyze", "verify", "--man=no", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = [line for line in done.stderr.splitlines() if "epd@part" in line]
    assert [slip.partition("=")[0] in line for line in said] == [True] * bool(slip), said


def test_its_command_lines_are_of_epd_run() -> None:
    text = UNIT.read_text()
    (start,) = re.findall(r"^ExecStart=(.+)$", text, re.MULTILINE)
    for given in re.findall(r"^# +EPD_ARGS=(.+)$", text, re.MULTILINE):
        words = start.replace("$EPD_ARGS", given).split()
        assert words[:2] == [PROGRAM, "run"]
        parser = Parser("epd run")
        run.add_arguments(parser)
        args = parser.parse(words[2:])
        assert args.topology and args.listen and vars(args)["cluster_key"]
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(stop_s) > Timing().drain_timeout_s + Timing().move_timeout_s
    assert f"RestartPreventExitStatus={USAGE}" in text and "\nRestart=on-failure\n" in text
