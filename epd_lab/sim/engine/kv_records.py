"""Records of tokens in blocks: each layer has its part of them, in the blocks of its kind."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import cache

from epd.engine.base import StepSequence
from epd.layouts import PASSED
from epd.messages import KvLayout
from epd_lab.sim.engine.golden import BLOCK_SIZE, NUM_LAYERS, RECORD_NBYTES
from epd_lab.sim.engine.own_memory import SimOwnMemory

BLOCK_NBYTES = BLOCK_SIZE * RECORD_NBYTES
PART_NBYTES = RECORD_NBYTES // NUM_LAYERS  # of a record in one layer
_BLOCK_WORDS = BLOCK_NBYTES // PART_NBYTES


@cache
def _columns(layout: KvLayout, layer: int) -> tuple[int, list[int], int]:
    """Tokens in a block, which of the blocks that follow each other are the layer's, and of how
    many."""
    return layout.kinds[layer].block_size, layout.columns(layer), len(layout.rows.starts)


class KvRecords(SimOwnMemory):
    """What a `LanguageEngine` has of them."""

    kv_layout: KvLayout
    _kv: memoryview
    _num_state_blocks: int

    def _place(self, layer: int, index: int) -> tuple[int, int]:
        """Of a token: which of its blocks, and the bytes before its part there."""
        if not self.kv_layout.kinds:
            return index // BLOCK_SIZE, (layer * BLOCK_SIZE + index % BLOCK_SIZE) * PART_NBYTES
        size, columns, num_columns = _columns(self.kv_layout, layer)
        unit, column = divmod(index // size, len(columns))
        return unit * num_columns + columns[column], index % size * self._nbytes_of(layer)

    @property
    def _window(self) -> int:
        return self.kv_layout.kinds[1].window if self.kv_layout.kinds else 0

    def _nbytes_of(self, layer: int) -> int:
        """Of a record, in one layer."""
        return RECORD_NBYTES if self._window and layer == 0 else PART_NBYTES

    def _blocks_of(self, table: Sequence[int], tokens: Iterable[int]) -> set[int]:
        return {table[self._place(layer, at)[0]] for at in tokens for layer in range(NUM_LAYERS)}

    def _part(self, table: Sequence[int], layer: int, index: int) -> memoryview:
        """Of a record, in memory."""
        block, offset = self._place(layer, index)
        if table[block] == PASSED:
            self.found(f"a step needs token {index}, whose block was given up")
            return memoryview(bytearray(self._nbytes_of(layer)))
        at = table[block] * BLOCK_NBYTES + offset
        return self._kv[at : at + self._nbytes_of(layer)]

    def _prefix(self, sequence: StepSequence) -> bytes:
        """The records of the tokens before it, put together from both layers."""
        table = sequence.block_table[self._num_state_blocks :]
        if not self.kv_layout.kinds:
            return self._of_one_kind(table)[: sequence.start * RECORD_NBYTES]
        if self._window:
            return self._seen(sequence, table)
        return b"".join(
            self._part(table, layer, index)
            for index in range(sequence.start)
            for layer in range(NUM_LAYERS)
        )

    def _seen(self, sequence: StepSequence, table: Sequence[int]) -> bytes:
        """The second layer's copies are compared as far as its window reaches."""
        records = [bytes(self._part(table, 0, index)) for index in range(sequence.start)]
        for index in range(max(0, sequence.start + 1 - self._window), sequence.start):
            copy = bytes(self._part(table, 1, index))
            if copy != records[index][:PART_NBYTES]:
                self.found(
                    f"{sequence.request_id}: KV of another text in its window, token {index}"
                )
                records[index] = copy + records[index][PART_NBYTES:]
        return b"".join(records)

    def _of_one_kind(self, table: Sequence[int]) -> bytes:
        views = (self._kv[block * BLOCK_NBYTES : (block + 1) * BLOCK_NBYTES] for block in table)
        words = array("Q", b"".join(views))
        records = array("Q", bytes(len(words) * 8))
        for token in range(BLOCK_SIZE):
            for layer in range(NUM_LAYERS):
                place = layer * BLOCK_SIZE + token
                records[token * NUM_LAYERS + layer :: _BLOCK_WORDS] = words[place::_BLOCK_WORDS]
        return records.tobytes()

    def _store(self, sequence: StepSequence, records: list[bytes], last_layer: int) -> None:
        """Each layer's part of them, up to this layer, at the places of the chunk's tokens."""
        table = sequence.block_table[self._num_state_blocks :]
        for index, record in enumerate(records, sequence.start):
            for layer in range(last_layer + 1):
                first = 0 if self._window else layer * PART_NBYTES
                part = record[first : first + self._nbytes_of(layer)]
                self._part(table, layer, index)[:] = part
