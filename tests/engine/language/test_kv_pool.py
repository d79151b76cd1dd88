"""The pool: block-major, placeable, its bytes addressable per block."""

from __future__ import annotations

import mmap

import pytest
import torch

from epd.config import ConfigError
from epd.engine.kernels.eight_bits import FP8
from epd.engine.language.kv_pool import KvPool, layer_nbytes
from epd.engine.language.state_kinds import PagedRows, layout_of, sequence_tensor
from epd.messages import KvLayout

SHAPE = (3, 2, 4, 2, 8)  # layers, K and V, block size, KV heads, head dim
NBYTES = 3 * 2 * 4 * 2 * 8 * 4


def pool(num_blocks: int = 5, dtype: torch.dtype = torch.float32) -> KvPool:
    layout = KvLayout(
        num_layers=3,
        block_size=4,
        num_kv_heads=2,
        head_dim=8,
        dtype=str(dtype)[6:],
        block_nbytes=3 * layer_nbytes(4, 2, 8, dtype),
    )
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
    kv.detach()
    kv.attach(later := memoryview(bytearray(5 * NBYTES)))  # of the next life
    kv.memory[1] = 7
    assert later[NBYTES] == 7
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
    (keys, _), (values, _) = kv.layer(2)
    assert keys.shape == values.shape == (5, 4, 2, 8)
    keys[4, 1], values[4, 1] = 1.0, 2.0
    assert kv.tensor[4, 2, 0, 1].unique().tolist() == [1.0]
    assert kv.tensor[4, 2, 1, 1].unique().tolist() == [2.0]


def test_eight_bits_with_a_scale_for_each_head_of_each_token() -> None:
    kv = pool(dtype=FP8)
    assert kv.layout.block_nbytes == NBYTES // 4 + 3 * 2 * 4 * 2 * 4
    layer = kv.layer(1)
    rows = torch.randn(3, 2, 8) * torch.tensor([1e-3, 1.0, 300.0])[:, None, None]
    blocks, offsets = torch.tensor([4, 4, 2]), torch.tensor([0, 3, 1])
    stored = layer.values.write(blocks, offsets, rows)
    back = layer.values.read(torch.tensor([2, 4]), torch.float32)
    assert back.shape == (2, 4, 2, 8)
    found = torch.stack([back[1, 0], back[1, 3], back[0, 1]])
    peaks = rows.abs().amax(-1, keepdim=True)
    assert bool(((found - rows).abs() <= peaks / 28).all())  # half of the largest step, of 32/448
    assert torch.equal(found, stored)
    assert int(back.count_nonzero()) == int(found.count_nonzero())
    for other in (kv.layer(0), kv.layer(2)):
        assert not any(part.read(torch.arange(5), torch.float32).any() for part in other)
    assert not layer.keys.read(torch.arange(5), torch.float32).any()


def test_a_block_of_eight_bits_moves_whole() -> None:
    """Its bytes, or those of its layers one by one, are numbers and scales."""
    here, there = pool(dtype=FP8), pool(dtype=FP8)
    for index in range(3):
        for part in here.layer(index):
            part.write(torch.tensor([1, 1]), torch.tensor([0, 2]), torch.randn(2, 2, 8))
    assert here.layout.slots_per_block == 3
    slots = zip(there.slot_views([9, 10, 11]), here.slot_views([3, 4, 5]), strict=True)
    for target, source in slots:
        target[:] = source
    for index in range(3):
        for old, new in zip(here.layer(index), there.layer(index), strict=True):
            wanted = old.read(torch.tensor([1]), torch.float32)
            assert torch.equal(new.read(torch.tensor([3]), torch.float32), wanted)
            assert wanted.any()


def test_tensors_of_sequences_lie_in_whole_pieces_in_the_first_blocks_of_a_table() -> None:
    """Two sequences, two layers: what is written is read, moves with the blocks, and a block that
    is another's changes it."""
    tensors = (
        sequence_tensor("small", 2, 3, (5,), torch.bfloat16),
        sequence_tensor("large", 2, 3, (4, 8), torch.float32),
    )
    layout = layout_of(PagedRows(1, 2, 8), tensors, torch.float32, 4, 4)
    assert layout.block_nbytes == 512  # 51 pieces of 10 bytes, 4 of 128
    assert layout.num_state_blocks == 1 + 2
    kv = KvPool(layout, 9, torch.float32, "cpu")
    tables = torch.tensor([[7, 2, 5], [1, 8, 3]])
    written = {}
    for index, tensor in enumerate(kv.sequence_tensors()):
        for layer in range(2):
            values = torch.randn(2, 3, *layout.tensors[index].shape)
            tensor.write(layer, tables, values)
            written[index, layer] = values.to(tensor.pieces.dtype)
    for (index, layer), values in written.items():
        assert torch.equal(kv.sequence_tensors()[index].read(layer, tables), values)
    for source, target in zip(kv.views([1, 8, 3]), kv.views([0, 4, 6]), strict=True):
        target[:] = source
    moved = torch.tensor([[0, 4, 6], [0, 4, 5]])  # the last block is another sequence's
    large, last = kv.sequence_tensors()[1], written[1, 1]
    assert torch.equal(large.read(1, moved[:1]), last[1:])
    assert not torch.equal(large.read(1, moved[1:]), last[1:])


def test_blocks_are_copied_whole() -> None:
    layout = layout_of(PagedRows(2, 1, 8), (), torch.float32, 4, 4)
    kv = KvPool(layout, 5, torch.float32, "cpu")
    kv.memory.random_(256)
    before = kv.memory.clone()
    kv.copy([])
    kv.copy([(0, 3), (4, 1), (0, 2)])
    assert torch.equal(kv.memory, before[[0, 4, 0, 0, 4]])


def test_a_block_that_cannot_hold_a_piece_of_a_state_is_refused() -> None:
    tensor = sequence_tensor("recurrent", 1, 1, (64, 64), torch.float32)
    with pytest.raises(ConfigError, match=r"engine\.block_size"):
        layout_of(PagedRows(1, 2, 8), (tensor,), torch.float32, 4, 4)


def test_a_latent_row_is_one_part() -> None:
    layout = layout_of(PagedRows(2, 1, 24, num_parts=1), (), torch.float32, 4, 4)
    kv = KvPool(layout, 3, torch.float32, "cpu")
    assert kv.tensor.shape == (3, 2, 1, 4, 1, 24)
    assert layout.block_nbytes == 2 * 4 * 24 * 4
