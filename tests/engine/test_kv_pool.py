"""The pool: block-major, placeable, its bytes addressable per block."""

from __future__ import annotations

import mmap

import pytest
import torch

from epd.engine.kv_pool import KvPool
from epd.messages import KvLayout

SHAPE = (3, 2, 4, 2, 8)  # layers, K and V, block size, KV heads, head dim
NBYTES = 3 * 2 * 4 * 2 * 8 * 4


def pool(num_blocks: int = 5, dtype: torch.dtype = torch.float32) -> KvPool:
    layout = KvLayout(3, 4, 2, 8, str(dtype)[6:], NBYTES * dtype.itemsize // 4)
    return KvPool(layout, num_blocks, dtype, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_is_one_contiguous_piece(dtype: torch.dtype) -> None:
    kv = pool(dtype=dtype)
    kv.tensor[3] = 1.5
    views = kv.views([2, 3, 0])
    assert [view.nbytes for view in views] == [kv.layout.block_nbytes] * 3
    assert not any(views[0]) and not any(views[2])
    values = torch.frombuffer(bytearray(views[1]), dtype=dtype)
    assert values.shape == (torch.Size(SHAPE).numel(),) and bool((values == 1.5).all())


def test_views_are_writable_without_a_copy() -> None:
    kv = pool()
    kv.views([4])[0][:4] = torch.tensor(7.0).numpy().tobytes()
    assert kv.tensor[4].view(-1)[0] == 7.0


def test_attached_memory_is_the_pool() -> None:
    """Registered shared memory, larger than needed: blocks land in it, writes into it are seen."""
    kv = pool()
    memory = mmap.mmap(-1, 6 * NBYTES)
    memory[:] = b"\xff" * len(memory)
    buffer = memoryview(memory)
    kv.attach(buffer)
    assert not any(buffer[: 5 * NBYTES]) and all(buffer[5 * NBYTES :])
    kv.tensor[1] = 2.0
    assert buffer[NBYTES : NBYTES + 4].tobytes() == torch.tensor(2.0).numpy().tobytes()
    buffer[:4] = torch.tensor(3.0).numpy().tobytes()
    assert kv.tensor[0].view(-1)[0] == 3.0


def test_attaching_is_checked() -> None:
    with pytest.raises(ValueError, match=f"needs {5 * NBYTES} bytes, got 10"):
        pool().attach(memoryview(bytearray(10)))
    with pytest.raises(ValueError, match="may write"):
        pool().attach(memoryview(bytes(5 * NBYTES)))
    kv = pool()
    kv.attach(memoryview(bytearray(5 * NBYTES)))
    with pytest.raises(ValueError, match="attach once"):
        kv.attach(memoryview(bytearray(5 * NBYTES)))
    used = pool()
    used.tensor.zero_()
    with pytest.raises(ValueError, match="before the first step"):
        used.attach(memoryview(bytearray(5 * NBYTES)))


def test_clear_zeroes_whole_blocks_and_no_others() -> None:
    kv = pool()
    kv.tensor.fill_(torch.nan)
    kv.clear([1, 3])
    kv.clear([])
    for block in range(5):
        assert bool(torch.isnan(kv.tensor[block]).all()) == (block not in (1, 3))
    assert not any(kv.views([1])[0])


def test_layers_are_views() -> None:
    kv = pool()
    keys, values = kv.layer(2)
    assert keys.shape == values.shape == (5, 4, 2, 8)
    keys[4, 1], values[4, 1] = 1.0, 2.0
    assert kv.tensor[4, 2, 0, 1].unique().tolist() == [1.0]
    assert kv.tensor[4, 2, 1, 1].unique().tolist() == [2.0]
