"""What would fail in every worker alike is found before any starts, and reported once.

Devices that are not there, weights that cannot be read, and memory that cannot be enough.  What is
needed is counted from below: weights and KV pools, nothing of what computing takes.  So what is
refused here could never have served, and what passes may still be refused by its worker.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil, prod
from pathlib import Path

from epd.config import ConfigError, EngineConfig, InstanceConfig
from epd.engine.weights import stored as stored_weights
from epd.engine.weights.stored import PLAIN
from epd.families.registry import family_of
from epd.model_files.checkpoint import read_config, read_header, weight_files
from epd.model_files.config_sizes import FEW_BITS, Counts, Sizes, counted, parameters
from epd.runtime.cuda_driver import NoCuda, device_sizes, torch_has_cuda
from epd.runtime.loading import backends_of
from epd.scheduling.slots import receive_pool
from epd.transport.shm.segment import DIRECTORY, free_nbytes

GIB, MIB = 1 << 30, 1 << 20
VISION_NAMES = ("visual.", "vision_tower.", "multi_modal_projector.", "image_newline")
DTYPE_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_host(instances: Sequence[InstanceConfig], *, in_one: bool = False) -> None:
    """Raises ConfigError or ModelError with what to do; returns if nothing speaks against them.

    `in_one`: all is in one process, with the gateway, and shares no memory with others.
    """
    sizes = check_devices([d for i in instances for d in (i.engine.device, *i.rank_devices)])
    by_device: defaultdict[str, list[InstanceConfig]] = defaultdict(list)
    for instance in instances:
        for device in (instance.engine.device, *instance.rank_devices):
            by_device["cpu" if device == "cpu" else f"cuda:{_index(device)}"].append(instance)
            if device != "cpu" and _hosted_nbytes(instance):
                by_device["cpu"].append(instance)
    for device, there in by_device.items():
        if device == "cpu":
            total, share = memory_nbytes(), 1.0
        else:
            total = sizes[_index(device)]
            share = there[0].engine.gpu_memory_utilization
        check_memory(device, there, total, share)
    if not in_one:
        check_shared_memory(instances)


def check_devices(
    devices: Sequence[str],
    has_cuda: Callable[[], bool] = torch_has_cuda,
    ask: Callable[[], list[int]] = device_sizes,
) -> list[int]:
    """Bytes of memory of each GPU, if one is asked for.  Raises ConfigError."""
    wanted = [device for device in devices if device != "cpu"]
    if not wanted:
        return []
    if not has_cuda():
        raise ConfigError(
            f"engine.device is {wanted[0]}, and the installed torch is a CPU build: install a CUDA "
            "build (CONTRIBUTING.md, Set up), or use --device cpu"
        )
    try:
        sizes = ask()
    except NoCuda as error:
        raise ConfigError(f"engine.device is {wanted[0]}: {error}; or use --device cpu") from None
    absent = [device for device in wanted if _index(device) >= len(sizes)]
    if absent:
        there = ", ".join(f"cuda:{index}" for index in range(len(sizes))) or "none"
        raise ConfigError(
            f"engine.device {absent[0]} is not here (CUDA_VISIBLE_DEVICES may hide it); there is "
            f"{there}: name these with --device, or use cpu"
        )
    return sizes


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def check_memory(
    device: str, instances: Sequence[InstanceConfig], total_nbytes: int, share: float
) -> None:
    """Raises ConfigError if weights and KV pools alone are more than there is, or if several pools
    would take what is free."""
    needs: defaultdict[str, int] = defaultdict(int)
    for instance in instances:  # several times, if several of its ranks are there
        needs[instance.instance_id] += _needed(instance, device)
    if (rest := total_nbytes * share - (needed := sum(needs.values()))) >= 0:
        greedy = {i.instance_id for i in instances if _speaks(i) and not i.engine.kv_nbytes}
        if len(greedy) > 1 and device != "cpu":
            raise ConfigError(
                f"{' and '.join(sorted(greedy))} share {device}, where one KV pool would take all "
                "that is free: name more devices (--device cuda:0,cuda:1), or give each pool a "
                f"size (--kv-nbytes, below {rest / len(greedy) / GIB:.1f}GiB)"
            )
        return
    each = ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in needs.items())
    of = f" of {total_nbytes / GIB:.1f}" if share < 1.0 else ""
    remedy = (
        "free memory, use a smaller model or fewer instances, or lower --kv-nbytes"
        if device == "cpu"
        else f"name more devices, {ceil(needed / (total_nbytes * share))} at least (--device "
        "cuda:0,cuda:1), and share the model out to them (--tensor-parallel-size), use a smaller "
        "model, --quantization fp8 or fewer instances, or lower --kv-nbytes"
    )
    raise ConfigError(
        f"{device} has {total_nbytes * share / GIB:.1f} GiB{of} to give, and weights and KV pools "
        f"take {needed / GIB:.1f} GiB ({each}): {remedy}"
        f"{_fitting(device, instances, total_nbytes * share)}"
    )


def _fitting(device: str, instances: Sequence[InstanceConfig], most_nbytes: float) -> str:
    """A clause with the first format of layers in which all have room; empty: none."""
    for name, number_nbytes in FEW_BITS.items():
        needed = sum(_needed(instance, device, number_nbytes) for instance in instances)
        if needed <= most_nbytes:
            return f"; with its layers in {name} it would take {needed / GIB:.1f} GiB and fit"
    return ""


def check_shared_memory(instances: Sequence[InstanceConfig], directory: str = DIRECTORY) -> None:
    """Raises ConfigError if receive pools and KV pools alone are more than is free there."""
    needs = {instance.instance_id: _shared_nbytes(instance) for instance in instances}
    free, needed = free_nbytes(directory), sum(needs.values())
    if needed <= free:
        return
    each = ", ".join(f"{name} {nbytes / MIB:.0f}" for name, nbytes in needs.items() if nbytes)
    raise ConfigError(
        f"{directory} has {free / MIB:.0f} MiB free, and receive pools and KV pools take "
        f"{needed / MIB:.0f} MiB of it ({each}): enlarge it (mount -o remount,size=... "
        f"{directory}; docker run --shm-size=...), or lower --kv-nbytes or prefill.pool_nbytes"
    )


def _shared_nbytes(instance: InstanceConfig) -> int:
    """From below: of a KV pool, what blocks leave over is not counted."""
    backends = [backend.name for backend in backends_of(instance) if not backend.on_device]
    engine, roles = instance.engine, instance.roles
    if backends[:1] != ["shm"]:
        return 0
    nbytes = 0
    if engine.device == "cpu" and _speaks(instance):
        nbytes += engine.kv_nbytes * 15 // 16
    directory = Path(instance.model_dir)
    config = read_config(directory)
    family = family_of(directory, config)
    if family.vision and "prefill" in roles:
        sizes = Sizes(directory / "config.json", config, family)
        row_nbytes = sizes("hidden") * (1 + len(sizes.range("levels")))
        row_nbytes *= DTYPE_NBYTES[engine.dtype]
        num_slots, rows = receive_pool(instance.prefill, row_nbytes)
        nbytes += num_slots * rows * row_nbytes
    return nbytes * (1 + len(instance.rank_devices))


def _speaks(instance: InstanceConfig) -> bool:
    return "prefill" in instance.roles or "decode" in instance.roles


def _hosted_nbytes(instance: InstanceConfig) -> int:
    """Of embeddings that a rank has in the memory of its host, whatever its device is."""
    engine, directory = instance.engine, Path(instance.model_dir)
    if engine.per_layer_embeddings == "device" or not _speaks(instance):
        return 0
    config = read_config(directory)
    family = family_of(directory, config)
    held = parameters(family, Sizes(directory / "config.json", config, family))
    shape = held.get(f"{family.per_layer_embeddings}.weight", (0,))
    return prod(shape) * DTYPE_NBYTES[engine.dtype]


def _needed(instance: InstanceConfig, device: str, layer_nbytes: float = 0) -> int:
    """Of this kind of device, by one rank.  `layer_nbytes`: of each number of layers, if they had
    another format."""
    engine = instance.engine
    hosted = 0 if engine.device == "cpu" else _hosted_nbytes(instance)
    if hosted and device == "cpu":
        return hosted
    speaks = _speaks(instance)
    num_ranks = instance.num_ranks
    nbytes = engine.kv_nbytes if speaks else 0
    stages = {"vision": "encode" in instance.roles, "language": speaks}
    number_nbytes = DTYPE_NBYTES[engine.dtype]
    directory = Path(instance.model_dir)
    if layer_nbytes or engine.load_format == "dummy":
        counts = computed_nbytes(directory, engine, layer_nbytes)
        found = {"vision": counts.tower, "language": counts.language}
    else:
        found = dict(weights_nbytes(directory, number_nbytes))
        if engine.quantization:  # most of them: it must not be more than they can come to
            found["language"] //= number_nbytes
    found["language"] = max(0, found["language"] - hosted)
    return nbytes + sum(found[stage] // num_ranks for stage, is_held in stages.items() if is_held)


def computed_nbytes(directory: Path, engine: EngineConfig, layer_nbytes: float = 0) -> Counts:
    """Of weights by config.json alone, as loaded; from below where it names fewer bits.  Raises
    ModelError."""
    config = read_config(directory)
    family = family_of(directory, config)
    counts = counted(family, Sizes(directory / "config.json", config, family))
    found = counts.nbytes(DTYPE_NBYTES[engine.dtype], engine.quantization)
    if not engine.dequantize:
        layer_nbytes = layer_nbytes or stored_weights.least_nbytes(config)
    return replace(found, layers=ceil(counts.layers * layer_nbytes)) if layer_nbytes else found


def weights_nbytes(directory: Path, dtype_nbytes: int) -> Mapping[str, int]:
    """By stage, as loaded.  Raises ModelError for a file that is not whole or cannot be read."""
    found = {"vision": 0, "language": 0}
    for file in weight_files(directory):
        for name, entry in read_header(file).items():
            stage = "vision" if any(part in name for part in VISION_NAMES) else "language"
            begin, end = entry.data_offsets
            is_plain = entry.dtype in PLAIN  # others come to no less than they are stored in
            found[stage] += prod(entry.shape) * dtype_nbytes if is_plain else end - begin
    return found


def memory_nbytes() -> int:
    """What this host, or the container, can still give."""
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = dict(line.split(":") for line in file)
    available = int(lines["MemAvailable"].split()[0]) << 10
    for path in CGROUP_LIMITS:
        if os.access(path, os.R_OK):
            text = Path(path).read_text(encoding="ascii").strip()
            if text.isdecimal():
                available = min(available, int(text))
    return available
