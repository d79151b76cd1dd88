"""A state of a GPU's pool, head by head to another one: through the host, and straight into it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epd.engine.adapter import adapter_for
from epd.engine.device.executor import Deferred
from epd.engine.device.streams import DeviceStreams
from epd.engine.language.kv_hop import KvHop
from epd.engine.language.kv_pool import KvPool
from epd.model_files.checkpoint import read_checkpoint
from tests.engine.language.states import (
    assert_equal,
    cut_from,
    drawn,
    pool_of,
    rank_of,
    read,
    write,
)
from tests.engine.tiny_models import cached_model

pytestmark = pytest.mark.gpu


def done(call: Deferred[Any]) -> Any:
    torch.cuda.synchronize()
    return call.finish()


@pytest.mark.parametrize("in_place", [False, True])
def test_two_ranks_have_a_state_of_one(cuda: str, in_place: bool) -> None:
    adapter = adapter_for(read_checkpoint(cached_model("qwen3_5")))
    streams, whole = DeviceStreams(torch.device(cuda)), [part.to(cuda) for part in drawn(adapter)]
    source = KvPool(pool_of(adapter, rank_of(0, 1)).layout, 8, torch.float32, cuda)
    blocks = list(range(source.layout.num_state_blocks))[::-1]
    write(source, blocks, whole)
    for rank in range(2):
        layout = pool_of(adapter, rank_of(rank, 2)).layout
        pool, count = KvPool(layout, 8, torch.float32, cuda), layout.num_state_blocks
        hop, share = KvHop(pool, streams), layout.state_shares[rank]
        (taken,) = done(KvHop(source, streams).fetch_state(blocks, share, in_place=in_place))
        nbytes = count * layout.block_nbytes
        if in_place:
            landing: Any = pool.memory.view(-1)
            landing[: taken.numel()] = taken
        else:
            landing = memoryview(bytearray(nbytes))
            landing[: taken.nbytes] = taken
            hop.attach(landing)
        torch.cuda.synchronize()  # streams of a hop do not wait for this one
        at = list(range(count))
        done(hop.land_state(landing, at, at[::-1], [(range(len(share)), 0)]))
        assert_equal(read(pool, at[::-1]), cut_from(whole, adapter, rank_of(rank, 2)))
