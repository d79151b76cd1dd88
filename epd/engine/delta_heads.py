"""The heads of gated delta-net layers, and how ranks share them.

Theory of operation
-------------------
A value head has a matrix of its own and reads queries and keys of a key head, which several value
heads share.  So value heads are shared out as query heads of attention are: each stays with its key
head, and uneven counts give uneven shares.  With fewer key heads than ranks, several ranks compute
the same queries and keys.  The convolution mixes no channels: a rank has those of its heads.  What
a rank keeps of a sequence is that of its heads, too.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from epd.engine.sharding import WHOLE, Heads, Shard


class DeltaHeads(NamedTuple):
    num_keys: int
    num_values: int
    key_width: int
    value_width: int

    def of(self, shard: Shard) -> Heads:
        """A rank's value heads (`queries`) and key heads (`kv`).  Raises ConfigError if it has
        none."""
        return Heads.of(shard, self.num_values, self.num_keys, "linear attention")

    def parts(self, shard: Shard = WHOLE) -> tuple[tuple[int, int], ...]:
        """Of queries, keys and values, side by side in channels: how many heads, and their
        width."""
        own = self.of(shard)
        keys, values = (len(own.kv), self.key_width), (len(own.queries), self.value_width)
        return keys, keys, values

    def channels(self, shard: Shard) -> tuple[range, ...]:
        """A rank's, by their place in the model."""
        own, kept, at = self.of(shard), [], 0
        for heads, (count, width) in zip((own.kv, own.kv, own.queries), self.parts(), strict=True):
            kept.append(range(at + heads.start * width, at + heads.stop * width))
            at += count * width
        return tuple(kept)

    def resize(self, net: nn.Module, shard: Shard) -> None:
        """Give a layer of transformers the sizes of a rank's part of its weights."""
        keys, _, values = self.parts(shard)
        net.num_k_heads, net.num_v_heads = keys[0], values[0]
        net.key_dim, net.value_dim = keys[0] * keys[1], values[0] * values[1]
        net.conv_dim = 2 * net.key_dim + net.value_dim
        convolution = net.conv1d
        convolution.in_channels = convolution.out_channels = convolution.groups = net.conv_dim
