"""Names for the contents of KV blocks: what a block holds, and all that stands before it.

Theory of operation
-------------------
The KV of a token depends on every token and every embedding row before it, and on rope positions,
which follow from both.  So the key of a block is a hash of the key of the block before it, of its
own token ids, and of each image with rows in it.  An image counts by its `mm_hash` (content,
processor, model, tenant) and its beginning, from the block's first token.  Two images of one size
have the same placeholders and never the same key; nor has one image in two places.

The first key also depends on the adapter, which changes every key and value behind it, by its
digest, and on the scope of who asks (`epd/api/http/identity.py`).  So under
`cache_scope` "tenant" two tenants never share a block, even for equal texts: the time to a first
token shows neither the other's prompts (fault F53).  A look-up has to name a scope; there is no way
to look into all of them.

Only full blocks have keys.  A key has 128 bits of BLAKE2b: nobody meets a collision by chance, and
to make one on purpose is as hard as 2^64 hashes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from epd.layouts import RowBlocks
from epd.scheduling.block_pool import Key

DIGEST_NBYTES = 16


class Placed(Protocol):
    """An image or video in a text: its content, where its rows begin, and where they end."""

    @property
    def mm_hash(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def end(self) -> int: ...


def of_blocks(keys: Sequence[Key], rows: RowBlocks) -> Sequence[Key]:
    """Of each block, where several hold rows of the same tokens."""
    count = len(rows.starts)
    return [key + bytes([at]) for key in keys for at in range(count)] if count > 1 else keys


class PrefixKeys:
    """The keys of one text's full blocks, made as it grows."""

    __slots__ = ("_adapter", "_block_size", "_items", "_scope", "keys")

    def __init__(
        self, block_size: int, items: Sequence[Placed], scope: str, adapter: str = ""
    ) -> None:
        """`items`: the text's images in order of their offsets; `scope`: of who asks; `adapter`:
        its digest, or empty."""
        self._scope = scope
        self._adapter = adapter
        self._block_size = block_size
        self._items = items
        self.keys: list[Key] = []

    def extend(self, tokens: Callable[[int, int], Sequence[int]], num_tokens: int) -> list[Key]:
        """Keys of all full blocks of `num_tokens` tokens; `tokens(start, stop)` gives their ids."""
        size = self._block_size
        for start in range(len(self.keys) * size, num_tokens - size + 1, size):
            self.keys.append(self._key(start, tokens(start, start + size)))
        return self.keys[: num_tokens // size]

    def _key(self, start: int, token_ids: Sequence[int]) -> Key:
        before = self.keys[-1] if self.keys else self._root()
        digest = hashlib.blake2b(before, digest_size=DIGEST_NBYTES)
        digest.update(array("q", token_ids).tobytes())
        for item in self._items:
            if item.offset < start + self._block_size and start < item.end:
                digest.update(f"{item.mm_hash}@{item.offset - start}".encode())
        return digest.digest()

    def _root(self) -> bytes:
        return hashlib.sha256(f"{self._scope}\0{self._adapter}".encode()).digest()
