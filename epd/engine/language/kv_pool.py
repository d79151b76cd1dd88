"""The paged KV pool of one device.

One tensor, `[num_blocks, num_layers, num_parts, block_size, num_kv_heads, head_dim]`, with two
parts, keys and values, or one latent row.  Block first: all layers of a block are one contiguous
piece, so that moving a sequence to a decode instance is one write per block.  The memory may be
handed in (`attach`) so that it is the transfer engine's registered memory, and a received block is
in place when its last byte has landed.

In eight bits (`--kv-cache-dtype fp8`) a token's keys of a head are e4m3 with a float32 scale, as
are its values.  No token depends on its neighbours, and none is rounded twice.  Scales,
`[num_parts, num_kv_heads, block_size]`, lie behind the numbers of their layer in their block, so
whatever moves a layer or a block moves them too.

Where rows have several kinds (`KvLayout.kinds`), a block holds those of one: each kind sees all
blocks in its own shape, and a table has which are whose.

A block is cleared when its first slot is about to be written (`clear`).  What a former tenant left
behind would be masked anyway, but a masked NaN still poisons a sum: zero times NaN is NaN.

What layers keep of a sequence besides (`KvLayout.tensors`) lies in blocks of this pool, too, the
first of the sequence's table.  A block holds whole pieces of one tensor, so that no piece is torn.
It is never cleared: who computes the first token of a sequence reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from epd.engine.base import Buffer, KvMemory
from epd.engine.device.copies import to_device
from epd.engine.device.row_memory import read_bytes
from epd.engine.kernels.eight_bits import FP8, scaled
from epd.layouts import RowKind
from epd.messages import KvLayout
from epd.shares import neighbours

SCALE_NBYTES = 4


class KvPart(NamedTuple):
    """Keys or values of a layer, views of the pool."""

    numbers: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    scales: torch.Tensor | None  # of eight bits: float32 [num_blocks, num_kv_heads, block_size]

    @property
    def width(self) -> int:
        return self.numbers.shape[-1]

    def write(
        self, blocks: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """`[T, num_kv_heads, head_dim]`, each row to its place.  Gives what they will mean when
        read again."""
        if self.scales is None:
            self.numbers.index_put_((blocks, offsets), rows)
            return rows
        values, scales = scaled(rows)
        self.numbers.view(torch.uint8).index_put_((blocks, offsets), values.view(torch.uint8))
        self.scales.transpose(1, 2).index_put_((blocks, offsets), scales[..., 0])
        return (values.float() * scales).to(rows.dtype)

    def read(self, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What whole blocks mean, `[len(blocks), block_size, num_kv_heads, head_dim]`."""
        if self.scales is None:
            return self.numbers.index_select(0, blocks)
        values = self.numbers.view(torch.uint8).index_select(0, blocks).view(FP8)
        scales = self.scales.index_select(0, blocks).transpose(1, 2)[..., None]
        return (values.float() * scales).to(dtype)


class KvLayer(NamedTuple):
    keys: KvPart
    values: KvPart


class _Piece(NamedTuple):
    """All blocks, as the layers of one kind have them, in their order."""

    numbers: torch.Tensor  # [num_blocks, num_layers, num_parts, block_size, num_kv_heads, head_dim]
    scales: torch.Tensor | None  # [num_blocks, num_layers, num_parts, num_kv_heads, block_size]


class _Memory(NamedTuple):
    whole: torch.Tensor  # uint8 [num_blocks, block_nbytes]
    pieces: list[_Piece]
    places: list[tuple[_Piece, int]]  # of each layer: its piece, and where among its layers


class SequenceTensor(NamedTuple):
    """One of `KvLayout.tensors`, a view of the pool: each layer's for each sequence."""

    pieces: torch.Tensor  # [num_blocks, pieces per block, *shape of a piece]
    first_block: int  # of a table, that holds it
    num_pieces: int  # of a layer

    def read(self, layer: int, tables: torch.Tensor) -> torch.Tensor:
        """Copies, `[len(tables), num_pieces, *shape]`; tables int64 `[n, blocks]`."""
        blocks, places = self._where(layer, tables)
        return self.pieces[blocks, places]

    def write(self, layer: int, tables: torch.Tensor, values: torch.Tensor) -> None:
        self.pieces[self._where(layer, tables)] = values.to(self.pieces.dtype)

    def _where(self, layer: int, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = layer * self.num_pieces
        index = torch.arange(first, first + self.num_pieces, device=tables.device)
        per_block = self.pieces.shape[1]
        return tables[:, self.first_block + index // per_block], index % per_block


class KvPool:
    """Paged KV memory; which block belongs to whom is the caller's business."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, dtype: torch.dtype, device: str,
        memory: Callable[[int], KvMemory] | None = None,
    ) -> None:  # fmt: skip
        """`memory`: makes so many bytes of the device that peers can write to."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.nbytes = num_blocks * layout.block_nbytes
        self._dtype = dtype
        self._device = device
        self._memory: _Memory | None = None
        self.on_layers: Callable[[int], None] | None = None  # see `layer`
        self.lies_in = memory(self.nbytes) if memory is not None else None
        if self.lies_in is not None:
            self.attach(self.lies_in.whole)

    @property
    def memory(self) -> torch.Tensor:
        """uint8 `[num_blocks, block_nbytes]`."""
        return self._placed().whole

    @property
    def tensor(self) -> torch.Tensor:
        """The numbers, `[num_blocks, num_layers, num_parts, block_size, heads, head_dim]`, of a
        pool whose rows have one shape."""
        (piece,) = self._placed().pieces
        return piece.numbers

    @property
    def scales(self) -> torch.Tensor | None:
        """Of eight bits, `[num_blocks, num_layers, 2, num_kv_heads, block_size]`."""
        (piece,) = self._placed().pieces
        return piece.scales

    def like(self, num_blocks: int) -> KvPool:
        return KvPool(self.layout, num_blocks, self._dtype, self._device)

    def attach(self, buffer: Buffer) -> None:
        """Use this memory, cleared.  Raises ValueError when it does not fit or comes too late."""
        if self._memory is not None:
            raise ValueError(
                "the KV pool has its memory already; attach once, before the first step"
            )
        if isinstance(buffer, memoryview):
            buffer = buffer.cast("B")
        if getattr(buffer, "readonly", False):
            raise ValueError("the KV pool needs memory that it may write")
        if buffer.nbytes < self.nbytes:
            raise ValueError(f"the KV pool needs {self.nbytes} bytes, got {buffer.nbytes}")
        memory = read_bytes(buffer[: self.nbytes])
        memory.zero_()  # first touch
        self._memory = self._shaped(memory)

    def detach(self) -> None:
        """Let go of the memory that was attached; no step is under way."""
        self._memory = None

    def layer(self, index: int) -> KvLayer:
        """Keys and values of a layer.

        A step asks for its layers in order, each when it is about to write it: all that it writes
        into those before is launched.  So `on_layers(n)` is called behind the first n, at the end
        of each group that leaves by itself but the last.
        """
        keys, values = self._parts(index)
        return KvLayer(keys, values)

    def latent(self, index: int) -> KvPart:
        """The latent rows of a layer, of a pool that has these instead; asked for likewise."""
        (part,) = self._parts(index)
        return part

    def _parts(self, index: int) -> list[KvPart]:
        if self.on_layers is not None and index and index % self.layout.layers_per_slot == 0:
            self.on_layers(index)
        (numbers, scales), at = self._placed().places[index]
        return [
            KvPart(numbers[:, at, part], None if scales is None else scales[:, at, part])
            for part in range(self.layout.num_parts)
        ]

    def sequence_tensors(self) -> list[SequenceTensor]:
        """What layers keep of sequences, in the layout's order."""
        memory, tensors, first_block = self.memory, [], 0
        for tensor in self.layout.tensors:
            per_block = self.layout.block_nbytes // tensor.piece_nbytes
            whole = memory[:, : per_block * tensor.piece_nbytes].view(getattr(torch, tensor.dtype))
            pieces = whole.unflatten(1, (per_block, *tensor.shape))
            tensors.append(SequenceTensor(pieces, first_block, tensor.num_pieces))
            first_block += -(-tensor.num_layers * tensor.num_pieces // per_block)
        return tensors

    def views(self, blocks: Sequence[int]) -> list[memoryview]:
        """The bytes of blocks, writable, no copy (host memory)."""
        flat = memoryview(self.memory.view(-1).numpy())
        nbytes = self.layout.block_nbytes
        return [flat[block * nbytes : (block + 1) * nbytes] for block in blocks]

    def slot_views(self, slots: Sequence[int]) -> list[memoryview]:
        """The bytes of slots, in order, no copy (host memory); neighbours are one view."""
        flat = memoryview(self.memory.view(-1).numpy())
        nbytes = self.layout.slot_nbytes
        return [flat[first * nbytes : end * nbytes] for first, end in neighbours(slots)]

    def clear(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.memory[block].zero_()

    def blank(self, layer: int, slots: torch.Tensor) -> None:
        """Zeros as rows of a layer; slots int32 `[T]`, -1: none, but the first is one."""
        at = torch.where(slots < 0, slots[:1], slots).long()
        places = at // self.layout.block_size, at % self.layout.block_size
        for part in self._parts(layer):
            numbers = part.numbers.view(torch.uint8)
            numbers.index_put_(places, numbers.new_zeros(()))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Whole blocks, from and to; none is both."""
        if pairs:
            memory = self.memory
            if memory.shape[1] % 8 == 0:  # a kernel copies number by number
                memory = memory.view(torch.int64)
            source, target = to_device(pairs, torch.int64, memory.device).unbind(1)
            memory.index_copy_(0, target, memory.index_select(0, source))

    def _placed(self) -> _Memory:
        """Own memory unless `attach` came first."""
        if self._memory is None:
            with torch.inference_mode(False):  # first use may be inside a step
                own = torch.zeros(self.nbytes, dtype=torch.uint8, device=self._device)
                self._memory = self._shaped(own)
        return self._memory

    def _shaped(self, memory: torch.Tensor) -> _Memory:
        layout = self.layout
        whole = memory.view(self.num_blocks, -1)
        pieces: list[_Piece] = []
        places: dict[int, tuple[_Piece, int]] = {}
        layers = tuple(range(layout.num_layers))
        all_alike = RowKind(
            layers=layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
        )
        for kind in layout.kinds or (all_alike,):
            nbytes = len(kind.layers) * layer_nbytes(
                kind.block_size, kind.num_kv_heads, kind.head_dim, self._dtype, layout.num_parts
            )
            pieces.append(self._piece(whole[:, :nbytes], kind))
            places |= {layer: (pieces[-1], at) for at, layer in enumerate(kind.layers)}
        return _Memory(whole, pieces, [places[layer] for layer in layers])

    def _piece(self, memory: torch.Tensor, kind: RowKind) -> _Piece:
        parts, size, heads = self.layout.num_parts, kind.block_size, kind.num_kv_heads
        layers = memory.unflatten(1, (len(kind.layers), -1))
        nbytes = parts * size * heads * kind.head_dim * self._dtype.itemsize
        numbers = layers[..., :nbytes].view(self._dtype)
        scales = None
        if self._dtype == FP8:
            scales = layers[..., nbytes:].view(torch.float32).unflatten(-1, (parts, heads, size))
        return _Piece(numbers.unflatten(-1, (parts, size, heads, kind.head_dim)), scales)


def layer_nbytes(
    block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, num_parts: int = 2
) -> int:
    """Of one layer of a block, with its scales."""
    row = head_dim * dtype.itemsize + (SCALE_NBYTES if dtype == FP8 else 0)
    return num_parts * block_size * num_kv_heads * row
