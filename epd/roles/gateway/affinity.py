"""Conversations go back to where their KV is: the gateway's part of prefix caching.

The gateway records what it sent where, when it sends an attempt (to prefill, and to decode, which
keeps what it receives). When the attempt has ended it records the answer, too, at decode. The next
turn begins with the same blocks, and placement learns which share of them each instance most likely
holds. Keys depend on the scope of the client, so nobody is sent after another tenant's prompt. With
one instance of each kind there is nothing to choose, and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Never

from epd.fsm.generation import Generation
from epd.messages import Address
from epd.roles.base import Actor, Component
from epd.scheduling.placement import Candidate, Shares
from epd.scheduling.prefix_keys import PrefixKeys
from epd.scheduling.prefix_record import PrefixRecord

SHORT_BLOCKS = 32  # of a shorter prompt, a share is counted of so many: it is soon computed


@dataclass(slots=True)
class _Open:
    """The prompt of an open generation: its keys, and which instances held shares of it."""

    keys: PrefixKeys
    shares: Shares = field(default_factory=dict)  # that instances held when it was placed


class Affinity(Component[Never]):
    """Prompts of open generations, and the record of what was sent."""

    def __init__(self, actor: Actor) -> None:
        super().__init__(actor)
        self.record = PrefixRecord()
        self._open: dict[str, _Open] = {}
        self._num_blocks: dict[str, int] = {}  # of the instances' pools

    def live(self) -> dict[str, int]:
        return {"prefix_keys": len(self._open)}

    def peer_lost(self, peer: Address) -> None:
        self.record.forget(peer.instance_id, peer.epoch)
        self._num_blocks.pop(peer.instance_id, None)

    def shares(self, machine: Generation, candidates: Sequence[Candidate]) -> Shares:
        """Of its prompt, which part each instance most likely holds; those with none are absent."""
        if (opened := self._open.get(machine.key)) is not None:
            opened.shares = {}
        holders = [c for c in candidates if c.info.kv_layout is not None]
        choices = [[c for c in holders if role in c.roles] for role in ("prefill", "decode")]
        if all(len(choice) < 2 for choice in choices):
            return {}
        layout = holders[0].info.kv_layout
        assert layout is not None  # as the filter says
        prompt = machine.prompt
        keys = PrefixKeys(layout.block_size, prompt.items, prompt.scope, prompt.adapter.digest)
        opened = self._open[machine.key] = _Open(keys)
        self._num_blocks.update({c.instance_id: c.info.num_kv_blocks for c in holders})
        wanted = keys.extend(lambda a, b: _tokens(machine, a, b), _num_tokens(machine))
        if not wanted:
            return {}
        held = {c.instance_id: self.record.num_held(c.info.address, wanted) for c in holders}
        whole = max(len(wanted), SHORT_BLOCKS)
        opened.shares = {name: count / whole for name, count in held.items() if count}
        return opened.shares

    def share(self, machine: Generation, instance_id: str) -> float:
        """Likewise of one instance, as `shares` last found it."""
        opened = self._open.get(machine.key)
        return opened.shares.get(instance_id, 0.0) if opened is not None else 0.0

    def sent(self, machine: Generation) -> None:
        """Its present attempt went out; `shares` was asked before."""
        placement = machine.placement
        for address in dict.fromkeys((placement.prefill, placement.decode)):
            self._note(machine, address)

    def ended(self, machine: Generation) -> None:
        """The generation is over; the instance that decoded its answer has the answer's KV."""
        placement = machine.placed
        if placement is not None and machine.token_ids_of_attempt:
            self._note(machine, placement.decode)
        self._open.pop(machine.key, None)

    def _note(self, machine: Generation, address: Address) -> None:
        opened = self._open.get(machine.key)
        num_blocks = self._num_blocks.get(address.instance_id, 0)
        if opened is not None and num_blocks:
            known = opened.keys.extend(lambda a, b: _tokens(machine, a, b), _num_tokens(machine))
            self.record.note(address, known, num_blocks)


def _num_tokens(machine: Generation) -> int:
    return len(machine.prompt.token_ids) + len(machine.token_ids)


def _tokens(machine: Generation, start: int, stop: int) -> Sequence[int]:
    """Of the prompt and of what the client has already."""
    prompt = machine.prompt.token_ids
    split = len(prompt)
    chunk: list[int] = list(prompt[start:stop])
    if stop > split:
        chunk += machine.token_ids[max(0, start - split) : stop - split]
    return chunk
