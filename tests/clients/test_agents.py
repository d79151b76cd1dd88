"""Kits by which agents are written, of Python and of npm, against real processes.

They read streams, calls and typed answers in their own ways, and in each of the three APIs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from epd.cli.configure.model_check import BUNDLED_NAME
from epd.tiny import SAMPLES
from tests.clients.test_sdks import environment
from tests.e2e.client import data_url
from tests.e2e.server import Server

KITS = {
    "with_pydantic_ai.py": ("pydantic-ai-slim[openai,anthropic]==2.68.0",),
    "with_langgraph.py": ("langgraph==1.2.24", "langchain-openai==1.7.4"),
}
NPM = (
    "openai@7.59.0",
    "ai@7.0.173",
    "@ai-sdk/openai@4.0.118",
    "@ai-sdk/anthropic@4.0.105",
    "zod@4",
)
INSTALL_S = 240
pytestmark = pytest.mark.timeout(600)


def check(server: Server, *program: str) -> None:
    """It prints what answers of a type held, and what was read in an image, whole and streamed."""
    image = data_url((SAMPLES / "receipt-cafe.png").read_bytes())
    command = [*program, server.base_url, BUNDLED_NAME, image]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert len(told["typed"]) >= 8 and len(told["seen"]) >= 4
    for one in told["typed"]:
        assert sorted(one) == ["city", "days"]
        assert one["city"] in ("Bern", "Oslo") and one["days"] in (1, 2)
    assert set(told["seen"]) == {"10.85"}


@pytest.mark.parametrize("script", KITS)
def test_kits_of_python(server: Server, tmp_path: Path, script: str) -> None:
    python = environment(tmp_path / "env", *KITS[script])
    check(server, str(python), str(Path(__file__).with_name(script)))


def test_kits_of_npm(server: Server, tmp_path: Path) -> None:
    if not shutil.which("npm") or not shutil.which("node"):
        pytest.skip("npm and node are not installed")
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *NPM]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    if done.returncode:
        pytest.skip(f"the packages cannot be installed here: {done.stderr.strip()[-200:]}")
    script = tmp_path / "with_npm.mjs"
    shutil.copy(Path(__file__).with_name(script.name), script)
    check(server, "node", str(script))
