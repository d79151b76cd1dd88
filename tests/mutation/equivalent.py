"""Mutants that no test can catch, because nothing that anybody may rely on is different: why not.

The names hold the function and the text, so they outlive changes elsewhere.
"""

from __future__ import annotations

ITS_OWN_PLACE = "the first slot behind the whole blocks is at the same place either way"
IN_THE_KEY_BEFORE = "what stands before a block is in the key of the block before it already"
REASONS: dict[str, dict[str, str]] = {
    "epd/fsm/outgoing.py": {
        "Outgoing.__init__: 0 in self.part_nbytes = 0 -> 1": "every write sets it when it begins"
    },
    "epd/scheduling/batching.py": {
        "StepBounds: 0 in min_partial_tokens: int = 0 -> 1": "nothing due is nothing to compute",
        "BatchScheduler.__init__: 0 in self._first_decode = 0 -> 1": "the round begins anywhere",
        "BatchScheduler._decodes: len(decodes) > budget -> len(decodes) >= budget": (
            "whoever fits is in the step, whichever comes first in it"
        ),
        "BatchScheduler._decodes: start + budget -> start - budget": "the round the other way",
        "BatchScheduler._has_place: if self.num_running < max_running: ... -> pass": (
            "a shortcut: fewer have a place than run"
        ),
    },
    "epd/scheduling/kv_order.py": {
        "KvOrder._place: behind < 0 -> behind <= 0": ITS_OWN_PLACE,
        "KvOrder._place: 0 in behind < 0 -> 1": ITS_OWN_PLACE,
    },
    "epd/scheduling/snapshots.py": {
        "Snapshots.take: taken is None and found -> taken is None": (
            "without anything found the same is asked once more"
        )
    },
    "epd/roles/compose.py": {
        "Instance._info: self.prefill is not None and language is not None ->"
        " self.prefill is not None": "who prefills has a language model"
    },
    "epd/scheduling/placement.py": {
        "place: prefills[0] -> prefills[-1]": "there is one",
        "place: decodes[0] -> decodes[-1]": "there is one",
        "weight: hashlib.blake2b(f'{mm_hash}/{instance_id}'.encode(), digest_size=8) ->"
        " hashlib.blake2b(f'{mm_hash}/{instance_id}'.encode())": "another order by chance",
    },
    "epd/scheduling/prefix_keys.py": {
        "PrefixKeys._key: item.offset < start + self._block_size and start < item.end ->"
        " item.offset < start + self._block_size": IN_THE_KEY_BEFORE,
        "PrefixKeys._key: start < item.end -> start <= item.end": IN_THE_KEY_BEFORE,
    },
    "epd/scheduling/speculation.py": {
        "PromptLookup._copy: 1 in self._shortest - 1 -> 2": "of a shorter suffix nothing is noted"
    },
    "epd/scheduling/step_cost.py": {
        "Measured.observe: num_seen > MIN_SEEN -> num_seen >= MIN_SEEN": (
            "a sum of powers of KEPT is no whole number"
        ),
        "Measured.is_sure: self._sums[0] > MIN_SEEN -> self._sums[0] >= MIN_SEEN": (
            "a sum of powers of KEPT is no whole number"
        ),
        "StepCost.__init__: 0 -> 1": "prompts have more at least",
        "Measured.observe: 0.0 < STALL * elapsed_s < min(usual_s) -> "
        "0.0 < STALL * elapsed_s <= min(usual_s)": "a bound that is hit by chance",
        "Line.fitted: spread > n * n * MIN_VARIANCE -> spread >= n * n * MIN_VARIANCE": (
            "a bound that is hit by chance"
        ),
    },
    "epd/roles/gateway/role.py": {
        "GatewayRole.admit: self._serial += 1 -> self._serial -= 1": "any new number serves",
    },
}
EQUIVALENT = {
    f"{path}:{name}": why for path, names in REASONS.items() for name, why in names.items()
}
