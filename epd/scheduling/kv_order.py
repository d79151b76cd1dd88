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

Source: layer-wise KV transfer of Mooncake's and vLLM's connectors, over chunked prefill.
"""

from __future__ import annotations

from dataclasses import dataclass


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
        return [self._place(index) for index in range(start, stop)]

    def _place(self, index: int) -> int:
        at = self.num_held * self.slots_per_block + index
        behind = at - self.num_whole * self.slots_per_block
        if behind < 0 or at >= self.num_blocks * self.slots_per_block:
            return at
        group, block = divmod(behind, self.num_blocks - self.num_whole)
        return (self.num_whole + block) * self.slots_per_block + group
