"""Groups of ranks that share the states of sequences say what transformers says.

Text, images and videos, from cold caches and from warm ones, whatever the sizes of the groups; and
nothing is lost when blocks are scarce or a rank dies.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.e2e.faults.test_groups import followers
from tests.e2e.goldens import directory_of, goldens
from tests.e2e.server import STOP_S, Server, serving, wait_for
from tests.e2e.streams import (
    PATIENT,
    all_have_said,
    ask_during,
    check_same_afterwards,
    first_has_said,
    questions,
    wait_until_replaced,
)
from tests.e2e.test_exactness import burst
from tests.engine.tiny_models import make_model

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]
SMALL_BLOCKS = {"engine__block_size": 4}  # of a state, groups of some sizes have more than others
SPLIT = [
    ("1e1p:tp2,1d:tp2", "qwen3_5", {}),
    ("1e1p:tp2,1d:tp2", "qwen3_5_moe", {"engine__max_chunk_tokens": 7}),
    ("1e1p:tp2,1d", "qwen3_5", SMALL_BLOCKS),
    ("1e1p1d:tp2", "qwen3_5_moe", {}),
    ("1e1p:tp4,1d:tp2", "qwen3_5", SMALL_BLOCKS),
    ("1e1p:tp2,1d:tp4", "qwen3_5_moe", SMALL_BLOCKS),
    ("1e1pd:tp2", "qwen3_5", {}),
]


def told(name: str, server: Server) -> None:
    """Instances have counted some, and say so with their heartbeats."""

    def found() -> bool:
        return any(
            n for key, n in server.metrics().items() if key.startswith(f"epd_{name}_total{{")
        )

    wait_for(found, STOP_S, name)


@pytest.mark.parametrize(("topology", "family", "settings"), SPLIT)
async def test_equals_generate(topology: str, family: str, settings: dict[str, object]) -> None:
    """The second time prompts go on behind copies of states."""
    with serving(topology, model=directory_of(family), **settings) as server:
        for seed in range(2):
            assert await burst(server, family, goldens(family), seed) == []
        told("state_snapshots", server)
        told("prefix_cache_hit_tokens", server)


@pytest.mark.parametrize("topology", ["1e1pd:tp2", "1e1p:tp2,1d:tp2"])
async def test_who_gives_way_says_the_same(topology: str) -> None:
    """Blocks for one long prompt and hardly more."""
    family = "qwen3_5"
    short = [one for one in goldens(family) if one.name in ("text", "system", "long text", "one")]
    few = {"engine__kv_nbytes": "80KiB", "engine__max_chunk_tokens": 16}
    with serving(topology, model=directory_of(family), **few) as server:
        for seed in range(2):
            assert await burst(server, family, short * 8, seed) == []
        told("preemptions", server)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other counts of heads than ranks, which share them unevenly."""
    heads = {"linear_num_key_heads": 3, "linear_num_value_heads": 6}
    return make_model("qwen3_5", tmp_path_factory.mktemp("qwen3_5"), heads)


@pytest.mark.parametrize("name", ["p0", "d0"])
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_dies_takes_no_answer_with_it(name: str, rank: int, model: Path) -> None:
    """kill -9 in mid-stream: what it kept of sequences is computed again."""
    with serving("1e1p:tp2,1d:tp2", model=model, **PATIENT) as server:
        epoch = server.instances()[name]["epoch"]
        victim = [psutil.Process(server.pid(name)), *followers(server, name)][rank]
        bodies = questions(370 + 2 * rank + (name == "d0"), 8, 150, 60)
        when = all_have_said if name == "d0" else first_has_said
        replies = await ask_during(server, bodies, victim.kill, when)
        wait_until_replaced(server, name, epoch)
        assert await check_same_afterwards(server, bodies, replies) == {"answered": 8}
        server.check_all_returned()
