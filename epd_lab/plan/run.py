"""One plan: the roles that serve, on virtual time, under a workload of `epd bench`.

Everything is what ships, placement, batching, slices, prefix cache and run-ahead with it: only the
engines take their times from a cost file, and bytes move at its rate.  Users send what those of
`epd bench` do, with the same counts, arrivals and repeated images.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from epd.cli.configure.settings import build_settings, gateway_config, instance_config
from epd.config import GatewayConfig, InstanceConfig, Settings
from epd.frontend import Generation, GenerationUpdate, PreparedItem, Refused
from epd.messages import SamplingParams
from epd.model_files.geometry import image_geometry
from epd.roles.compose import Engines
from epd.roles.holding import Holding
from epd.topology import name_instances, parse_topology
from epd_lab.bench.servers.figures import Slo, figures, median_of, spread_of
from epd_lab.bench.servers.openai_load import Sample, send_all
from epd_lab.bench.workload import Stream, Workload, image_numbers
from epd_lab.plan.costs import Costs
from epd_lab.plan.device import PlannedDevice, Threads
from epd_lab.plan.engines import SCALE, PlannedLanguage, PlannedVision
from epd_lab.sim import cluster as simulated
from epd_lab.sim.cluster import GATEWAY, Cluster
from epd_lab.sim.core.guard import no_escape
from epd_lab.sim.core.loop import SimLoop
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.engine.device import SimDevice
from epd_lab.sim.planes.network import Conditions
from epd_lab.sim.planes.transfer import DataConditions
from epd_lab.sim.run import rare_collections
from epd_lab.sim.world import World

T = TypeVar("T")

TEMPLATE_TOKENS = 5  # what a chat template puts around a text and an image, about
START_S = 2.0  # everybody has joined by then
LIMIT_S = 3600.0
STEADY = Conditions(delay_s=0.0001, jitter_s=0.0001, slow_share=0.0, max_queue=100_000)


def gpu_settings(assignments: Sequence[str] = ()) -> Settings:
    """What a cluster of GPUs starts from, and `KEY=VALUE` as with `--set`.  Raises ConfigError."""
    return build_settings(assignments=assignments, flags={"engine.device": "cuda"})


@dataclass(frozen=True, slots=True)
class ForecastPlan:
    """What is to be predicted."""

    costs: Costs
    topology: str
    workload: Workload
    settings: Settings
    transport: str = ""  # of the cost file; empty: its first
    slo: Slo = field(default_factory=Slo)
    repeats: int = 1


class PlannedCluster(Cluster):
    """The simulator's cluster with planned engines."""

    def __init__(self, world: World, plan: ForecastPlan) -> None:
        super().__init__(world, plan.topology, simulated.Settings())
        self._plan = plan
        self._scaled = _scaled(plan.settings)
        self.instances = dict(name_instances(parse_topology(plan.topology)))
        self.planned: dict[str, PlannedDevice] = {}  # by instance

    def _gateway_config(self) -> GatewayConfig:
        return gateway_config(self._scaled, GATEWAY, "")

    def _instance_config(self, instance_id: str, roles: tuple[str, ...]) -> InstanceConfig:
        return instance_config(self._scaled, instance_id, roles, "", "")

    def _holding(self, process: SimProcess) -> tuple[Holding, list[SimDevice]]:
        plan, loop, roles = self._plan, self.world.loop, self.instances[process.instance_id]
        config = plan.settings.engine
        threads, host = Threads(loop, plan.costs.host.image_threads), plan.costs.host
        device = self.planned[process.instance_id] = PlannedDevice(
            loop, lambda: 1.0 + host.interpreter * threads.num_busy
        )
        engines = Engines()
        if "encode" in roles:
            engines.vision = PlannedVision(
                plan.costs, device, threads, config, plan.settings.encode.max_batch_patches
            )
        if "prefill" in roles or "decode" in roles:
            engines.language = PlannedLanguage(
                plan.costs,
                device,
                config,
                kv_in_place=(plan.transport or next(iter(plan.costs.hops))) == "cuda",
            )
        return Holding(self._instance_config(process.instance_id, roles), engines), []


def _scaled(settings: Settings) -> Settings:
    """With memory to the scale of the engines."""
    encode, prefill = settings.encode, settings.prefill
    tiers = (encode.cache_device_nbytes // SCALE, encode.cache_host_nbytes // SCALE)
    return msgspec.structs.replace(
        settings,
        encode=msgspec.structs.replace(
            encode, cache_device_nbytes=tiers[0], cache_host_nbytes=tiers[1]
        ),
        prefill=msgspec.structs.replace(prefill, pool_nbytes=prefill.pool_nbytes // SCALE),
    )


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """What one user asks: text, pictures, text.  A text's token makes it unlike any other."""

    first: Sequence[tuple[int, int]]  # token and how many
    pictures: Sequence[tuple[int, int, int]]  # width, height, number
    rest: tuple[int, int]
    output_tokens: int

    @property
    def num_pixels(self) -> int:
        return sum(width * height for width, height, _ in self.pictures)


def _planned(index: int, stream: Stream, numbers: Sequence[int]) -> PlannedRequest:
    token, shape = 10 + index, stream.shape
    rest = (token, TEMPLATE_TOKENS - 1 + shape.text_tokens)
    pictures = [(*shape.size, number) for number in numbers]
    return PlannedRequest([(token, 1)], pictures, rest, shape.output_tokens)


class _Users:
    """In place of `openai_load.Server`: asks the gateway's role, and notes when tokens come."""

    def __init__(self, plan: ForecastPlan, cluster: Cluster, loop: SimLoop) -> None:
        self._plan = plan
        self._cluster = cluster
        self._loop = loop
        self._gateway = Threads(loop, 1)
        model = plan.costs.model
        self._images = {
            "patch_size": model.patch_size,
            "merge_size": model.merge_size,
            "min_pixels": model.min_pixels,
            "max_pixels": model.max_pixels,
        }

    async def ask(self, request: PlannedRequest, zero_s: float) -> Sample:
        loop = self._loop
        sample = Sample(loop.now_s - zero_s)
        generation = self._generation(request)
        sample.prompt_tokens = len(generation.token_ids)
        host, pixels = self._plan.costs.host, request.num_pixels
        await asyncio.sleep(pixels * host.way_pixel_ns / 1e9)
        await self._gateway.work(host.request_ms / 1e3 + pixels * host.gateway_pixel_ns / 1e9)
        node = self._cluster.node(GATEWAY)
        assert node is not None  # no fault is planned
        assert node.gateway is not None
        try:
            stream = node.gateway.role.submit(generation, None)
        except Refused as refused:
            sample.error, sample.ended_s = refused.message, loop.now_s - zero_s
            return sample
        last_s = 0.0

        def take(update: GenerationUpdate) -> None:
            nonlocal last_s
            now_s = loop.now_s
            if update.error is not None:
                sample.error = update.error.message
            for _ in update.token_ids[:1]:
                if last_s:
                    sample.gaps_s.append(now_s - last_s)
                else:
                    sample.ttft_s = now_s - zero_s - sample.sent_s
                last_s = now_s
            sample.output_tokens += len(update.token_ids)

        stream.push = take  # type: ignore[method-assign]  # no task wakes for each token
        async for _ in stream:
            pass
        sample.ended_s = loop.now_s - zero_s
        return sample

    def _generation(self, request: PlannedRequest) -> Generation:
        token_ids = [token for token, count in request.first for _ in range(count)]
        items = []
        for width, height, number in request.pictures:
            geometry = image_geometry({"model_type": "qwen3_vl"}, self._images, width, height)
            rows = geometry.num_rows
            name = f"{number:064x}"
            items.append(PreparedItem(name, len(token_ids), rows, geometry.grid_thw, b"image"))
            token_ids += [1] * rows
        token, count = request.rest
        token_ids += [token] * count
        sampling = SamplingParams(max_tokens=request.output_tokens)
        return Generation(tuple(token_ids), tuple(items), sampling)


def run(plan: ForecastPlan) -> list[dict[str, Any]]:
    """Rows as those of `epd bench serve`, one for each stream of the workload."""
    runs = [samples_of(plan, repeat) for repeat in range(plan.repeats)]
    rows = []
    for stream in plan.workload.streams:
        repeats = [figures(samples[stream.name], plan.slo) for samples, _ in runs]
        rows.append(
            {
                "workload": plan.workload.name,
                "stream": stream.name,
                "server": plan.topology,
                "figures": median_of(repeats),
                "spread": spread_of(repeats),
                "busy": runs[0][1],
                "errors": sorted({s.error for one, _ in runs for s in one[stream.name] if s.error})[
                    :5
                ],
            }
        )
    return rows


def samples_of(plan: ForecastPlan, repeat: int) -> tuple[dict[str, list[Sample]], dict[str, float]]:
    """Of each stream, and the share of the time that each device was busy."""
    streams = plan.workload.streams

    def asked(users: _Users, clock: Callable[[], float]) -> Awaitable[list[list[Sample]]]:
        return _all(users, streams, repeat, clock)

    samples, busy = simulate(plan, repeat, asked)
    return {s.name: found for s, found in zip(streams, samples, strict=True)}, busy


def simulate(
    plan: ForecastPlan, seed: int, asked: Callable[[_Users, Callable[[], float]], Awaitable[T]]
) -> tuple[T, dict[str, float]]:
    """What users get who ask by virtual time, and the share of it that each device was busy."""
    gc.collect()  # the world of the run before, which was alive at its end
    hop = plan.costs.hop(plan.transport)
    data = DataConditions(
        latency_s=hop.latency_ms / 1e3,
        jitter_s=0.0,
        nbytes_per_s=hop.gb_per_s * 1e9 / SCALE,
        num_pieces=1,
    )
    world = World(
        seed, network=STEADY, data=data, max_steps=1 << 62, keep_trace=False, records=False
    )
    cluster = PlannedCluster(world, plan)
    world.loop.describe = cluster.stories
    users = _Users(plan, cluster, world.loop)
    with no_escape(), rare_collections():
        cluster.start()
        world.loop.run_until(START_S)
        found: T = world.loop.run_until_complete(asked(users, world.loop.time))
        elapsed_s = world.loop.now_s - START_S
    busy = {name: device.busy_s / elapsed_s for name, device in cluster.planned.items()}
    world.close()
    return found, busy


async def _all(
    users: _Users, streams: Sequence[Stream], repeat: int, clock: Callable[[], float]
) -> list[list[Sample]]:
    zero_s, first, waiting = clock(), 0, []
    for stream in streams:
        numbers = image_numbers(stream, repeat)
        requests = [_planned(first + n, stream, images) for n, images in enumerate(numbers)]
        first += len(requests)
        waiting.append(
            send_all(users, requests, stream.arrival, zero_s, lambda sample: None, clock)
        )
    return list(await asyncio.gather(*waiting))
