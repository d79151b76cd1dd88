"""What could never serve is refused before any process starts, once, with what to do."""

from __future__ import annotations

import ctypes
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from epd.cli.start.preflight import (
    check_devices,
    check_host,
    check_memory,
    memory_nbytes,
    weights_nbytes,
)
from epd.config import ConfigError, EngineConfig, InstanceConfig
from epd.engine.adapter import adapter_for
from epd.engine.factory import build_vision
from epd.engine.weights.loading import load_stage
from epd.engine.weights.open_file import OpenFile
from epd.errors import explain
from epd.model_files.checkpoint import ModelError, read_checkpoint
from epd.runtime.child import PROGRESS_S, LoadingShare
from epd.runtime.cuda_driver import LIBRARY, NoCuda, device_sizes
from epd.tiny import CHECKPOINT

GIB = 1 << 30


def instance(name: str, *roles: str, **engine: Any) -> InstanceConfig:
    config = EngineConfig(kv_nbytes=1 << 20, threads=1)
    config = msgspec.structs.replace(config, **engine)
    return InstanceConfig(instance_id=name, roles=roles, model_dir=str(CHECKPOINT), engine=config)


def two_gpus() -> list[int]:
    return [80 * GIB, 24 * GIB]


def no_driver() -> list[int]:
    raise NoCuda("no driver: install it")


# --- devices --------------------------------------------------------------------------------------


def test_a_cpu_asks_nobody() -> None:
    assert check_devices(["cpu", "cpu"], has_cuda=bool, ask=no_driver) == []


@pytest.mark.parametrize(
    ("device", "has_cuda", "ask", "words"),
    [
        ("cuda", False, two_gpus, ["CPU build", "--device cpu", "CONTRIBUTING"]),
        ("cuda", True, no_driver, ["install it", "--device cpu"]),
        ("cuda:2", True, two_gpus, ["cuda:2", "cuda:0, cuda:1", "CUDA_VISIBLE_DEVICES"]),
        ("cuda", True, list, ["there is none", "cpu"]),
    ],
)
def test_a_device_that_is_not_here(device: str, has_cuda: bool, ask: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_devices(["cpu", device], has_cuda=lambda: has_cuda, ask=ask)
    assert all(word in str(caught.value) for word in words), caught.value


def test_devices_that_are_here_have_sizes() -> None:
    assert check_devices(["cuda", "cuda:1"], has_cuda=lambda: True, ask=two_gpus) == two_gpus()


class Driver:
    """libcuda's calls, with two GPUs; `broken`: the call that fails."""

    def __init__(self, broken: str = "") -> None:
        self._broken = broken

    def _answer(self, call: str, pointer: Any, value: int) -> int:
        pointer._obj.value = value
        return 100 if call == self._broken else 0

    def cuInit(self, flags: int) -> int:
        return 100 if self._broken == "init" else 0

    def cuDeviceGetCount(self, count: Any) -> int:
        return self._answer("count", count, 2)

    def cuDeviceGet(self, device: Any, index: int) -> int:
        return self._answer("get", device, 7 + index)

    def cuDeviceTotalMem_v2(self, nbytes: Any, device: ctypes.c_int) -> int:
        return self._answer("size", nbytes, (device.value - 6) * GIB)


def test_the_driver_is_asked() -> None:
    assert device_sizes(Driver()) == [GIB, 2 * GIB]


@pytest.mark.parametrize("broken", ["init", "count", "get", "size"])
def test_a_driver_that_fails(broken: str) -> None:
    with pytest.raises(NoCuda, match=r"error 100.*nvidia-smi"):
        device_sizes(Driver(broken))


def test_no_driver_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd.runtime.cuda_driver.LIBRARY", "libnothing.so.1")
    with pytest.raises(NoCuda, match=r"libnothing.* --gpus all"):
        device_sizes()
    assert LIBRARY == "libcuda.so.1"


# --- weights and memory ---------------------------------------------------------------------------


def test_weights_are_counted_as_they_are_loaded() -> None:
    found = weights_nbytes(CHECKPOINT, 4)
    for stage in ("vision", "language"):
        adapter = adapter_for(read_checkpoint(CHECKPOINT))
        model = load_stage(adapter, stage, torch.float32, "cpu")
        held = {p.data_ptr(): p.numel() * 4 for p in model.parameters() if not p.is_meta}
        assert found[stage] == sum(held.values()) > 0
    assert weights_nbytes(CHECKPOINT, 2)["language"] * 2 == found["language"]


def test_memory_that_cannot_be_enough() -> None:
    both = [instance("p0", "prefill", kv_nbytes=3 * GIB), instance("d0", "decode", kv_nbytes=GIB)]
    check_memory("cpu", both, 5 * GIB, 1.0)
    with pytest.raises(ConfigError, match=r"cpu has 4.0 GiB.*p0 3.0, d0 1.0.*--kv-nbytes"):
        check_memory("cpu", both, 4 * GIB, 1.0)
    with pytest.raises(ConfigError, match=r"cuda has 4.0 GiB of 8.0 to give.*more devices"):
        check_memory("cuda", both, 8 * GIB, 0.5)


def test_pools_that_would_each_take_what_is_free() -> None:
    """The first one would leave the second none, and half a minute later."""
    encoder, one, other = (
        instance("e0", "encode", kv_nbytes=0), instance("p0", "prefill", kv_nbytes=0),
        instance("d0", "decode", kv_nbytes=0),
    )  # fmt: skip
    check_memory("cuda:0", [encoder, one], 8 * GIB, 0.5)
    with pytest.raises(ConfigError, match=r"d0 and p0 share cuda:0.*--kv-nbytes, below 2\.0GiB"):
        check_memory("cuda:0", [encoder, one, other], 8 * GIB, 0.5)


def test_weights_of_eight_bits_are_not_counted_as_sixteen() -> None:
    language = weights_nbytes(CHECKPOINT, 2)["language"]
    plain, eight = (
        instance("p0", "prefill", kv_nbytes=0, dtype="bfloat16", quantization=kind)
        for kind in ("", "fp8")
    )
    check_memory("cuda", [plain], language, 1.0)
    check_memory("cuda", [eight], language // 2, 1.0)
    with pytest.raises(ConfigError, match="p0"):
        check_memory("cuda", [plain], language - 1, 1.0)


def test_an_encoder_has_no_kv() -> None:
    check_memory("cpu", [instance("e0", "encode", kv_nbytes=GIB)], GIB // 2, 1.0)


def test_weights_without_a_file_are_counted_too(tmp_path: Path) -> None:
    """And a model is told how many devices it takes at least."""
    shutil.copy(CHECKPOINT / "config.json", tmp_path)
    dummy = msgspec.structs.replace(
        instance("p0", "prefill", load_format="dummy", kv_nbytes=0), model_dir=str(tmp_path)
    )
    language = weights_nbytes(CHECKPOINT, 4)["language"]
    check_memory("cuda", [dummy], language, 1.0)
    with pytest.raises(ConfigError, match=r"name more devices, 3 at least \(--device"):
        check_memory("cuda", [dummy], language * 2 // 5, 1.0)
    with pytest.raises(ConfigError, match=r"with its layers in eight bits.* GiB and fit$"):
        check_memory("cuda", [dummy], language * 3 // 4, 1.0)
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    check_memory("cuda", [dummy], language * 3 // 4, 1.0)


def test_this_host_can_serve_the_bundled_model() -> None:
    assert memory_nbytes() > 64 << 20
    check_host([instance("e0", "encode"), instance("pd0", "prefill", "decode")])


@pytest.mark.parametrize("size", [0, 4, 100_000])
def test_a_file_that_is_not_whole(tmp_path: Path, size: int) -> None:
    model = shutil.copytree(CHECKPOINT, tmp_path / "model")
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(size)
    broken = msgspec.structs.replace(instance("p0", "prefill"), model_dir=str(model))
    with pytest.raises(ModelError, match=r"model.safetensors is not a whole.*copy it again"):
        check_host([broken])


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (MemoryError(), "MemoryError"),
        (MemoryError("Unable to allocate 3 GiB for an array"), "3 GiB"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"), "2 GiB"),
        (RuntimeError("NCCL error in: x.cpp\nCuda failure 2 'out of memory'"), "failure 2"),
    ],
)
def test_memory_that_is_not_enough_while_loading(error: Exception, named: str) -> None:
    status, sentence = explain(error)
    assert status == 1 and "\n" not in sentence and named in sentence
    assert "memory is not enough" in sentence and "--kv-nbytes" in sentence


def test_a_file_is_not_to_blame_for_a_device_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(OpenFile, "tensor", full)
    with pytest.raises(torch.OutOfMemoryError):
        build_vision(CHECKPOINT, EngineConfig(threads=1))


# --- how far loading is ---------------------------------------------------------------------------


def test_loading_says_its_share_now_and_then() -> None:
    now_s, told = [0.0], list[tuple[str, str]]()
    share = LoadingShare(lambda state, detail: told.append((state, detail)), lambda: now_s[0])
    for percent in range(0, 101, 10):
        share.tell("language", percent * GIB, 100 * GIB)
        now_s[0] += PROGRESS_S / 2
    assert [detail.split()[0] for _, detail in told] == ["20%", "40%", "60%", "80%", "100%"]
    assert told[0] == ("loading", "20% of 100.0 GiB of the language model")


def test_every_byte_of_a_stage_is_counted_once() -> None:
    seen: list[tuple[str, int, int]] = []
    config = EngineConfig(kv_nbytes=16 << 20, threads=1)
    build_vision(CHECKPOINT, config, progress=lambda *told: seen.append(told))
    assert {stage for stage, _, _ in seen} == {"vision"}
    done = [nbytes for _, nbytes, _ in seen]
    assert (
        done == sorted(done) and done[-1] == seen[-1][2] == weights_nbytes(CHECKPOINT, 4)["vision"]
    )
