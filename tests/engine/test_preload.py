"""What a process that will fork workers imports leaves it with no thread of torch, nor CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from epd.engine.preload import preload
from epd.tiny import CHECKPOINT
from epd_lab.bench.costs import shape


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def passes_in_a_fork(check: Callable[[], None]) -> bool:
    with warnings.catch_warnings(action="ignore"):  # of threads that the fork does not have
        pid = os.fork()
    if pid == 0:
        try:
            check()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def check_a_workers_threads() -> None:
    torch.set_num_threads(4)
    assert float(torch.ones(1 << 20).sum()) == 1 << 20
    assert num_threads() > 1


def test_a_large_router_starts_no_thread(tmp_path: Path) -> None:
    """`torch.zeros` of 128 experts by 2,048 numbers is shared out among threads, which a fork would
    lose: a worker waited for them while it loaded."""
    directory = shape.write(tmp_path / "shape", CHECKPOINT, "30b-a3b")
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["num_hidden_layers"] = 1
    config["vision_config"]["deepstack_visual_indexes"] = []
    path.write_text(json.dumps(config))

    def check() -> None:
        torch.set_num_threads(4)
        preload(str(directory))
        assert num_threads() == 1
        assert passes_in_a_fork(check_a_workers_threads)

    assert passes_in_a_fork(check)


ON_A_GPU = """
import sys, torch
torch.cuda._is_compiled = lambda: True
torch.cuda._device_count_nvml = lambda: asked.append(1) or 1
torch._C._cuda_getCurrentRawStream = None
torch._C._cuda_getDeviceCount = lambda: sys.exit("CUDA has begun")
asked = []
from epd.engine.preload import preload
preload(sys.argv[1])
assert asked, "transformers has asked"
"""


def test_flash_attn_does_not_let_cuda_begin(tmp_path: Path) -> None:
    """transformers looks for a GPU at its import where flash-attn is installed; a worker could not
    have begun CUDA after that."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    described = tmp_path / "flash_attn_4-4.0.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0\n")
    (described / "top_level.txt").write_text("flash_attn\n")
    path = os.pathsep.join([str(Path.cwd()), str(tmp_path)])
    subprocess.run(
        [sys.executable, "-c", ON_A_GPU, str(CHECKPOINT)],
        check=True,
        env=os.environ | {"PYTHONPATH": path},
    )
