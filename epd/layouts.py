"""How what layers keep of a sequence lies in blocks, as it stands in messages."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from epd.ranges import Count, Name, Positive
from epd.shares import Cell, cells, is_cut, runs
from epd.wire import Record

Heads = Annotated[int, Meta(ge=1, le=1 << 16)]  # or layers
Ranks = Annotated[tuple[tuple[Count, Heads], ...], Meta(max_length=1024)]


class StateTensor(Record):
    """What a layer keeps of a sequence besides rows of its tokens: of fixed size, overwritten by
    each token.  It is cut into pieces (heads), of which each lies in one block."""

    name: Name
    num_layers: Positive
    num_pieces: Positive  # of a layer
    shape: tuple[Count, ...]  # of a piece
    dtype: Name
    piece_nbytes: Positive
    # What lies side by side in a piece: of how many heads, and how many numbers each; none: a piece
    # is a head.
    parts: tuple[tuple[Positive, Positive], ...] = ()

    @property
    def num_heads(self) -> int:
        return max(self.counts)

    @property
    def counts(self) -> tuple[int, ...]:
        """Of each part, of how many heads it is; neighbours may share one."""
        return tuple(count for count, _ in self.parts) or (self.num_pieces,)

    @property
    def nbytes_each(self) -> tuple[int, ...]:
        """Of each part, of one head in all layers."""
        if not self.parts:
            return (self.num_layers * self.piece_nbytes,)
        number_nbytes = self.piece_nbytes // sum(count * width for count, width in self.parts)
        inputs = self.num_layers * self.num_pieces * number_nbytes
        return tuple(inputs * width for _, width in self.parts)


class RowKind(Record):
    """Layers whose rows have one shape and are seen as long, where a model has several kinds.  They
    lie in blocks of their own, as large as those of other kinds."""

    layers: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=1 << 16)]
    num_kv_heads: Heads
    head_dim: Positive
    window: Count = 0  # tokens behind which its rows are not seen; 0: all are
    block_size: Positive = 1  # tokens in a block
    all_kv_heads: Count = 0  # of all ranks


PASSED = -1  # in a table, in place of a block behind its window, which has another owner


def owned(table: tuple[int, ...]) -> tuple[int, ...]:
    """Blocks of a table, without those that were passed."""
    return tuple([block for block in table if block != PASSED]) if PASSED in table else table


class Windowed(NamedTuple):
    """A block whose rows are seen for a while, among those that follow each other."""

    column: int
    stop: int  # behind its last token
    window: int


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """How blocks of rows follow each other in a table: again and again for so many tokens, each at
    the first token whose rows it holds."""

    num_tokens: int
    starts: tuple[int, ...] = (0,)
    windowed: tuple[Windowed, ...] = ()  # of them

    def count(self, num_tokens: int) -> int:
        """Blocks for so many tokens."""
        whole, rest = divmod(num_tokens, self.num_tokens)
        return whole * len(self.starts) + bisect_left(self.starts, rest)

    def room(self, num_blocks: int) -> int:
        """Tokens that have room in so many blocks."""
        whole, rest = divmod(num_blocks, len(self.starts))
        return whole * self.num_tokens + self.starts[rest]

    def num_full(self, num_tokens: int) -> int:
        """The first blocks that are full when so many tokens are computed, none of them behind one
        that is not."""
        return num_tokens // self.num_tokens * len(self.starts)

    def num_windowed(self, num_blocks: int) -> int:
        """Of the first so many blocks, those that are seen for a while."""
        whole, rest = divmod(num_blocks, len(self.starts))
        return whole * len(self.windowed) + sum(one.column < rest for one in self.windowed)

    def behind(self, num_tokens: int, first: int = 0) -> Iterator[int]:
        """Places of blocks that no token behind the first `num_tokens` sees, up to one that is
        seen; of those that are seen for a while, without the `first` ones."""
        for at in itertools.count(first) if self.windowed else ():
            unit, index = divmod(at, len(self.windowed))
            _, stop, window = self.windowed[index]
            if unit * self.num_tokens + stop + window > num_tokens + 1:
                return
            yield self.place(at)

    def place(self, at: int) -> int:
        """In a table, of one of those that are seen for a while."""
        unit, index = divmod(at, len(self.windowed))
        return unit * len(self.starts) + self.windowed[index].column

    def live(self, reach: int) -> int:
        """Of those that are seen for a while, as many as `reach` tokens in a row see, at most."""
        tokens = 0
        for column, stop, window in self.windowed:
            size = stop - self.starts[column]
            tokens += size * (1 - (2 - window - reach) // size)
        return tokens // self.num_tokens

    def needed(self, num_tokens: int, reach: int) -> int:
        """Blocks of a sequence of so many tokens, if `reach` are computed at a time."""
        total = self.count(num_tokens)
        num_windowed = self.num_windowed(total)
        return total - num_windowed + min(num_windowed, self.live(reach))


class KvLayout(Record):
    """Shape of one KV block, `[num_layers, num_parts, block_size, num_kv_heads, head_dim]` of
    `dtype`, and what a sequence has besides: `tensors`, in blocks at the head of its table.  Where
    rows have several `kinds`, each has blocks of its own, and `block_size` is a multiple of all."""

    num_layers: Heads
    block_size: Positive
    num_kv_heads: Heads
    head_dim: Positive
    dtype: Name
    block_nbytes: Positive
    max_layer_groups: Heads = 4  # `engine.kv_layer_groups`: both ends of a transfer agree on it
    first_kv_head: Count = 0  # of those here, by its place in the model: a rank has a part of them
    num_parts: Positive = 2  # keys and values; 1: a latent row that both are made of
    tensors: tuple[StateTensor, ...] = ()
    ranks: Ranks = ()  # of a group: each rank's first head, and how many
    # Of a group whose model has tensors: the first of the heads here that these are of; each rank's
    # first, and how many; and the tensors of all heads.
    first_state_head: Count = 0
    state_ranks: Ranks = ()
    all_tensors: tuple[StateTensor, ...] = ()
    most_state_blocks: Count = 0  # as many at each rank as one needs, and as come from other groups
    kinds: tuple[RowKind, ...] = ()  # of its rows, if several; the numbers above are of the first

    def __post_init__(self) -> None:
        """Raises ValueError unless its heads and tensors can be counted."""
        if any(tensor.piece_nbytes > self.block_nbytes for tensor in self.tensors):
            raise ValueError("a piece of a state does not fit a block")
        if self.kinds:
            layers = sorted(layer for kind in self.kinds for layer in kind.layers)
            if layers != list(range(self.num_layers)):
                raise ValueError("the kinds of rows do not share out the layers")
            if any(self.block_size % kind.block_size for kind in self.kinds):
                raise ValueError("blocks of rows do not begin together")
            if self.tensors and any(kind.window for kind in self.kinds):
                raise ValueError("a state is not kept beside rows that are seen for a while")
        for ranks in (self.ranks, self.state_ranks):
            covered = 0
            for first, count in sorted(ranks):
                if first > covered:
                    raise ValueError(f"no rank has head {covered}")
                covered = max(covered, first + count)

    @property
    def rows(self) -> RowBlocks:
        """How the blocks of all kinds follow each other, behind those of its tensors."""
        order, kinds = self._order(), self.kinds
        windowed = tuple(
            Windowed(at, start + kinds[of].block_size, kinds[of].window)
            for at, (start, of) in enumerate(order) if kinds and kinds[of].window
        )  # fmt: skip
        return RowBlocks(self.block_size, tuple(start for start, _ in order), windowed)

    def columns(self, kind: int) -> list[int]:
        """Which of the blocks of `block_size` tokens hold rows of a kind."""
        return [at for at, (_, of) in enumerate(self._order()) if of == kind]

    def _order(self) -> list[tuple[int, int]]:
        """Of blocks for `block_size` tokens: the first token of each, and its kind."""
        sizes = [kind.block_size for kind in self.kinds] or [self.block_size]
        return sorted(
            (start, kind)
            for kind, size in enumerate(sizes) for start in range(0, self.block_size, size)
        )  # fmt: skip

    @property
    def num_state_blocks(self) -> int:
        """Blocks of a sequence that hold its tensors, whatever its length."""
        return self.most_state_blocks or sum(
            -(-t.num_layers * t.num_pieces // (self.block_nbytes // t.piece_nbytes))
            for t in self.tensors
        )

    @property
    def shares(self) -> tuple[range, ...]:
        """The heads of each rank, by their place in the model."""
        own = (self.first_kv_head, self.num_kv_heads)
        return tuple(range(first, first + count) for first, count in self.ranks or (own,))

    @property
    def state_shares(self) -> tuple[range, ...]:
        """The heads of each rank whose tensors it has, by their place in the model."""
        if not self.tensors:
            return ()
        own = (0, max(tensor.num_heads for tensor in self.tensors))
        return tuple(range(first, first + count) for first, count in self.state_ranks or (own,))

    def state_parts(self, heads: range) -> list[tuple[range, int]]:
        """What belongs to these heads, by their place in the model. Of each part of each tensor:
        the range among its own heads, by their place here, and the bytes of one."""
        total, found = max(share.stop for share in self.state_shares), []
        for tensor in self.all_tensors or self.tensors:
            for count, nbytes in zip(tensor.counts, tensor.nbytes_each, strict=True):
                first = self.first_state_head * count // total
                start, last = (at * count // total - first for at in (heads.start, heads.stop - 1))
                found.append((range(start, last + 1), nbytes))
        return found

    def state_nbytes(self, heads: range) -> int:
        return sum(len(own) * nbytes for own, nbytes in self.state_parts(heads))

    @property
    def whole(self) -> KvLayout:
        """The layout at an instance of one rank: equal where KV can be exchanged. The ends of a
        room count its bytes, however their ranks share them. Of several kinds: by groups that share
        heads alike, or whose ranks have all heads."""
        if not self.ranks or any(k.num_kv_heads != k.all_kv_heads for k in self.kinds):
            return msgspec.structs.replace(self, most_state_blocks=0)
        num_heads = max(share.stop for share in self.shares)
        return msgspec.structs.replace(
            self,
            num_kv_heads=num_heads,
            block_nbytes=self.block_nbytes // self.num_kv_heads * num_heads,
            first_kv_head=0,
            tensors=self.all_tensors or self.tensors,
            ranks=(),
            first_state_head=0,
            state_ranks=(),
            all_tensors=(),
            most_state_blocks=0,
        )

    @property
    def slots_per_block(self) -> int:
        """Groups of layers that are sent one by one (`scheduling/kv_order.py`), all as large."""
        if self.kinds:
            return 1
        most = min(self.max_layer_groups, self.num_layers)
        return next(n for n in range(most, 0, -1) if self.num_layers % n == 0)

    @property
    def layers_per_slot(self) -> int:
        return self.num_layers // self.slots_per_block

    @property
    def slot_nbytes(self) -> int:
        return self.block_nbytes // self.slots_per_block


def num_parts_of(producer: KvLayout, consumer: KvLayout, rank: int) -> int:
    """Into how many a slot of the consumer's rank is cut for this producer."""
    by_head = is_cut(cells(producer.shares, consumer.shares))
    return len(consumer.shares[rank]) if by_head else 1


def state_runs(producer: KvLayout, consumer: KvLayout, rank: int) -> Iterator[tuple[Cell, range]]:
    """What comes to a rank of a state, and where: in slots as they are cut for this producer."""
    num_heads = len(consumer.shares[rank])
    slot_nbytes = consumer.slot_nbytes // consumer.num_kv_heads * num_heads
    found = cells(producer.state_shares, consumer.state_shares)
    to_it = [cell for cell in found if cell.consumer == rank]
    share = consumer.state_shares[rank]
    sizes = [consumer.state_nbytes(share[cell.target.start : cell.target.stop]) for cell in to_it]
    fine = runs(sizes, slot_nbytes // num_parts_of(producer, consumer, rank))
    yield from zip(to_it, fine, strict=True)


def blocks_of_runs(producer: KvLayout, consumer: KvLayout) -> int:
    """Blocks that a state takes up at the consumer while it comes from such ranks."""
    needed = 0
    for rank in range(len(consumer.shares)):
        *_, (_, last) = state_runs(producer, consumer, rank)
        num_slots = consumer.slots_per_block * num_parts_of(producer, consumer, rank)
        needed = max(needed, -(-last.stop // num_slots))
    return needed
