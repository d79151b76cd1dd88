"""In which order the KV of a prompt is sent while it is computed.

Theory of operation
-------------------
A KV block is contiguous over its layers and is cut into *slots*, one per group of layers; a slot is
what a write fills (`KvLayout.slots_per_block`).  Slot `block * slots_per_block + group`, with
`block` counted in the prompt, is a *place*.

KV becomes final in two ways.  When a chunk of the prompt has been computed, all blocks that it
filled are final, whole.  While the last chunk is computed, what is left becomes final layer by
layer, in all of its blocks at once.  So the blocks that were full before the last chunk are sent
first, one after the other; then, group by group, the slots of the blocks behind them.  What the
receiver holds already comes before all of that and is not sent.  Blocks of the sequence's state,
which every token changes, come behind all of it: they are counted behind those of the prompt, and
final with its last token.  How much can be sent is then one number, and so is how much has been.

Both ends compute the order from four numbers; one of them, `num_whole`, the sender alone has: it
travels in the commit.

Of layers with a window only those blocks are counted that the next token sees (`moved`).  The
receiver may have any of them, not only the first ones: its grant names them.

Source: layer-wise KV transfer of Mooncake's and vLLM's connectors, over chunked prefill.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from epd.layouts import RowBlocks


@lru_cache(maxsize=64)  # both ends count it again for each part
def moved(rows: RowBlocks, num_tokens: int) -> Sequence[int]:
    """Blocks of a prompt of so many tokens that go to who decodes it, by their place in its table:
    those that its next token sees."""
    places, behind = range(rows.count(num_tokens)), set(rows.behind(num_tokens))
    return tuple([place for place in places if place not in behind]) if behind else places


def held_first(places: Sequence[int], held: Sequence[int]) -> Sequence[int]:
    """In the order in which they are counted: those that the receiver has, then the others."""
    if not held:
        return places
    known = set(held)  # which a peer has told: of what else is in it nothing is sent
    return (*filter(known.__contains__, places), *(at for at in places if at not in known))


@dataclass(frozen=True, slots=True)
class KvOrder:
    """Counts are of blocks of the prompt: `num_held <= num_whole <= num_blocks`."""

    num_held: int  # the first ones: the receiver has them
    num_whole: int  # up to here blocks are sent whole; those behind by groups of layers
    num_blocks: int
    slots_per_block: int
    num_state_blocks: int = 0  # behind them

    @property
    def num_slots(self) -> int:
        """All that is sent."""
        num_blocks = self.num_blocks - self.num_held + self.num_state_blocks
        return num_blocks * self.slots_per_block

    def num_ready(self, num_groups: int) -> int:
        """Slots that can be sent when so many groups of the last chunk are computed."""
        whole = (self.num_whole - self.num_held) * self.slots_per_block
        return whole + num_groups * (self.num_blocks - self.num_whole)

    def places(self, start: int, stop: int) -> list[int]:
        """What is sent as the `start`th to the last before the `stop`th slot."""
        return list(chain.from_iterable(self._runs(start, stop)))

    def _runs(self, start: int, stop: int) -> Iterator[range]:
        """They are thousands, and both ends count them on their loops: so not one by one."""
        size, first = self.slots_per_block, self.num_held * self.slots_per_block
        layers, state = (n * size - first for n in (self.num_whole, self.num_blocks))  # begin here
        yield range(first + start, first + min(stop, layers))
        num_behind, at = self.num_blocks - self.num_whole, max(start, layers)
        while at < min(stop, state):
            group, block = divmod(at - layers, num_behind)
            end = min(stop, at + num_behind - block)
            blocks = range(self.num_whole + block, self.num_whole + block + end - at)
            yield range(blocks.start * size + group, blocks.stop * size + group, size)
            at = end
        yield range(first + max(start, state), first + stop)
