"""What a process really loads, of libraries."""

from __future__ import annotations

import subprocess
import sys

import pytest

from epd.cli.main import VERBS
from tests.test_imports import ROOT, STDLIB, TENSORS, module_name


def loaded_by(code: str) -> set[str]:
    """Top-level names in sys.modules of a fresh process after `code`."""
    report = "import sys; print(' '.join(sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {name.split(".")[0] for name in done.stderr.split()}


HELP = """
from epd.cli.main import main
status = main(["--help"])
assert status == 0, status
"""


def test_help_loads_nothing_but_the_standard_library() -> None:
    """The help text answers at once: nothing installed is imported for it, not even msgspec."""
    blank = loaded_by("pass")
    loaded = loaded_by(HELP) - blank
    assert {name for name in loaded if name not in STDLIB and name != "epd"} == set()
    assert not loaded & {"asyncio", "concurrent", "http", "multiprocessing", "socket", "subprocess"}


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_loads_no_library(verb: str) -> None:
    loaded = loaded_by(HELP.replace("--help", f'{verb}", "--help'))
    assert not loaded & {*TENSORS, "zmq", "uvloop", "aiohttp", "numpy", "tokenizers", "PIL"}


def test_the_gateway_process_loads_neither_torch_nor_transformers() -> None:
    """Every module that a gateway is made of, imported in one process: all but `epd verify`'s."""
    folders = "api", "cli", "media_files", "model_files", "roles", "runtime", "transport"
    names = [module_name(path) for name in folders for path in (ROOT / "epd" / name).rglob("*.py")]
    others = ("epd.cli.verify.",)
    code = "\n".join(f"import {name}" for name in names if not name.startswith(others))
    loaded = loaded_by(code)
    assert not loaded & {*TENSORS, "triton", "mooncake", "nixl_cu12", "nixl_cu13", "av"}
