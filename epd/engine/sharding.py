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

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import distributed


class Collectives(Protocol):
    """Calls that every rank of a group enters, in the same order, with equal shapes."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        ...

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The tensors of all ranks, joined along `dim` in order of rank."""
        ...

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """The tensor of one rank, in place."""
        ...


class Alone:
    """A group of one."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        return x


class ProcessGroupCollectives:
    """Those of torch.distributed: NCCL between GPUs, gloo between CPUs."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        distributed.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        parts = x.new_empty(self._group.size(), *x.shape)
        distributed.all_gather_into_tensor(parts, x.contiguous(), group=self._group)
        return torch.cat(parts.unbind(), dim)

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        distributed.broadcast(x, group=self._group, group_src=source)
        return x


@dataclass(frozen=True, slots=True)
class Shard:
    """Which rank of how many this process is."""

    rank: int
    size: int
    collectives: Collectives

    def part(self, total: int) -> range:
        """This rank's of so many things in a row; parts differ by one at most."""
        return range(total * self.rank // self.size, total * (self.rank + 1) // self.size)


WHOLE = Shard(0, 1, Alone())
