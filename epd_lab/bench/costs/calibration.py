"""`epd bench calibrate`: a card, measured in a minute, as the cost file of one model.

Steps that no cost was made of (`CHECKS`) are timed, too, and the file has them.  Costs of a service
and not of steps (the gateway's part, gaps, hops of one GPU) are taken over from the bundled file.
The sources name these, and what was left out for time.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec

from epd.config import ConfigError, Settings
from epd.model_files.checkpoint import read_config, read_preprocessor
from epd.model_files.geometry import images_of
from epd_lab.bench.costs.step_costs import CalibrationBudget, StepMeter
from epd_lab.bench.machine import describe, gpus, sentence
from epd_lab.plan import costs
from epd_lab.plan.costs import Costs, HopTimes

SUSTAINED_S = 4.0


def measured(settings: Settings, budget_s: float) -> Costs:
    """In processes of their own, whose ends give the devices back.  Raises ConfigError,
    ModelError."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        found = msgspec.json.decode(pool.submit(_measured, settings, budget_s).result(), type=Costs)
        if "," in settings.engine.device:
            hops, told = pool.submit(_hop).result()
            found = msgspec.structs.replace(
                found, hops={**found.hops, "cuda": hops}, sources=(*found.sources, told)
            )
    return found


def _measured(settings: Settings, budget_s: float) -> bytes:
    return msgspec.json.encode(asyncio.run(measure(settings, budget_s)))


def _hop() -> tuple[HopTimes, str]:
    """Between the first two GPUs: by a megabyte, and by the KV of a prompt."""
    import uvloop

    from epd_lab.bench.transports.hop_device import few_and_many

    (few, few_s), (many, many_s) = uvloop.run(few_and_many())
    rate = (many - few) / (many_s - few_s)
    times = HopTimes(latency_ms=1e3 * max(0.0, few_s - few / rate), gb_per_s=rate / 1e9)
    return times, f"hops.cuda: measured here, {few >> 20} and {many >> 20} MiB between two GPUs"


async def measure(settings: Settings, budget_s: float) -> Costs:
    """Here, of the first device.  Raises ConfigError, ModelError."""
    directory = Path(settings.model_dir)
    config, preprocessor = read_config(directory), read_preprocessor(directory)
    images = images_of(config)
    if not (images and images.takes_bounds):
        raise ConfigError(
            f"{directory} is of no family whose images are resized between two areas; costs are "
            "known for Qwen-VL only"
        )
    engine = msgspec.structs.replace(
        settings.engine, device=settings.engine.device.split(",")[0], max_quantum_ms=0.0
    )
    settings = msgspec.structs.replace(settings, engine=engine)
    began_s = time.perf_counter()
    meter = _meter(settings)
    load_s = time.perf_counter() - began_s
    meter.budget = budget = CalibrationBudget(budget_s)
    step = await meter.step()
    tower, pixel_ns = await meter.tower(config, preprocessor)
    known = costs.read(costs.BUNDLED)
    found = Costs(
        sources=(),
        device=next(iter(gpus()), "no GPU") if engine.device != "cpu" else "cpu",
        model=_model_costs(settings, meter, config, preprocessor),
        step=step,
        tower=tower,
        host=msgspec.structs.replace(known.host, pixel_ns=pixel_ns),
        hops=known.hops,
        gap_ms=known.gap_ms,
        checks=await meter.checks(),  # ahead of what heats the card
    )
    sustained = await meter.sustained(min(SUSTAINED_S, budget_s / 8))
    found = msgspec.structs.replace(found, sustained=sustained)
    await meter.executor.close()
    left_out = f"left out for time: {', '.join(budget.left_out)}; " * bool(budget.left_out)
    took_s = time.perf_counter() - budget.began_s
    return msgspec.structs.replace(
        found,
        sources=(
            f"step, tower, sustained, host.pixel_ns: {time.strftime('%F')}, {sentence(describe())}",
            f"{left_out}{took_s:.0f} s, and {load_s:.0f} s of load",
            f"the rest of host, hops of one GPU, gap_ms: not measured, those of {known.device}",
        ),
    )


def _meter(settings: Settings) -> StepMeter:
    """Engines with the memory that they have in service."""
    from epd.engine.factory import build_executor, build_language, build_vision

    encode, directory = settings.encode, settings.model_dir
    executor = build_executor(settings.engine)
    vision = build_vision(
        directory, settings.engine, executor, max_batch_patches=encode.max_batch_patches
    )
    vision.reserve(encode.cache_device_nbytes, encode.cache_host_nbytes)
    language = build_language(
        directory, settings.engine, executor, settings.decode.max_running, vision=vision
    )
    if language.kv_in_place:
        nbytes = language.num_blocks * language.kv_layout.block_nbytes
        language.attach_kv(memoryview(bytearray(nbytes)))
    return StepMeter(executor, language, vision, settings)


def _model_costs(
    settings: Settings, meter: StepMeter, config: dict[str, Any], preprocessor: dict[str, Any]
) -> costs.ModelCosts:
    layout, size = meter.language.kv_layout, preprocessor.get("size") or {}
    return costs.ModelCosts(
        name=Path(settings.model_dir).name,
        sizes=costs.sizes_of(config),
        form=costs.form_of(settings.engine, config),
        kv_token_nbytes=layout.block_nbytes // layout.block_size,
        kv_tokens=meter.language.num_blocks * layout.block_size,
        row_nbytes=meter.vision.contract.row_nbytes,
        tower_layers=int(config["vision_config"]["depth"]),
        patch_size=int(preprocessor["patch_size"]),
        merge_size=int(preprocessor["merge_size"]),
        min_pixels=int(preprocessor.get("min_pixels") or size["shortest_edge"]),
        max_pixels=int(preprocessor.get("max_pixels") or size["longest_edge"]),
    )
