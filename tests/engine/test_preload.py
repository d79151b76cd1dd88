"""What a process that will fork workers imports leaves it with no thread of torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from epd.tiny import CHECKPOINT
from epd_lab.bench import shape

WAIT_S = 60.0
# Only the zygote's imports may come before; a worker then uses threads of its own.
PROGRAM = """
import os, sys
from epd.engine.preload import preload

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
preload(sys.argv[1])
assert threads() == before, (before, threads())
pid = os.fork()
if pid == 0:
    import torch
    torch.set_num_threads(4)
    assert float(torch.ones(1 << 20).sum()) == 1 << 20
    os._exit(0 if threads() > before else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def test_a_large_router_starts_no_thread(tmp_path: Path) -> None:
    """`torch.zeros` of 128 experts by 2,048 numbers is shared out among threads, which a fork would
    lose: a worker waited for them while it loaded."""
    directory = shape.write(tmp_path / "shape", CHECKPOINT, "30b-a3b")
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["num_hidden_layers"] = 1
    config["vision_config"]["deepstack_visual_indexes"] = []
    path.write_text(json.dumps(config))
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, directory],
        env={"OMP_NUM_THREADS": "4", "PATH": "", "PYTHONPATH": str(Path(__file__).parents[2])},
        check=True,
        timeout=WAIT_S,
    )
