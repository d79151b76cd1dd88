"""The engines of an instance, or of one rank of it, from its configuration.

Torch is imported when the first of them is loaded, not before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from epd.config import InstanceConfig
from epd.engine.base import EncodeFailure, Patches, Progress, Rows, StepResult, no_progress
from epd.groups.asks import OtherRanks
from epd.records import TransportLack
from epd.roles.compose import Engines
from epd.runtime import heap
from epd.scheduling.slots import CACHE_ROWS, POOL_ROWS, sized
from epd.transport.backend import Backend
from epd.transport.backends import chosen, lacked
from epd.transport.base import TransportError

if TYPE_CHECKING:
    from epd.engine.base import KvMemory
    from epd.engine.device.executor import DeviceExecutor
    from epd.engine.factory import Loaded
    from epd.engine.language.engine import TorchLanguageEngine
    from epd.engine.sharding import Shard
    from epd.engine.vision.engine import TorchVisionEngine
    from epd.groups.device.shared_rows import SharedRows
    from epd.groups.leader import Batch, Leader


class FormedRanks(OtherRanks, Protocol):
    """The ranks with which an instance shares its language model."""

    leader: Leader
    epoch: int  # of all of them

    def shard(self) -> Shard:
        """The instance's own; waits until all ranks are at it."""


def backends_of(config: InstanceConfig) -> tuple[Backend, ...]:
    """By which it moves bytes.  Raises TransportError."""
    where = (config.endpoint, config.transport_directory, config.engine.device)
    backends = chosen(config.transport, *where)
    for lack in lacks_of(config) if config.mooncake.protocol == "rdma" else ():
        if lack.name == "mooncake":
            raise TransportError(f"mooncake.protocol is rdma, and {lack.reason}")
    return backends


def lacks_of(config: InstanceConfig) -> tuple[TransportLack, ...]:
    """What it would offer besides, where it may choose."""
    by_hand = config.transport != "auto"
    return () if by_hand else tuple(lacked(config.endpoint, config.engine.device))


def mirrored_nbytes(config: InstanceConfig, row_nbytes: int) -> int:
    """Device memory for rows that arrive, taken when the instance starts, behind the plan."""
    from epd.engine.device.memory_plan import LIFTED_NBYTES

    if not row_nbytes or "prefill" not in config.roles:
        return 0
    rows = sized(config.prefill.pool_nbytes, POOL_ROWS, row_nbytes)
    lifted = min(rows, LIFTED_NBYTES) if config.num_ranks == 1 else 0
    return lifted + (rows if any(one.on_device for one in backends_of(config)) else 0)


def kv_memory(config: InstanceConfig) -> Callable[[int], KvMemory] | None:
    """What makes a device's memory to which peers can write, where KV comes from these."""
    makers = [b.memory for b in backends_of(config) if b.memory and "decode" in config.roles]
    return partial(makers[0], config.engine.device) if makers else None


@dataclass(slots=True)
class Kept:
    """Weights of a process, which outlive the engines of a life; and what it runs them on."""

    executor: DeviceExecutor
    vision: TorchVisionEngine | None = None
    language: Loaded | None = None

    async def anew(self, progress: Progress, config: InstanceConfig) -> Engines:
        """Load what these roles lack."""
        from epd.in_thread import in_thread

        heap.let_go()  # engines of the life before, and the memory that they had planned
        return await in_thread(partial(load_engines, config, progress, kept=self), "load")

    def forget(self, own: LoadedRank) -> None:
        """What these do not need."""
        vision = None if own.vision is None else self.vision
        language = None if own.language is None else self.language
        has_more = (vision, language) != (self.vision, self.language)
        self.vision, self.language = vision, language
        if has_more:
            heap.let_go()


def load_engines(
    config: InstanceConfig,
    progress: Progress = no_progress,
    ranks: FormedRanks | None = None,
    kept: Kept | None = None,
) -> Engines:
    """Load the stages that these roles need; blocks for seconds.  Raises ModelError.

    `progress` gets the number of a stage's bytes that have been read.  `ranks`: those that share
    the language model with this process.  `kept`: what it has loaded before."""
    from epd.engine.device.self_test import small_work
    from epd.engine.factory import build_executor
    from epd.engine.kernels import kernels_for
    from epd.engine.sharding import WHOLE

    kept = kept or Kept(build_executor(config.engine, 1 + len(config.rank_devices)))
    executor = kept.executor
    executor.on_start()  # which device is current is this thread's
    own = load_rank(config, executor, WHOLE if ranks is None else ranks.shard(), progress, kept)
    engines = Engines(own.vision, close=executor.close)
    engines.probe = partial(executor.launch_brief, small_work, config.engine.device)
    engines.attention = kernels_for(config.engine.device.partition(":")[0]).attention
    if own.vision is not None:
        engines.films = "nvdec" if own.vision.films_nbytes else "cpu"
    if own.language is not None:
        engines.language = own.language.engine
    if ranks is None and (own.language is None or own.language.engine.kv_memory is None):
        engines.rest = partial(_rest, executor, own.language)
    if ranks is None:
        engines.anew = partial(kept.anew, progress)
        engines.forget = partial(kept.forget, own)
    if ranks is not None:
        from epd.groups.engines import GroupLanguageEngine, GroupVisionEngine

        engines.leader = leader = ranks.leader
        engines.ranks, engines.epoch = ranks, ranks.epoch
        engines.close = partial(_close_all, leader, executor.close)
        if own.vision is not None:
            engines.vision = GroupVisionEngine(own.vision, own.vision, leader)
        if own.language is not None:
            own_share = own.language.engine, own.language.step
            engines.language = GroupLanguageEngine(*own_share, leader, ranks)
    if config.profile_dir:
        from epd.engine.device.profiling import TorchProfiler

        engines.profiler = TorchProfiler(executor, config.profile_dir, config.instance_id)
    return engines


@dataclass(frozen=True, slots=True)
class LoadedRank:
    vision: TorchVisionEngine | None = None
    language: SharedRows | None = None

    def step(self, batch: Batch) -> Awaitable[StepResult]:
        assert self.language is not None  # only its leader asks, which has the same roles
        return self.language.step(batch)

    def encode(
        self, batch: Sequence[Patches], num_turns: int
    ) -> Awaitable[list[Rows | EncodeFailure]]:
        assert self.vision is not None
        return self.vision.encode(batch, num_turns)

    def go_on(self) -> Awaitable[list[Rows | EncodeFailure]]:
        assert self.vision is not None
        return self.vision.go_on()

    def change_adapters(self, dropped: Sequence[str], held: str) -> Awaitable[None]:
        assert self.language is not None
        return self.language.engine.change_adapters(dropped, held)


def load_rank(
    config: InstanceConfig,
    executor: DeviceExecutor,
    shard: Shard,
    progress: Progress = no_progress,
    kept: Kept | None = None,
) -> LoadedRank:
    """Returns when every rank has loaded its own.  `kept` has it then, too."""
    from epd.engine.weights.loading import DTYPES
    from epd.groups.device.shared_rows import SharedRows

    kept = kept or Kept(executor)
    vision = language = None
    if "encode" in config.roles:
        kept.vision = vision = kept.vision or _load_vision(config, executor, shard, progress)
        if not shard.rank:
            _take_films(config, vision)
    if "prefill" in config.roles or "decode" in config.roles:
        engine = _load_language(config, executor, shard, progress, vision, kept.language)
        kept.language = engine.loaded
        language = SharedRows(engine, executor, shard, DTYPES[config.engine.dtype])
    return LoadedRank(vision, language)


def _load_vision(
    config: InstanceConfig, executor: DeviceExecutor, shard: Shard, progress: Progress
) -> TorchVisionEngine:
    from epd.engine.factory import build_vision

    encode = config.encode
    vision = build_vision(
        config.model_dir,
        config.engine,
        executor,
        config.limits.max_pixels,
        max_batch_patches=encode.max_batch_patches,
        progress=progress,
        shard=shard,
    )
    if not shard.rank:  # which keeps the rows
        tier = sized(encode.cache_device_nbytes, CACHE_ROWS, vision.contract.row_nbytes)
        vision.reserve(tier, encode.cache_host_nbytes)
    return vision


def _take_films(config: InstanceConfig, vision: TorchVisionEngine) -> None:
    encode = config.encode
    alone = config.roles == ("encode",)  # elsewhere a decoder's start would hold tokens up
    takes = encode.film_decoder == "nvdec" or (encode.film_decoder == "auto" and alone)
    vision.take_films(encode.film_device_nbytes if takes else 0)


def _load_language(
    config: InstanceConfig,
    executor: DeviceExecutor,
    shard: Shard,
    progress: Progress,
    vision: TorchVisionEngine | None,
    loaded: Loaded | None = None,
) -> TorchLanguageEngine:
    from epd.engine.factory import build_language

    sends = "decode" not in config.roles  # what it prefills is decoded elsewhere
    by_host = any(not backend.on_device for backend in backends_of(config))
    films_nbytes = 0 if vision is None else vision.films_nbytes
    return build_language(
        config.model_dir,
        config.engine,
        executor,
        config.decode.max_running,
        kv_leaving_nbytes=config.engine.kv_landing_nbytes if sends and by_host else 0,
        later_nbytes=lambda row_nbytes: films_nbytes + mirrored_nbytes(config, row_nbytes),
        kv_memory=kv_memory(config),
        has_landing=by_host and not sends,
        progress=progress,
        shard=shard,
        vision=vision,
        loaded=loaded,
    )


async def _rest(executor: DeviceExecutor, language: SharedRows | None) -> bool:
    """A life ends, and what it had attached goes."""
    is_at_rest = await executor.rest()
    if is_at_rest and language is not None:
        language.engine.detach()
    return is_at_rest


async def _close_all(leader: Leader, close_own: Callable[[], Awaitable[object]]) -> None:
    """The other ranks first: what they are in the midst of holds the leader's device."""
    await leader.close()
    await close_own()
