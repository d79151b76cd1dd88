"""What a rank of a group drafts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from epd.config import SpeculativeConfig
from epd.engine.factory import build_executor, build_language, build_vision
from epd.engine.sharding import Shard
from tests.engine.draft_models import COUNT, DRAFTING, Drafting
from tests.groups.device.ranks_cases import LIMIT, Case


def drafted(
    shard: Shard, directory: Path, cases: Sequence[Case], head: str = ""
) -> tuple[list[list[int]], dict[str, list[list[int]]]]:
    """Answers, and all drafts of the model's own layer, or of a head's."""
    config = replace(DRAFTING, speculative=SpeculativeConfig("eagle3", COUNT, model=head))
    config = config if head else DRAFTING

    async def play() -> tuple[list[list[int]], dict[str, list[list[int]]]]:
        executor = build_executor(config)
        language = build_language(directory, config, executor, shard=shard)
        vision = None if head else build_vision(directory, config, executor)
        making = Drafting(directory, vision, language)
        requests = [await making.request(str(i), *case, **LIMIT) for i, case in enumerate(cases)]
        return await making.run(requests, 13), making.made

    return asyncio.run(play())
