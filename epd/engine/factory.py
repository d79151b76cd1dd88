"""Engines from a model directory and a configuration.

Everything slow or fallible happens here, before the instance joins: imports, loading, first touch.
What a caller gets answers its first request as fast as its hundredth.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from epd.config import ConfigError, EngineConfig
from epd.engine import attention
from epd.engine.checkpoint import ModelError, read_checkpoint
from epd.engine.cuda_events import CudaEventBridge
from epd.engine.executor import DeviceExecutor
from epd.engine.fingerprint import model_fingerprint, processor_fingerprint
from epd.engine.language import TorchLanguageEngine
from epd.engine.loading import dtype_of, load_stage
from epd.engine.models.registry import adapter_for
from epd.engine.preprocess import MAX_PIXELS
from epd.engine.vision import TorchVisionEngine

__all__ = [
    "build_executor",
    "build_language",
    "build_vision",
    "model_fingerprint",
    "processor_fingerprint",
]


def build_executor(engine_config: EngineConfig) -> DeviceExecutor:
    """The threads of the configured device; roles of one instance share them.

    `threads` 0 means half the machine's cores: an instance seldom has a host to itself.  Raises
    ConfigError.
    """
    device = engine_config.device
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ConfigError(
            f"engine.device {device!r} is not supported; use cpu, or cuda:0 and so on"
        )
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"engine.device is {device} but torch finds no CUDA device; use cpu")
    threads = engine_config.threads or max(1, (os.cpu_count() or 1) // 2)
    torch.set_num_threads(threads)
    completion = CudaEventBridge() if kind == "cuda" else None
    return DeviceExecutor(device, num_pool_threads=threads, completion=completion)


def build_vision(
    model_dir: Path | str,
    engine_config: EngineConfig,
    executor: DeviceExecutor | None = None,
    max_pixels: int = MAX_PIXELS,
) -> TorchVisionEngine:
    """The vision stage, loaded and warm; blocks for seconds.

    `max_pixels`: larger pictures are refused before they are decoded.  Raises ModelError and
    ConfigError.
    """
    dtype = dtype_of(engine_config.dtype)
    executor = executor or build_executor(engine_config)
    adapter = adapter_for(read_checkpoint(model_dir))
    if not adapter.has_vision:
        raise ModelError(f"{model_dir} is a text-only model; start it without the encode role")
    model = load_stage(adapter, "vision", dtype, engine_config.device)
    engine = TorchVisionEngine(adapter, model, executor, dtype, max_pixels)
    engine.warm_up()
    return engine


def build_language(
    model_dir: Path | str,
    engine_config: EngineConfig,
    executor: DeviceExecutor | None = None,
) -> TorchLanguageEngine:
    """The language stage with an empty KV pool, loaded and warm; blocks for seconds.

    Raises ModelError and ConfigError, also when `kv_nbytes` is less than one block.
    """
    dtype = dtype_of(engine_config.dtype)
    executor = executor or build_executor(engine_config)
    adapter = adapter_for(read_checkpoint(model_dir), attention.NAME)
    layout = adapter.kv_layout(dtype, engine_config.block_size)
    num_blocks = engine_config.kv_nbytes // layout.block_nbytes
    if num_blocks < 1:
        raise ConfigError(
            f"engine.kv_nbytes is {engine_config.kv_nbytes}, less than one KV block of "
            f"{layout.block_nbytes} bytes; raise it"
        )
    attention.register()
    model = load_stage(adapter, "language", dtype, engine_config.device)
    engine = TorchLanguageEngine(
        adapter,
        model,
        executor,
        num_blocks=num_blocks,
        block_size=engine_config.block_size,
        dtype=dtype,
        device=engine_config.device,
    )
    engine.warm_up()
    return engine
