"""Engines from a model directory and a configuration.

Everything slow or fallible happens here, before the instance joins: imports, loading, first touch,
captured graphs.  What a caller gets answers its first request as fast as its hundredth.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from epd.config import ConfigError, EngineConfig
from epd.engine.adapter import ModelAdapter, adapter_for
from epd.engine.base import KvMemory, Progress, StepSequence, no_progress
from epd.engine.device.executor import DeviceExecutor
from epd.engine.device.memory_plan import held_nbytes, kv_plan, linear_nbytes, log_table
from epd.engine.kernels import kernels_for
from epd.engine.kernels.eight_bits import FP8
from epd.engine.language import attention, few_rows
from epd.engine.language.engine import TorchLanguageEngine
from epd.engine.language.forward import Forward, FusedForward
from epd.engine.language.kv_pool import KvPool
from epd.engine.language.logit_rules import SampleRequest
from epd.engine.language.row_splice import RowSplicer
from epd.engine.language.sampler import Draft
from epd.engine.language.seam import SeamForward
from epd.engine.sharding import WHOLE, Shard
from epd.engine.vision.engine import TorchVisionEngine
from epd.engine.vision.image_pixels import MAX_PIXELS
from epd.engine.weights.dummies import Homes, Takers
from epd.engine.weights.loading import DTYPES, load_stage
from epd.later import later
from epd.messages import KvLayout, SamplingParams
from epd.model_files.checkpoint import ModelError, read_checkpoint

if TYPE_CHECKING:
    from epd.engine.device.streams import DeviceStreams
    from epd.engine.language.lora import Bank

logger = logging.getLogger(__name__)
_host_tables = later("epd.engine.weights.host_rows:exchange")
_tower_bank = later("epd.engine.vision.lora:bank_of")
_load_head = later("epd.engine.language.drafts.eagle:load_head")
_of_checkpoint = later("epd.engine.language.drafts.layer:DraftLayer")
_of_head = later("epd.engine.language.drafts.eagle:EagleLayer")
_parallel = later("epd.groups.device.tensor_parallel:TensorParallel")
MAX_CAPTURED_PATCHES = 8192  # of a run of the tower
Loaded = tuple[ModelAdapter, Any, Forward]  # of a language stage: weights, and what runs them
SWITCH_INTERVAL_S = 0.0005  # a launch must not wait 5 ms for the loop's turn to end


def num_threads(engine_config: EngineConfig, num_cpus: int, num_ranks: int) -> int:
    """Of one rank: an equal part of the CPUs, and half of them at most, since instances share a
    host.  Of those given by `cpu_affinity`, an equal part of all but one, which the event loop
    needs."""
    if engine_config.threads:
        return engine_config.threads
    if engine_config.cpu_affinity:
        return max(1, (num_cpus - 1) // num_ranks)
    return max(1, num_cpus // max(2, num_ranks))


def build_executor(engine_config: EngineConfig, num_ranks: int = 1) -> DeviceExecutor:
    """The threads of the configured device, for the roles of an instance.  Raises ConfigError."""
    device = engine_config.device
    threads = num_threads(engine_config, len(os.sched_getaffinity(0)), num_ranks)
    torch.set_num_threads(threads)
    if device == "cpu":
        return DeviceExecutor(device, num_pool_threads=threads)
    if not torch.cuda.is_available():
        raise ConfigError(f"engine.device is {device} but torch finds no CUDA device; use cpu")
    from epd.engine.device.cuda_events import CudaEventBridge
    from epd.engine.device.streams import DeviceStreams

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)  # a plan for each new shape, in service
    index = torch.device(device).index or 0
    torch.cuda.set_device(index)
    streams = DeviceStreams(torch.device("cuda", index))
    bridge = CudaEventBridge(lanes=streams.lanes, works=streams.works)
    return DeviceExecutor(
        device,
        num_pool_threads=threads,
        completion=bridge,
        on_start=lambda: torch.cuda.set_device(index),
        streams=streams,
    )


def build_vision(
    model_dir: Path | str,
    engine_config: EngineConfig,
    executor: DeviceExecutor | None = None,
    max_pixels: int = MAX_PIXELS,
    max_batch_patches: int = 0,
    progress: Progress = no_progress,
    shard: Shard = WHOLE,
) -> TorchVisionEngine:
    """The vision stage, loaded and warm; blocks for seconds.

    `max_pixels`: larger images are refused before they are decoded.  `max_batch_patches`: memory
    for so many is touched.  `shard`: the images of a batch are shared out to the ranks of a group.
    Raises ModelError and ConfigError.
    """
    dtype = DTYPES[engine_config.dtype]
    executor = executor or build_executor(engine_config)
    adapter = adapter_for(_checkpoint(model_dir, engine_config))
    if not adapter.has_vision:
        raise ModelError(f"{model_dir} is a text-only model; start it without the encode role")
    _check_step(adapter, engine_config)
    model = _load(adapter, "vision", dtype, engine_config, progress)
    bank = _tower_bank(adapter, model, engine_config, shard) if engine_config.lora.enabled else None
    adapter.adopt_vision(model)
    engine = TorchVisionEngine(
        adapter,
        model,
        executor,
        dtype,
        max_pixels,
        executor.streams,
        engine_config.max_quantum_ms / 1e3,
        shard,
        engine_config.device,
        bank,
    )
    measures = executor.streams is not None or engine_config.max_quantum_ms
    engine.warm_up(max_batch_patches if measures else 0)
    if executor.streams is not None and engine_config.cuda_graphs:
        from epd.engine.language.graphs import CudaRecorder

        engine.capture(CudaRecorder(), min(max_batch_patches, MAX_CAPTURED_PATCHES))
    return engine


def build_language(
    model_dir: Path | str,
    engine_config: EngineConfig,
    executor: DeviceExecutor | None = None,
    max_running: int = 256,
    kv_leaving_nbytes: int = 0,
    later_nbytes: Callable[[int], int] = lambda row_nbytes: 0,
    kv_memory: Callable[[int], KvMemory] | None = None,
    has_landing: bool = True,
    progress: Progress = no_progress,
    shard: Shard = WHOLE,
    vision: TorchVisionEngine | None = None,
    loaded: Loaded | None = None,
) -> TorchLanguageEngine:
    """The language stage with an empty KV pool, loaded and warm; blocks for seconds.

    `shard`: what this rank of a group computes; all ranks must be at it at the same time.
    `max_running`: sequences of a step, at most.  `kv_leaving_nbytes`: pinned memory for KV on its
    way from a GPU to another instance, reserved here.  `later_nbytes`: what the data plane and
    films will take of the device if a row has so many bytes.  `kv_memory`: makes so much for the KV
    pool, that peers can write to.  `has_landing`: KV may come through host memory.  `vision`: of
    the same process, whose largest batch needs memory beside the KV pool.  `loaded`: what was
    loaded before, whose engine is gone.  Raises ModelError and ConfigError (no block fits)."""
    dtype, device = DTYPES[engine_config.dtype], engine_config.device
    executor = executor or build_executor(engine_config)
    adapter = loaded[0] if loaded else _language_adapter(model_dir, engine_config, shard)
    kv_dtype = _kv_dtype(engine_config, dtype)
    layout = adapter.kv_layout(
        kv_dtype, engine_config.block_size, engine_config.kv_layer_groups, shard, dtype
    )
    if engine_config.kv_nbytes:
        kv_plan(engine_config, layout)  # refuse before loading
    on_gpu = executor.streams is not None
    if loaded is None:
        _check_layout(layout, engine_config)
        model = _load(adapter, "language", dtype, engine_config, progress, shard)
        bank = _adopt(adapter, model, shard, engine_config)
        smallest = KvPool(layout, 1, kv_dtype, device)
        forward = _forward(adapter, model, smallest, dtype, executor.streams)
        forward.bank = bank
        if engine_config.speculative.method and isinstance(forward, FusedForward):
            forward.expect_drafts(max_running, engine_config.speculative.num_speculative_tokens)
    else:
        _, model, forward = loaded
        forward.begin_anew()
    if on_gpu:
        _touch_largest_step(forward, engine_config, adapter.max_context)
        _touch_sampling(max_running, adapter.language_model(model).embed_tokens)
        if vision is not None:
            vision.touch()
    row_nbytes = adapter.row_contract(dtype).row_nbytes if adapter.has_vision else 0
    wide = linear_nbytes(adapter.language_model(model).layers)
    plan = kv_plan(engine_config, layout, later_nbytes(row_nbytes) if on_gpu else 0, wide)
    num_blocks = shard.least(plan.num_blocks, device)
    forward.pool = KvPool(layout, num_blocks, kv_dtype, device, kv_memory if on_gpu else None)
    landing = max(1, shard.least(plan.num_landing_blocks, device)) if has_landing else 1
    engine = TorchLanguageEngine(
        adapter, model, forward, executor, dtype, landing, kv_leaving_nbytes, shard
    )
    engine.warm_up()
    if on_gpu:
        if engine_config.cuda_graphs and isinstance(forward, FusedForward):
            from epd.engine.language.graphs import CudaRecorder

            most = min(engine_config.max_captured_tokens, engine_config.max_step_tokens)
            forward.capture(CudaRecorder(), max_running, most)
        _log_memory(engine_config, engine, executor.streams)
    return engine


def _language_adapter(model_dir: Path | str, config: EngineConfig, shard: Shard) -> ModelAdapter:
    adapter = adapter_for(_checkpoint(model_dir, config), attention.NAME)
    adapter.has_drafts = config.speculative.has_layer
    if config.speculative.model:
        adapter.head = _load_head(adapter, config, shard.size)
    attention.register()
    _check_step(adapter, config)
    return adapter


def _adopt(adapter: ModelAdapter, model: Any, shard: Shard, config: EngineConfig) -> Bank | None:
    """Exchange modules of the loaded stack for ours, and let the ranks of a group meet in it.

    Gives the bank of adapters, where requests may name some.  Raises ConfigError and ModelError."""
    bank, parallel = None, _parallel(adapter, model, shard) if shard.size > 1 else None
    if adapter.head is not None:
        model.mtp = adapter.head
        if parallel is not None:
            parallel.cut_whole("mtp.")
    for layers in adapter.stacks(model):
        few_rows.exchange(layers)
        if adapter.routing is not None:
            from epd.engine.language import experts

            experts.adopt(layers, adapter.routing)
    if config.lora.enabled:
        from epd.engine.language import lora

        cut = parallel.cut if parallel is not None else lambda name, like: None
        bank = lora.bank_of(adapter, model, config.lora, cut)
    if parallel is not None:
        parallel.join()  # behind what adapters add to a rank's part
    adapter.adopt_language(model)
    return bank


def _log_memory(config: EngineConfig, engine: TorchLanguageEngine, streams: DeviceStreams) -> None:
    pool, step = engine.pool, config.max_step_tokens
    log_table(
        config.device,
        held_nbytes(engine.model, "cuda"),
        pool.nbytes,
        pool.num_blocks * pool.layout.block_size,
        step,
        streams.rows.nbytes,
        kv_is_torchs=engine.kv_memory is None,
    )


def _kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Of paged rows.  Raises ConfigError."""
    if config.kv_cache_dtype != "fp8":
        return dtype
    from epd.engine.weights import fp8

    fp8.check_kv(config.device, dtype)
    return FP8


def _check_step(adapter: ModelAdapter, config: EngineConfig) -> None:
    """Refuse steps that have no room for a picture that is seen both ways.  Raises ConfigError."""
    if adapter.max_uncut > config.max_step_tokens:
        raise ConfigError(
            f"rows of an image see each other, so one step computes all of them: up to "
            f"{adapter.max_uncut} here; raise engine.max_step_tokens to that"
        )


def _check_layout(layout: KvLayout, config: EngineConfig) -> None:
    """Refuse what would compute wrongly, with adapters or with tensors of sequences; log the cost
    of these.  Raises ConfigError."""
    if config.lora.enabled:
        from epd.engine.language import lora

        lora.check(layout)
    if not layout.tensors:
        return
    names = " and ".join(tensor.name for tensor in layout.tensors)
    logger.info(
        "each sequence has %s states in %d blocks of its own; copies of them are kept where they "
        "save %d tokens, for prompts with the same beginning (engine.prefix_caching)",
        names,
        layout.num_state_blocks,
        layout.num_state_blocks * layout.block_size,
    )


def _checkpoint(model_dir: Path | str, config: EngineConfig) -> Any:
    return read_checkpoint(model_dir, weights=config.load_format != "dummy")


def _load(
    adapter: ModelAdapter,
    stage: str,
    dtype: torch.dtype,
    config: EngineConfig,
    progress: Progress,
    shard: Shard = WHOLE,
) -> Any:
    def exchange(model: torch.nn.Module) -> Takers:
        if not config.quantization or stage != "language":
            return {}
        from epd.engine.weights import fp8

        fp8.check(config.device, dtype)
        return fp8.exchange(model, adapter.language_model(model).layers, dtype)

    def hosted(model: torch.nn.Module) -> Homes:
        on_host = config.per_layer_embeddings == "host" and stage == "language"
        return _host_tables(model, adapter, config.device) if on_host else {}

    def keeping(model: torch.nn.Module) -> list[torch.nn.Module]:
        are_kept = stage == "language" and not config.dequantize
        return adapter.stacks(model) if are_kept else []

    return load_stage(
        adapter, stage, dtype, config.device, config.load_format,
        allow_unused=config.allow_unused_tensors, progress=progress, shard=shard,
        exchange=exchange, keeping=keeping, may_widen=config.dequantize, hosted=hosted,
    )  # fmt: skip


def _forward(
    adapter: ModelAdapter,
    model: Any,
    pool: KvPool,
    dtype: torch.dtype,
    streams: DeviceStreams | None,
) -> Forward:
    """The fast path where the device has kernels for it and the stack has their shape.  Stacks with
    states of sequences, latent rows or several kinds of rows take it on every device: the other
    path has none of these."""
    stack: Any = adapter.language_model(model)
    device = stack.embed_tokens.weight.device
    splicer = None
    if adapter.has_vision:
        splicer = RowSplicer(adapter.row_contract(dtype), dtype, streams)
    multi_axis = adapter.rope_positions(1, ()).positions is not None
    layout = pool.layout
    seam_knows = not layout.tensors and layout.num_parts == 2 and not layout.kinds
    if device.type == "cuda" or adapter.has_drafts or not seam_knows:
        decoder = adapter.decoder(stack, kernels_for(device.type))
        if decoder is not None:
            fused = FusedForward(
                model, stack, decoder, pool, splicer, multi_axis=multi_axis,
                sees_both_ways=bool(adapter.max_uncut),
            )  # fmt: skip
            if adapter.has_drafts:
                own, layer = (decoder, _of_head) if adapter.head else (adapter, _of_checkpoint)
                at = model, stack, kernels_for(device.type), own
                fused.draft_layer = layer(*at, multi_axis=multi_axis)
            return fused
    if adapter.has_drafts or not seam_knows:
        raise ModelError(f"{adapter.checkpoint.directory} has layers that this engine lacks")
    if device.type == "cuda":
        logger.warning(
            "%s runs through transformers' layers, without captured graphs: every step waits for "
            "the host",
            adapter.model_type,
        )
    return SeamForward(model, stack, pool, splicer, multi_axis=multi_axis)


def _touch_largest_step(forward: Forward, config: EngineConfig, max_context: int) -> None:
    """Let torch's allocator hold what the largest step needs besides the KV pool."""
    count = min(config.max_step_tokens, config.max_chunk_tokens, max_context)
    pool = forward.pool
    forward.pool = pool.like(pool.layout.num_state_blocks + pool.layout.rows.count(count))
    table = list(range(forward.pool.num_blocks))
    with torch.inference_mode():
        part = StepSequence("largest", [0] * count, 0, table, None, adapter="largest")
        parts = [part] * (config.max_step_tokens // count)
        forward(parts, [-1] * len(parts))
        torch.cuda.synchronize()
    forward.pool = pool


def _touch_sampling(max_running: int, vocabulary: torch.nn.Embedding) -> None:
    """Likewise for all that may be asked of so many rows: first uses compile kernels."""
    everything = SamplingParams(
        max_tokens=1, temperature=1.0, top_k=20, top_p=0.9, repetition_penalty=1.1,
        frequency_penalty=0.1, logit_bias=((0, 1.0),), allowed_token_ids=(0,), num_logprobs=20,
    )  # fmt: skip
    device = vocabulary.weight.device
    with torch.inference_mode():
        logits = torch.zeros(max_running, vocabulary.num_embeddings, device=device)
        for params in (everything, SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)):
            Draft(logits, [SampleRequest(params, 0, (0,), (0,))] * len(logits))
        torch.cuda.synchronize()
