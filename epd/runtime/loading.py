"""The engines of an instance, or of one rank of it, from its configuration.

Torch is imported when the first of them is loaded, not before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from epd.config import InstanceConfig
from epd.engine.base import Progress, no_progress
from epd.roles.compose import Engines
from epd.roles.group import GroupLanguageEngine, Leader
from epd.scheduling.slots import CACHE_ROWS, POOL_ROWS, sized
from epd.transport.backend import Backend
from epd.transport.backends import chosen
from epd.transport.device import STAGING_NBYTES

if TYPE_CHECKING:
    from epd.engine.executor import DeviceExecutor
    from epd.engine.language import TorchLanguageEngine
    from epd.engine.sharding import Shard
    from epd.engine.shared_rows import SharedRows


class OtherRanks(Protocol):
    """The ranks with which an instance shares its language model."""

    leader: Leader

    def shard(self) -> Shard:
        """The instance's own; waits until all ranks are at it."""
        ...


def backends_of(config: InstanceConfig) -> tuple[Backend, ...]:
    """By which it moves bytes.  Raises TransportError."""
    where = (config.endpoint, config.transport_directory, config.engine.device)
    return chosen(config.transport, *where)


def mirrored_nbytes(config: InstanceConfig, row_nbytes: int) -> int:
    """Device memory that the data plane takes when the instance starts, behind the plan."""
    if not any(backend.on_device for backend in backends_of(config)):
        return 0
    rows = sized(config.prefill.pool_nbytes, POOL_ROWS, row_nbytes)
    rows_nbytes = rows if "prefill" in config.roles else 0
    kv_nbytes = config.engine.kv_landing_nbytes if "decode" in config.roles else 0
    return STAGING_NBYTES + rows_nbytes + kv_nbytes


def load_engines(
    config: InstanceConfig, progress: Progress = no_progress, ranks: OtherRanks | None = None
) -> Engines:
    """Load the stages that these roles need; blocks for seconds.  Raises ModelError.

    `progress` is told how much of a stage's weights has been read.  `ranks`: those that share the
    language model with this process.
    """
    from epd.engine.factory import build_executor, build_vision
    from epd.engine.sharding import WHOLE

    executor = build_executor(config.engine)
    engines = Engines(close=executor.close)
    if "encode" in config.roles:
        engines.vision = vision = build_vision(
            config.model_dir,
            config.engine,
            executor,
            max_batch_patches=config.encode.max_batch_patches,
            progress=progress,
        )
        tier = sized(config.encode.cache_device_nbytes, CACHE_ROWS, vision.contract.row_nbytes)
        vision.reserve(tier, config.encode.cache_host_nbytes)
    if ranks is not None:
        own = load_rank(config, executor, ranks.shard(), progress)
        engines.leader = ranks.leader
        engines.language = GroupLanguageEngine(own.engine, own.step, ranks.leader)
        engines.close = partial(_close_all, ranks.leader, executor.close)
    elif "prefill" in config.roles or "decode" in config.roles:
        engines.language = _load_language(config, executor, WHOLE, progress)
    if config.profile_dir:
        from epd.engine.profiling import TorchProfiler

        engines.profiler = TorchProfiler(executor, config.profile_dir, config.instance_id)
    return engines


def load_rank(
    config: InstanceConfig,
    executor: DeviceExecutor,
    shard: Shard,
    progress: Progress = no_progress,
) -> SharedRows:
    """A rank's share of the language model; returns when every rank has loaded its own."""
    from epd.engine.loading import DTYPES
    from epd.engine.shared_rows import SharedRows

    engine = _load_language(config, executor, shard, progress)
    return SharedRows(engine, executor, shard, DTYPES[config.engine.dtype])


def _load_language(
    config: InstanceConfig, executor: DeviceExecutor, shard: Shard, progress: Progress
) -> TorchLanguageEngine:
    from epd.engine.factory import build_language

    sends = "decode" not in config.roles  # what it prefills is decoded elsewhere
    return build_language(
        config.model_dir,
        config.engine,
        executor,
        config.decode.max_running,
        kv_leaving_nbytes=config.engine.kv_landing_nbytes if sends else 0,
        mirrored_nbytes=partial(mirrored_nbytes, config),
        progress=progress,
        shard=shard,
    )


async def _close_all(leader: Leader, close_own: Callable[[], Awaitable[object]]) -> None:
    """The other ranks first: what they are in the midst of holds the leader's device."""
    await leader.close()
    await close_own()
