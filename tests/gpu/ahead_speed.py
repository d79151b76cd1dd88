"""What steps of few decodes would gain if weights were read ahead, into the cache, on a branch.

`python -m tests.gpu.ahead_speed [fp8]`, on a CUDA device: the 4B shape with random weights.  While
a layer writes keys and attends, the memory is all but idle; meanwhile another branch of the graph
asks for the lines of the weights behind it: all of the output's, and some MB of gate and up.  A
probe: nothing of this is in the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import triton
import triton.language as tl

from epd import tiny
from epd.config import EngineConfig
from epd.engine.factory import build_executor, build_language
from epd.engine.forward import FusedForward
from epd.engine.graphs import CudaRecorder
from epd.engine.language import TorchLanguageEngine
from epd.engine.mixers import PagedAttention, Step
from epd_lab.bench import shape
from tests.gpu.step_speed import CASES, copied_nbytes_per_s, graph_ms, step_nbytes

NAMES = ("1@1450", "8@1300", "64@1150")
AHEAD_MB: tuple[float | None, ...] = (None, 0, 8, 16, 24, None)  # of gate and up; None: nothing
LINE, LINES = 128, 512  # bytes; of a program


@triton.jit
def _ask(start, count, size: tl.constexpr, lines: tl.constexpr):
    line = tl.minimum(tl.program_id(0) * lines + tl.arange(0, lines), count - 1).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [start.to(tl.int64) + line * size],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def ask(weight: torch.Tensor, nbytes: float = float("inf")) -> None:
    count = int(min(weight.nbytes, nbytes)) // LINE
    if count:
        _ask[(triton.cdiv(count, LINES),)](weight, count, size=LINE, lines=LINES, num_warps=4)


@contextmanager
def reading_ahead(layers: Sequence[Any], megabytes: float) -> Iterator[None]:
    """In what is captured meanwhile."""
    plain, branch = PagedAttention.__call__, torch.cuda.Stream()

    def attend(self: Any, x: Any, step: Step) -> torch.Tensor:
        ops, layer = self._kernels, step.pool.layer(self._index)
        qkv, stem = self._qkv(x), torch.cuda.current_stream()
        branch.wait_stream(stem)
        with torch.cuda.stream(branch):
            ask(self._output.weight)
            ask(layers[self._index].mlp.gate_proj.weight, megabytes * 1e6)
        place = (step.cos, step.sin, step.batch.slots, layer)
        query = ops.rope_and_store(qkv, self._head_norms, self._eps, *place)
        attended = ops.attend(query, layer, step.batch, self._scaling)
        stem.wait_stream(branch)
        out: torch.Tensor = self._output(attended.flatten(1))
        return out

    PagedAttention.__call__ = attend  # type: ignore[method-assign]
    try:
        yield
    finally:
        PagedAttention.__call__ = plain  # type: ignore[method-assign]


def measured(language: TorchLanguageEngine) -> list[float]:
    forward = language.forward
    assert isinstance(forward, FusedForward)
    forward.graphs = None
    forward.capture(CudaRecorder(), 64, 0)
    language.pool.tensor.zero_()
    return [graph_ms(language, CASES[name]) for name in NAMES]


def main() -> None:
    quantization: Any = "fp8" if "fp8" in sys.argv[1:] else ""
    directory = shape.write(Path(mkdtemp()) / "4b", tiny.CHECKPOINT)
    config = EngineConfig(
        device="cuda", dtype="bfloat16", kv_nbytes=24 << 30, load_format="dummy",
        max_captured_tokens=0, quantization=quantization, cuda_graphs=False,
    )  # fmt: skip
    rate = copied_nbytes_per_s()
    torch.cuda.empty_cache()
    language = build_language(directory, config, build_executor(config), 64)
    layers = language._adapter.language_model(language.model).layers
    bound_ms = [1e3 * step_nbytes(language, CASES[name]) / rate for name in NAMES]
    print("ahead, MB " + "".join(f"{name:>12}" for name in NAMES) + "   milliseconds of a graph")
    print("bytes     " + "".join(f"{ms:12.2f}" for ms in bound_ms))
    for megabytes in AHEAD_MB:
        if megabytes is None:
            found, name = measured(language), "nothing"
        else:
            with reading_ahead(layers, megabytes):
                found, name = measured(language), f"o + {megabytes:g}"
        print(f"{name:10}" + "".join(f"{ms:12.2f}" for ms in found), flush=True)


if __name__ == "__main__":
    main()
