"""Released openai packages, each in an environment of its own, against real processes.

Others pin them: litellm and llama-index a 2.x, much else a 1.x.  Their streaming helpers read a
stream more strictly than the version that all other tests have.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from epd.cli.configure.model_check import BUNDLED_NAME
from epd.tiny import SAMPLES
from tests.e2e.client import data_url
from tests.e2e.server import Server

VERSIONS = ("1.60.2", "1.109.1", "2.20.0", "2.54.0", "3.54.0")
INSTALL_S = 240
pytestmark = pytest.mark.timeout(600)


def environment(directory: Path, *packages: str) -> Path:
    """The Python of a new environment with these; skips where there is no index."""
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    python = directory / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "-q", "--retries", "1", *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1]
        pytest.skip(f"{', '.join(packages)} cannot be installed here: {last}")
    return python


@pytest.mark.parametrize("version", VERSIONS)
def test_tools_and_images(server: Server, tmp_path: Path, version: str) -> None:
    """Calls whole and streamed are equal and complete, and an image is read either way."""
    python = environment(tmp_path / "env", f"openai=={version}")
    image = data_url((SAMPLES / "receipt-cafe.png").read_bytes())
    script = Path(__file__).with_name("talk.py")
    command = [str(python), str(script), f"{server.base_url}/v1", BUNDLED_NAME, image]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["version"] == version
    counts = set()
    for turn in told["calls"]:
        assert turn["whole"] == turn["streamed"]
        reason, calls = turn["whole"]
        if reason != "tool_calls":
            continue  # cut off by max_tokens
        counts.add(len(calls))
        assert turn["num_done"] == len(calls)
        for name, arguments in calls:
            assert sorted(json.loads(arguments)) == (["city", "days"] if name == "weather" else [])
    assert counts and told["whole"] == told["streamed"] != ""
