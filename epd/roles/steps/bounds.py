"""What an instance can take at all: bounds of a step, and of a request."""

from __future__ import annotations

from epd.config import EngineConfig
from epd.failure import Failure, FailureKind
from epd.messages import KvLayout, RowContract
from epd.scheduling.batching import StepBounds


def bounds_of(config: EngineConfig, contract: RowContract | None, max_running: int) -> StepBounds:
    return StepBounds(
        config.max_step_tokens,
        config.max_chunk_tokens,
        max_running,
        config.min_partial_tokens,
        contract.max_uncut if contract is not None else 0,
        2 if config.async_scheduling else 1,
    )


def too_many(
    num_tokens: int, layout: KvLayout, num_blocks: int, where: str, reach: int
) -> Failure | None:
    """Why so many tokens never fit so many blocks; None if they do.  `reach`: of these, as many as
    are computed at a time."""
    needed = layout.num_state_blocks + layout.rows.needed(num_tokens, reach)
    if needed <= num_blocks:
        return None
    reason = (
        f"{num_tokens} tokens need {needed} KV blocks and {where} has {num_blocks}; ask for fewer "
        "tokens, or raise engine.kv_nbytes"
    )
    return Failure(FailureKind.CAPACITY, reason)
