"""What each rank keeps of a model: together it is the model, and nothing is kept twice in vain."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from epd.config import ConfigError
from epd.engine.adapter import adapter_for
from epd.engine.sharding import WHOLE, Collectives, Heads, Shard
from epd.engine.weights.loading import load_stage, plan_stage
from epd.model_files.checkpoint import read_checkpoint
from tests.engine.tiny_models import FAMILIES, OF_GEMMA

HELD_WHOLE = (
    "embed_tokens",
    "norm",
    "mlp.gate.weight",
    "q_a_proj",
    "kv_a_proj",
    "correction_bias",
    "shared_expert_gate",
)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_heads(kv_heads: int, group: int, size: int) -> None:
    """Each query head is somewhere, beside the one that it reads, and as evenly as can be."""
    num_heads = kv_heads * group
    if size > num_heads:
        with pytest.raises(ConfigError, match=f"use {num_heads} ranks at most"):
            Heads.of(Shard(0, size, Collectives()), num_heads, kv_heads)
        return
    each = [Heads.of(Shard(rank, size, Collectives()), num_heads, kv_heads) for rank in range(size)]
    assert [query for heads in each for query in heads.queries] == list(range(num_heads))
    for heads in each:
        assert heads.queries
        assert [query // group for query in heads.queries] == [
            head for head in heads.kv for _ in range(len(heads.queries) // len(heads.kv))
        ]
    kept = sum(len(heads.kv) for heads in each)
    assert kept == max(kv_heads, size)
    assert max(len(heads.kv) for heads in each) == -(-kv_heads // size)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in OF_GEMMA])
def test_a_rank_reads_its_cuts_of_the_whole(family: str, model_dir: Any) -> None:
    """From files and made up; nothing is left out, and nothing large is held by all."""
    adapter = adapter_for(read_checkpoint(model_dir(family)))

    def weights(shard: Shard, load_format: str) -> dict[str, torch.Tensor]:
        model = load_stage(adapter, "language", torch.float32, "cpu", load_format, shard=shard)
        return dict(model.state_dict())

    for load_format in ("auto", "dummy"):
        whole = weights(WHOLE, load_format)
        for size in (2, 3) if load_format == "auto" else (3,):
            seen: dict[str, set[int]] = defaultdict(set)
            for rank in range(size):
                shard = Shard(rank, size, Collectives())
                cuts = plan_stage(adapter, "language", shard=shard).cuts
                part = weights(shard, load_format)
                for name, tensor in part.items():
                    kept = cuts[name].of(whole[name]) if name in cuts else whole[name]
                    assert torch.equal(tensor, kept), name
                    if name in cuts:
                        seen[name].update(i for r in cuts[name].kept for i in r)
                        assert tensor.numel() < whole[name].numel()
            for name, indices in seen.items():
                dim = cuts[name].dim
                assert indices == set(range(whole[name].shape[dim])), name
            assert all(any(part in name for part in HELD_WHOLE) for name in whole.keys() - seen)


def test_more_ranks_than_heads_with_a_state_are_refused(model_dir: Any) -> None:
    adapter = adapter_for(read_checkpoint(model_dir("qwen3_5")))
    adapter.text_config.linear_num_value_heads = 2
    wanted = "2 linear attention heads, which 4 ranks cannot share; use 2 ranks at most"
    with pytest.raises(ConfigError, match=wanted):
        adapter.kv_layout(torch.float32, 16, shard=Shard(0, 4, Collectives()))
    with pytest.raises(ConfigError, match=wanted):
        plan_stage(adapter, "language", dummy=True, shard=Shard(0, 4, Collectives()))


def test_an_unknown_way_to_cut_is_refused(model_dir: Any) -> None:
    adapter = adapter_for(read_checkpoint(model_dir("llama")))
    adapter.tp_plan = {"model.norm": "sequence_parallel"}  # type: ignore[misc]
    plan_stage(adapter, "language")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight.*sequence_parallel.*use one rank"):
        plan_stage(adapter, "language", shard=Shard(0, 2, Collectives()))
