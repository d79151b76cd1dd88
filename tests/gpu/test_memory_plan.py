"""What weights and activations do not need is there for KV."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from epd.config import EngineConfig
from epd.engine.device.memory_plan import held_nbytes
from epd.engine.factory import build_language, build_vision
from epd.engine.sharding import WHOLE, Collectives, Shard
from epd.tiny import CHECKPOINT
from epd_lab.bench.costs.shape import write

KV_NBYTES = 1 << 30
CONFIG = EngineConfig(
    device="cuda:0",
    dtype="bfloat16",
    load_format="dummy",
    cuda_graphs=False,
    kv_nbytes=KV_NBYTES,
    max_step_tokens=512,
)
ACTIVATIONS_NBYTES = 1 << 30  # of such steps, more than they take
PATCHES = 8192


class Twins(Collectives):
    """The other of two ranks says what this one says."""

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([x, x], dim)


@pytest.fixture(autouse=True)
def nothing_left(cuda: str) -> None:
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("shard", [WHOLE, Shard(0, 2, Twins())], ids=["whole", "half"])
@pytest.mark.parametrize("quantization", ["", "fp8"])
def test_joined_weights_leave_nothing_of_their_parts(
    tmp_path: Path, shard: Shard, quantization: str
) -> None:
    """Query, key and value are laid side by side in new memory, and so are gate and up; a rank's
    dummy weights are cut from whole ones."""
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    config = replace(CONFIG, quantization=quantization)
    engine = build_language(write(tmp_path / "4b", CHECKPOINT), config, shard=shard)
    expected = before + held_nbytes(engine.model) + KV_NBYTES
    assert 0 <= torch.cuda.memory_reserved() - expected < ACTIVATIONS_NBYTES
    peak = torch.cuda.max_memory_reserved() - expected
    assert peak < ACTIVATIONS_NBYTES, (
        "weights are never there in more bits than they have in service"
    )


def test_a_plan_knows_the_largest_batch_of_images(tmp_path: Path) -> None:
    """Whose memory went back to the device while weights were laid side by side."""
    directory = write(tmp_path / "4b", CHECKPOINT)
    vision = build_vision(directory, CONFIG, max_batch_patches=PATCHES)
    language = build_language(directory, CONFIG, vision=vision)
    planned = torch.cuda.memory_reserved()
    vision.touch()
    assert torch.cuda.memory_reserved() == planned
    assert language.num_blocks


def test_runs_of_all_sizes_give_their_rows_in_one_place(tmp_path: Path) -> None:
    """Captured runs keep their results: 64 sizes would be as much as 33 of the largest."""
    config = replace(CONFIG, cuda_graphs=True)
    vision = build_vision(write(tmp_path / "4b", CHECKPOINT), config, max_batch_patches=PATCHES)
    beside = torch.cuda.memory_allocated() - held_nbytes(vision.model)
    largest = PATCHES // 4 * vision.contract.row_nbytes
    assert largest <= beside < 4 * largest
