"""What a rank of a group drafts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from epd.engine.factory import build_executor, build_language, build_vision
from epd.engine.sharding import Shard
from tests.engine.draft_models import DRAFTING, Drafting
from tests.groups.device.ranks_cases import LIMIT, Case


def drafted(
    shard: Shard, directory: Path, cases: Sequence[Case]
) -> tuple[list[list[int]], dict[str, list[list[int]]]]:
    """Answers, and all drafts of the model's own layer."""

    async def play() -> tuple[list[list[int]], dict[str, list[list[int]]]]:
        executor = build_executor(DRAFTING)
        language = build_language(directory, DRAFTING, executor, shard=shard)
        making = Drafting(directory, build_vision(directory, DRAFTING, executor), language)
        requests = [await making.request(str(i), *case, **LIMIT) for i, case in enumerate(cases)]
        return await making.run(requests, 13), making.made

    return asyncio.run(play())
