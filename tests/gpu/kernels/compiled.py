"""Every launch of the kernels' tests, compiled for GPUs that are not here.

`python -m tests.gpu.kernels.compiled [ARCHITECTURE ...]`, 90 by default, where Triton is installed;
`make compile-kernels` installs it.  The tests run with launches that compile instead of running:
with the sizes that they have on a GPU and tensors without numbers, until they look at one, and with
those of the interpreter.  What is told: kernels that do not compile (a name with two types is seen
nowhere else without a GPU), those that want more shared memory than the architecture has, and those
that nothing launched.  1 if there are any.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from epd.engine.kernels import triton_device
from epd.engine.vision import segments
from tests.gpu import conftest
from tests.gpu.kernels import test_kernels

SHARED_NBYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
FIRST_WITH_FP8 = 89
KERNELS = Path(triton_device.__file__).parent
TESTS = (
    "decodes",
    "delta",
    "draw",
    "experts",
    "kernels",
    "largest",
    "latent",
    "lora",
    "nucleus",
    "packed",
    "prompts",
    "segments",
    "windows",
)
KINDS = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv", torch.int64: "i64", torch.int32: "i32", torch.int16: "i16",
    torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
NUMBERS = {"fill", "fill_eight_bits", "relative"}  # of tests: what looks at them ends a test
OPTIONS = ("num_warps", "num_stages")


def launched() -> set[str]:
    """The kernels that are launched somewhere, by name."""
    return {
        found
        for path in KERNELS.rglob("triton_*.py")
        for found in re.findall(r"^    (?:return )?(_\w+)\[", path.read_text(), re.MULTILINE)
    }


class Launches:
    """What was launched, each way once, compiled for one architecture."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture
        self.seen: set[tuple[str, str]] = set()
        self.failed: dict[str, str] = {}

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        given |= dict(zip(kernel.arg_names, args, strict=False))
        options = {name: given[name] for name in OPTIONS if name in given}
        signature, fixed, aligned = {}, {}, {}
        for index, parameter in enumerate(kernel.params):
            value = given[parameter.name]
            signature[parameter.name] = "constexpr" if parameter.is_constexpr else _kind(value)
            if signature[parameter.name] == "constexpr":
                fixed[index,] = value
            elif _is_aligned(value):
                aligned[index,] = [["tt.divisibility", 16]]
        key = kernel.__name__, f"{signature} {fixed} {options}"
        has_fp8 = any("fp8" in kind for kind in signature.values())
        if key in self.seen or (has_fp8 and self._architecture < FIRST_WITH_FP8):
            return
        self.seen.add(key)
        self._compile(ASTSource(kernel, signature, constexprs=fixed, attrs=aligned), options)

    def _compile(self, source: ASTSource, options: dict[str, Any]) -> None:
        name = f"{source.name} for {self._architecture}"
        try:
            target = GPUTarget("cuda", self._architecture, 32)
            shared = triton.compile(source, target=target, options=options).metadata.shared
        except Exception as error:  # whatever it is, it would end a step
            self.failed[name] = str(error)
        else:
            if shared > SHARED_NBYTES[self._architecture]:
                self.failed[name] = f"it wants {shared} bytes of shared memory: {options}"


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + KINDS[value.dtype]
    if isinstance(value, TensorDescriptor):
        box = ", ".join(map(str, value.block_shape))
        return f"tensordesc<{KINDS[value.base.dtype]}[{box}]>"
    if isinstance(value, float):
        return "fp32"
    return "constexpr" if value is None or value == 1 else "i32"


def _is_aligned(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


class Elsewhere(TorchFunctionMode):
    """What is asked for on "cuda" is made on another device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.equal:
            return True
        args = tuple(self._device if isinstance(a, str) and a == "cuda" else a for a in args)
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = self._device
        return function(*args, **kwargs)


class Plugin:
    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool:
        """For each precision, since a test ends where it compares what was not computed."""
        test = pyfuncitem.obj
        for name in NUMBERS & test.__globals__.keys():
            test.__globals__[name] = lambda *args: 0.0
        precisions = dict(test_kernels.DTYPES)
        given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        for name, limit in precisions.items():
            test_kernels.DTYPES.clear()
            test_kernels.DTYPES[name] = limit
            for device, sizes in (("meta", "cuda"), ("cpu", "cpu")):
                given |= {"kernel_device": sizes} if "kernel_device" in given else {}
                with contextlib.suppress(Exception, pytest.skip.Exception), Elsewhere(device):
                    test(**given)
        test_kernels.DTYPES.update(precisions)
        return True


def compiled(architecture: int) -> Launches:
    launches = Launches(architecture)
    JITFunction.run = lambda *args, **given: launches.run(*args, **given)  # noqa: PLW0108 - bound
    segments.SegmentAttention.is_tiled = lambda its, qkv: qkv.itemsize == 2
    triton_device.shared_nbytes = lambda device: SHARED_NBYTES[architecture]
    files = [str(Path(__file__).parent / f"test_{name}.py") for name in TESTS]
    pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", "-W", "ignore", *files], [Plugin()])
    return launches


def main(architectures: Sequence[int]) -> int:
    conftest.PRETENDED = True
    found = {architecture: compiled(architecture) for architecture in architectures}
    for architecture, launches in found.items():
        print(f"{architecture}: {len(launches.seen)} ways to launch kernels")
        missing = launched() - {name for name, _ in launches.seen}
        if missing and architecture >= FIRST_WITH_FP8:
            launches.failed[", ".join(sorted(missing))] = "no test launches it"
        for name, reason in launches.failed.items():
            print(f"  {name}: {reason}")
    return int(any(each.failed or not each.seen for each in found.values()))


if __name__ == "__main__":
    sys.exit(main([int(each) for each in sys.argv[1:]] or [90]))
