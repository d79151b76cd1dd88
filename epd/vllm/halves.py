"""What the connector decides, without a line of vLLM: the halves of `connector.py`.

The law
-------
What vLLM's scheduler was promised must be in its worker's hands when a step begins, with as many
rows as the prompt has places: anything else ends the whole engine.  So a promise is made of rows
that are held.  `ensure` finds all rows of a request and keeps them (`_pinned`). Within the same
scheduling pass `has` answers by these alone, and `orders` hands them to the workers by value.

Rows that are on their way defer their request, up to `defer_s`.  Rows that cannot come, or are not
as many as the prompt has places, fail that request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from epd.vllm.shelf import Shelf


class FeaturePlace(Protocol):
    offset: int
    length: int


class Feature(Protocol):
    """Of a prompt, as vLLM has it."""

    identifier: str
    data: Mapping[str, object] | None  # its processed tensors, by name
    mm_position: FeaturePlace


class EngineRequest(Protocol):
    request_id: str
    mm_features: list[Feature]

    def get_num_encoder_embeds(self, input_id: int) -> int: ...


class SchedulerHalf:
    """`encodes`: pictures that come with pixels and without rows are the engine's own work."""

    def __init__(
        self,
        shelf: Shelf,
        now_s: Callable[[], float],
        defer_s: float,
        fetch_s: float,
        *,
        encodes: bool,
    ) -> None:
        self._shelf = shelf
        self._now_s = now_s
        self._defer_s = defer_s
        self._fetch_s = fetch_s
        self._encodes = encodes
        self._pinned: dict[str, torch.Tensor] = {}  # since the last orders
        self._orders: dict[str, torch.Tensor] = {}
        self._deferred: dict[str, float] = {}  # request to since when
        self._fetching: dict[str, tuple[str, float]] = {}  # request to its KV, and since when
        self._lost: set[str] = set()

    def ensure(self, request: EngineRequest, num_computed_tokens: int) -> bool:
        """Whether all rows that it still needs are here.  Cheap: it is asked in every step."""
        needed = {}
        for index, feature in enumerate(request.mm_features):
            place = feature.mm_position
            if place.offset + place.length <= num_computed_tokens:
                continue
            rows = self._shelf.find(feature.identifier)
            if rows is not None and len(rows) == request.get_num_encoder_embeds(index):
                needed[feature.identifier] = rows
            elif rows is not None:
                return self._fail(request)
            elif self._shelf.is_coming(feature.identifier):
                return self._defer(request)
            elif not (self._encodes and _has_pixels(feature)):
                return self._fail(request)
        self._deferred.pop(request.request_id, None)
        self._pinned.update(needed)
        return True

    def _defer(self, request: EngineRequest) -> bool:
        now_s = self._now_s()
        if now_s - self._deferred.setdefault(request.request_id, now_s) > self._defer_s:
            self._fail(request)
        return False

    def _fail(self, request: EngineRequest) -> bool:
        self._deferred.pop(request.request_id, None)
        self._lost.add(request.request_id)
        return False

    def has(self, identifier: str) -> bool:
        return identifier in self._pinned

    def allocated(self, identifier: str) -> None:
        """The engine has room for it, and loads it with the next orders, or encodes it."""
        if (rows := self._pinned.get(identifier)) is not None:
            self._orders[identifier] = rows

    def orders(self) -> dict[str, torch.Tensor]:
        """Of this step; what was promised in it and not taken is promised anew in the next one."""
        orders, self._orders, self._pinned = self._orders, {}, {}
        self._shelf.num_steps += 1
        return orders

    def fetch(self, begun: Mapping[str, str], absent: frozenset[str]) -> list[str]:
        """`begun` in this step: requests, each with the name of its KV at the server that has it;
        `absent`: names of what has not come, where the step shows them.  Returns who is lost."""
        now_s, lost = self._now_s(), list[str]()
        self._fetching |= {request_id: (name, now_s) for request_id, name in begun.items()}
        for request_id, (name, since_s) in [*self._fetching.items()] if absent else []:
            if name not in absent:
                del self._fetching[request_id]
            elif now_s - since_s > self._fetch_s:
                lost.append(request_id)
                del self._fetching[request_id]
        self._lost.update(lost)
        return lost

    def take_lost(self) -> set[str]:
        lost, self._lost = self._lost, set()
        return lost

    def finished(self, request_id: str) -> None:
        self._deferred.pop(request_id, None)
        self._fetching.pop(request_id, None)
        self._lost.discard(request_id)


def _has_pixels(feature: Feature) -> bool:
    return feature.data is not None and any("pixel" in name for name in feature.data)


def load(
    orders: Mapping[str, torch.Tensor], cache: dict[str, torch.Tensor], device: torch.device
) -> None:
    """The worker's half: rows go into the engine's own cache, on its device."""
    for identifier, rows in orders.items():
        if identifier not in cache:
            cache[identifier] = rows.to(device)
