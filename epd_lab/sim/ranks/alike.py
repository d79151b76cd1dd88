"""Engines of models without states: none goes by heads between the ranks of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from epd.engine.base import Buffer, EngineError

_REASON = "these ranks share no heads of states"


class NoAdapters:
    """What an engine that holds none does of them."""

    adapters: tuple[str, ...] = ()

    async def hold_adapters(self, wanted: Mapping[str, str]) -> dict[str, str]:
        raise EngineError("this engine holds no adapters")

    async def read_adapter(self, digest: str, path: str) -> None:
        raise EngineError("this engine holds no adapters")

    async def change_adapters(self, dropped: Sequence[str], held: str) -> None:
        raise EngineError("this engine holds no adapters")


class AlikeRanks(NoAdapters):
    """What `LanguageEngine` does of states between ranks that share their heads otherwise."""

    async def fetch_state(
        self, blocks: Sequence[int], heads: range, *, in_place: bool
    ) -> Sequence[Buffer]:
        raise EngineError(_REASON)

    async def land_state(
        self,
        memory: Buffer,
        slots: Sequence[int],
        blocks: Sequence[int],
        pieces: Sequence[tuple[range, int]],
    ) -> None:
        raise EngineError(_REASON)
