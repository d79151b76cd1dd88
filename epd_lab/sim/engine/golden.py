"""The simulated model as a pure function, for the right bytes and the right tokens.

A key-value record of 16 bytes stands for one token's KV: 12 bytes that depend on every token, every
embedding row and every rope position before it, and its index.  The next token depends on all
records, so one wrong, missing or swapped record changes the answer, and on all that the request's
sampling reads (`sampler.py`).  A model with a state (`STATE_LAYOUT`) keeps running hashes of all
records besides: one of each head, which the ranks of a group share.  A row of 32 bytes stands for
an embedding: its first half for the main embedding, its second for deepstack; both depend on the
image and the row's index.  An adapter changes every record.

What is right is computed from the request alone, in one place and in one go: no block, no chunk, no
engine and no message is part of it.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from epd.engine.base import MediaLayout, RopePositions
from epd.layouts import RowKind
from epd.messages import KvLayout, RowContract, SamplingParams, StateTensor, TokenLogprobs
from epd_lab.sim.engine.sampler import Past, sample, score_of

RECORD_NBYTES = 16
BLOCK_SIZE = 4
IMAGE_TOKEN = 7
ROW_NBYTES = 32

NUM_LAYERS = 2  # a record's first half is the KV of the first layer, its second half of the second
KV_LAYOUT = KvLayout(
    num_layers=NUM_LAYERS,
    block_size=BLOCK_SIZE,
    num_kv_heads=1,
    head_dim=1,
    dtype="float32",
    block_nbytes=BLOCK_SIZE * RECORD_NBYTES,
)
# Each layer's rows in blocks of their own; those of the second one are half as full.
KINDS_LAYOUT = msgspec.structs.replace(
    KV_LAYOUT,
    block_size=2 * BLOCK_SIZE,
    kinds=tuple(
        RowKind(layers=(layer,), num_kv_heads=1, head_dim=1, block_size=size * BLOCK_SIZE)
        for layer, size in ((0, 2), (1, 1))
    ),
)


def layout_with(window: int) -> KvLayout:
    """The first layer has whole records; the second, copies of their first halves, of which it sees
    so many of the last."""
    kinds = tuple(
        RowKind(layers=(layer,), num_kv_heads=1, head_dim=1, block_size=size, window=seen)
        for layer, size, seen in ((0, BLOCK_SIZE, 0), (1, BLOCK_SIZE // 2, window))
    )
    return msgspec.structs.replace(KV_LAYOUT, kinds=kinds)


NUM_HEADS = 7  # of a state
STATE_NBYTES = 16  # of each
_HASH_NBYTES = 4
STATE_LAYOUT = msgspec.structs.replace(
    KV_LAYOUT,
    tensors=(
        StateTensor(
            name="hash",
            num_layers=1,
            num_pieces=NUM_HEADS,
            shape=(STATE_NBYTES,),
            dtype="uint8",
            piece_nbytes=STATE_NBYTES,
        ),
    ),
)
NUM_STATE_BLOCKS = STATE_LAYOUT.num_state_blocks  # of one rank; others have no more
ROW_CONTRACT = RowContract(hidden=4, row_width=8, num_deepstack=1, dtype="float32", row_nbytes=32)


def contract_of(max_uncut: int) -> RowContract:
    return msgspec.structs.replace(ROW_CONTRACT, max_uncut=max_uncut)


@dataclass(frozen=True, slots=True)
class Image:
    """The simulator's data of an image; `flaw` is "", "broken", "unencodable" or "slow".  An
    adapter that changes the tower changes every row; the file has nothing of it."""

    name: str
    grid_thw: tuple[int, int, int] = (1, 4, 4)
    flaw: str = ""
    adapter: str = ""

    @property
    def num_rows(self) -> int:
        t, h, w = self.grid_thw
        return t * h * w // 4

    @property
    def pixels_nbytes(self) -> int:
        t, h, w = self.grid_thw
        return 3 * t * h * w

    def image(self) -> bytes:
        """Its compressed file."""
        t, h, w = self.grid_thw
        return f"picture|{self.name}|{t}|{h}|{w}|{self.flaw}".encode()

    @staticmethod
    def parse(image: bytes) -> Image:
        """Raises ValueError on anything else than an image."""
        kind, name, t, h, w, flaw = image.decode().split("|")
        if kind != "picture":
            raise ValueError("not an image")
        return Image(name, (int(t), int(h), int(w)), flaw)

    def rows(self) -> bytes:
        return b"".join(self.row(index) for index in range(self.num_rows))

    def row(self, index: int) -> bytes:
        content = f"{self.name}{self.adapter}/{index}".encode()
        return hashlib.blake2b(content, digest_size=ROW_NBYTES).digest()


def record(previous: bytes, index: int, token_id: int, rope: int, row: bytes) -> bytes:
    """The KV record of one token, from the record before it."""
    content = previous[:12] + struct.pack("<iq", token_id, rope) + row
    return hashlib.blake2b(content, digest_size=12).digest() + struct.pack("<I", index)


def state(previous: bytes, records: bytes, head: int) -> bytes:
    """One head's running hash, from the hash before these records; of none, if it is empty."""
    before = int.from_bytes(previous[:_HASH_NBYTES], "little") if previous else head + 1
    hashed = zlib.crc32(records, before).to_bytes(_HASH_NBYTES, "little")
    return hashed * (STATE_NBYTES // _HASH_NBYTES)  # a part of it is none


def rope_positions(num_tokens: int, items: Sequence[MediaLayout]) -> RopePositions:
    """Three axes; an image advances them by its longer side only, as the Qwen families do."""
    if not items:
        return RopePositions(None, 0)
    axes: tuple[list[int], list[int], list[int]] = ([], [], [])
    starts = {item.offset: item for item in items}
    at = position = 0
    while at < num_tokens:
        item = starts.get(at)
        if item is None:
            for axis in axes:
                axis.append(position)
            at, position = at + 1, position + 1
            continue
        width = max(1, item.grid_thw[2] // 2)
        for row in range(item.num_rows):
            axes[0].append(position)
            axes[1].append(position + row // width)
            axes[2].append(position + row % width)
        at += item.num_rows
        position += max(width, item.grid_thw[1] // 2, 1)
    return RopePositions(axes, position - num_tokens)


def rope_key(axes: Sequence[Sequence[int]], at: int) -> int:
    """The three positions of one token as one number."""
    return int(axes[0][at]) + (int(axes[1][at]) << 20) + (int(axes[2][at]) << 40)


def linear_key(position: int) -> int:
    return position + (position << 20) + (position << 40)


@functools.lru_cache(maxsize=4096)
def answer(
    token_ids: tuple[int, ...],
    images: tuple[tuple[int, Image], ...],
    sampling: SamplingParams,
    adapter: str = "",
) -> tuple[TokenLogprobs, ...]:
    """All output tokens, the ending one included, of a prompt with images at these offsets, with
    the log-probabilities that were asked for."""
    layouts = [MediaLayout(at, p.num_rows, p.grid_thw) for at, p in images]
    rope = rope_positions(len(token_ids), layouts)
    rows = {at + r: p.row(r) for at, p in images for r in range(p.num_rows)}
    kv, last, changed = bytearray(), b"", adapter.encode()
    scores: list[TokenLogprobs] = []
    for index, token_id in enumerate(token_ids):
        if index and sampling.num_prompt_logprobs >= 0:
            scores.append(score_of(last, token_id))
        key = linear_key(index) if rope.positions is None else rope_key(rope.positions, index)
        last = record(last, index, token_id, key, rows.get(index, b"") + changed)
        kv += last
    output: list[TokenLogprobs] = []
    output_ids: list[int] = []
    while len(output) < sampling.max_tokens:
        past = Past(bytes(kv), len(output), token_ids, output_ids)
        token = sample(past, sampling)
        output.append(token)
        output_ids.append(token.token_id)
        if token.token_id in sampling.stop_token_ids:
            break
        index = len(token_ids) + len(output) - 1
        last = record(last, index, token.token_id, linear_key(index + rope.delta), changed)
        kv += last
    if scores:
        output[0] = output[0].with_prompt(tuple(scores))
    return tuple(output)
