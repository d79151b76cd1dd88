"""One rank's share of an engine, and the calls in which the ranks of a group meet.

Theory of operation
-------------------
A group is one instance of several ranks (tensor parallelism).  Every rank is one process with one
device; each builds its engines with its own `Shard` and is given the same batches in the same
order.  So all ranks enter the same collectives in the same order, and nothing else is agreed on:
tokens are sampled on rank 0 and broadcast.  On a GPU a collective is queued on the current stream
like any kernel; nothing here waits for the device, so a step with collectives can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import distributed

from epd.config import ConfigError
from epd.engine.base import part


class Collectives:
    """Calls that every rank of a group enters, in one order, with equal shapes; here of a group of
    one."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks; `x` is overwritten."""
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The tensors of all ranks, joined along `dim` in order of rank."""
        return x

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """The tensor of one rank, in place."""
        return x


class ProcessGroupCollectives(Collectives):
    """Those of torch.distributed: NCCL between GPUs, gloo between CPUs."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        distributed.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self._group.size())]
        distributed.all_gather(parts, x, group=self._group)
        return torch.cat(parts, dim)

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        distributed.broadcast(x, group=self._group, group_src=source)
        return x


@dataclass(frozen=True, slots=True)
class Shard:
    rank: int
    size: int
    collectives: Collectives

    @property
    def group(self) -> list[Shard]:
        return [replace(self, rank=rank) for rank in range(self.size)]

    def least(self, number: int, device: str) -> int:
        """The smallest number that a rank has; waits for the device."""
        own = torch.tensor([number], device=device)
        return int(self.collectives.all_gather(own, 0).min())


WHOLE = Shard(0, 1, Collectives())


@dataclass(frozen=True, slots=True)
class Heads:
    """Those of a rank, by their place in the model."""

    queries: range
    kv: range

    @classmethod
    def of(cls, shard: Shard, num_heads: int, num_kv_heads: int, kind: str = "attention") -> Heads:
        """Raises ConfigError where a rank would have none."""
        rank, size = shard.rank, shard.size
        if size > num_heads:
            raise ConfigError(
                f"the model has {num_heads} {kind} heads, which {size} ranks cannot share; use "
                f"{num_heads} ranks at most"
            )
        group = num_heads // num_kv_heads
        if size <= num_kv_heads:
            kv = part(num_kv_heads, rank, size)
            return cls(range(kv.start * group, kv.stop * group), kv)
        head = rank * num_kv_heads // size
        holders = [r for r in range(size) if r * num_kv_heads // size == head]
        own = part(group, holders.index(rank), len(holders))
        first = head * group
        return cls(range(first + own.start, first + own.stop), range(head, head + 1))
