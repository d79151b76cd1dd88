"""What instances died of, asked by generation: the gateway's view of `scheduling/deaths.py`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

from epd.failure import Failure, FailureKind
from epd.fsm.generation import Generation
from epd.records import Address, SamplingParams
from epd.roles.base import Actor
from epd.roles.gateway.registry import Registry
from epd.scheduling.deaths import Deaths, Life


def content_of(
    token_ids: Iterable[int],
    hashes: Iterable[str],
    sampling: SamplingParams,
    scope: str,
    adapter: str = "",
) -> str:
    """What a request asks for, as one key; its seed may be the gateway's own."""
    asked = repr((scope, adapter, tuple(token_ids), tuple(hashes), sampling.seedless()))
    return "prompt " + hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()


class Suspects:
    """Nothing is computed for a question while nothing has died."""

    def __init__(
        self,
        actor: Actor,
        registry: Registry,
        silent: Callable[[], Iterable[str]],
        heartbeat_interval_s: float,
    ) -> None:
        self._registry = registry
        self._silent = silent
        self.deaths = Deaths(actor.clock.now_s, self._is_silent, 2 * heartbeat_interval_s)

    def _is_silent(self, life: Life) -> bool:
        return life[0] in self._silent() or self._registry.is_silent(*life)

    def content(self, machine: Generation) -> str:
        """What deaths of its prompt are counted by."""
        prompt = machine.prompt
        hashes = (item.mm_hash for item in prompt.items)
        asked = prompt.sampling, prompt.scope, prompt.adapter.digest
        return content_of(prompt.token_ids, hashes, *asked)

    def is_suspect(self, machine: Generation) -> bool:
        """Whether an instance died of its prompt, or may have."""
        deaths = self.deaths
        return deaths.has_doubts and (
            bool(deaths.lives(self.content(machine))) or deaths.is_suspect(machine.key)
        )

    def is_barred(self, machine: Generation) -> bool:
        """Whether no instance may take it now."""
        deaths = self.deaths
        return deaths.has_doubts and (
            deaths.is_barred(self.content(machine), machine.key)
            or any(deaths.is_barred(item.mm_hash) for item in machine.prompt.items)
        )

    def barred(self, mm_hash: str, encoders: Iterable[Address]) -> Iterator[str]:
        """Those that may not take this image now."""
        for one in encoders:
            if self.deaths.is_barred(mm_hash, life=(one.instance_id, one.epoch)):
                yield one.instance_id

    def poison_of(self, machine: Generation) -> Failure | None:
        """Why no instance may take it any more."""
        if not self.deaths:
            return None
        hashes = [item.mm_hash for item in machine.prompt.items]
        for key in (self.content(machine), *hashes):
            if self.deaths.is_poison(key):
                what = f"image {key}" if key in hashes else "this request"
                names = named(self.deaths.lives(key))
                return Failure(FailureKind.POISON, f"{names} died while they computed {what}")
        return None


def named(lives: Iterable[Life]) -> str:
    return " and ".join(f"{name}:{epoch}" for name, epoch in lives)
