"""The engines that the roles of a group's leader see: like any other, of all ranks.

Theory of operation
-------------------
A step, or a batch of images, is a command to all ranks (`group`).

A batch that would hold up streams has *turns*.  Each is a command, so all ranks let in the steps
that the leader gives between two of them.  No two ranks can launch a step and the joining of rows
in another order.  A turn is given when all ranks have begun the one before, so that one slice is
ahead of the devices, as it is on one device (`engine/device/slices.py`).  A batch behind it is
begun when its last turn is given, so that the devices do not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Protocol

from epd.engine.base import (
    AdapterParts,
    EncodeFailure,
    LanguageEngine,
    OnLayers,
    Patches,
    Rows,
    StepResult,
    VisionEngine,
)
from epd.groups.asks import OtherRanks, ReadAdapter, of_all
from epd.groups.leader import Batch, ChangeAdapters, Encode, GoOn, Leader, Step

Encoded = list[Rows | EncodeFailure]
RunOwn = Callable[[Batch, OnLayers | None], Awaitable[StepResult]]


class TowerShare(Protocol):
    """The leader's share of a batch of images."""

    def num_turns(self, batch: Sequence[Patches]) -> int:
        """That the batch should have."""

    def encode(self, batch: Sequence[Patches], num_turns: int) -> Awaitable[Encoded]: ...

    def go_on(self) -> Awaitable[Encoded]:
        """A turn; the last one gives what came of the batch."""


class SharedLanguage(LanguageEngine, Protocol):
    """The leader's share of the language model."""

    def hold_adapters(
        self, wanted: Mapping[str, str], parts: AdapterParts | None = None
    ) -> Coroutine[object, None, dict[str, str]]:
        """`parts`: of all ranks."""


class GroupVisionEngine:
    """The `VisionEngine` of all ranks; the leader, whose engine is `own`, prepares all images and
    has all rows.  `share` is what it runs itself."""

    def __init__(self, own: VisionEngine, share: TowerShare, leader: Leader) -> None:
        self._own = own
        self._share = share
        self._leader = leader
        self._is_giving = asyncio.Lock()  # a batch behind it has its first turn after its last
        self.contract = own.contract
        self.max_batches = own.max_batches
        self.preprocess = own.preprocess
        self.to_host = own.to_host
        self.to_device = own.to_device
        self.copy_out = own.copy_out
        self.hold_adapters = own.hold_adapters  # which change nothing at any rank

    @property
    def patch_s(self) -> float:
        return self._own.patch_s

    @property
    def adapters(self) -> tuple[str, ...]:
        return self._own.adapters

    async def encode(self, batch: Sequence[Patches]) -> Encoded:
        num_turns = self._share.num_turns(batch)
        async with self._is_giving:
            command = Encode(list(batch), num_turns)
            over = self._leader.execute(command, lambda: self._share.encode(batch, num_turns))
            for _ in range(num_turns):
                await asyncio.gather(over, return_exceptions=True)  # all ranks wait for the turns
                over = self._leader.execute(GoOn(), self._share.go_on)
        return await over


class GroupLanguageEngine:
    """The `LanguageEngine` of all ranks; `own` is the leader's share of it, and `step` runs that.

    KV is the leader's own: what is asked of the others' is not asked of an engine (`rank_asks`).
    """

    def __init__(
        self, own: SharedLanguage, step: RunOwn, leader: Leader, others: OtherRanks
    ) -> None:
        self._own = own
        self._step = step
        self._leader = leader
        self._others = others
        self.kv_layout = own.kv_layout
        self.num_blocks = own.num_blocks
        self.row_contract = own.row_contract
        self.max_context = own.max_context
        self.kv_in_place, self.kv_memory = own.kv_in_place, own.kv_memory
        self.num_landing_blocks = own.num_landing_blocks
        self.rope_positions = own.rope_positions
        self.attach_kv, self.attach_rows = own.attach_kv, own.attach_rows
        self.lift_rows = own.lift_rows
        self.fetch_kv, self.fetch_state = own.fetch_kv, own.fetch_state
        self.land_kv, self.land_state = own.land_kv, own.land_state

    def step(self, batch: Batch, on_layers: OnLayers | None = None) -> Awaitable[StepResult]:
        """As `LanguageEngine.step`.  The leader pushes KV of all ranks: a layer is not over for it
        before it is for the others, since they meet in each."""
        return self._leader.execute(Step(list(batch)), lambda: self._step(batch, on_layers))

    @property
    def adapters(self) -> tuple[str, ...]:
        return self._own.adapters

    def hold_adapters(self, wanted: Mapping[str, str]) -> Coroutine[object, None, dict[str, str]]:
        return self._own.hold_adapters(wanted, self)

    async def read_adapter(self, digest: str, path: str) -> None:
        """At all ranks.  Raises ModelError, or EngineError of another rank."""
        ask = ReadAdapter(digest=digest, path=path)
        there = (self._others.ask(rank, ask) for rank in sorted(self._others.joined))
        await of_all([self._own.read_adapter(digest, path), *there])

    def change_adapters(self, dropped: Sequence[str], held: str) -> Awaitable[None]:
        change = partial(self._own.change_adapters, dropped, held)
        return self._leader.execute(ChangeAdapters(dropped, held), change)
