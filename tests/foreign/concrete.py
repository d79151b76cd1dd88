"""Real machines from the variables of their models, and back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from epd.failure import FailureKind
from epd.fsm import child, embedding, encoding, fan_out, generation, group, offer, request
from epd.messages import TokenLogprobs
from tests.foreign.walk import Concrete, Values
from tests.fsm import tables

TOKEN = TokenLogprobs(9, 0.0)
KV = SimpleNamespace(num_tokens=2, rope_delta=0, num_cached=0, first_token=TOKEN)
PLACEMENT = SimpleNamespace(prefill=tables.PEER, decode=SimpleNamespace(instance_id="other"))
ITEMS = tables.MESSAGE.items  # rooms a and b, tokens 1 and 2 of a prompt of three


def _generation(values: Values) -> generation.Generation:
    made = generation.Generation("g", values["MAX_ATTEMPTS"], tables.LIMITS, tables.CLIENT)
    made.attempt = values["attempts"]
    made.failures = {FailureKind.LOST: values["failures"]} if values["failures"] else {}
    made.token_ids = [5] if values["said"] else []
    made.unconfirmed = {("peer", "other")[n] for n in range(values["unconfirmed"])}
    return made


def _of_generation(machine: Any) -> Values:
    return {
        "attempts": machine.attempt,
        "failures": sum(machine.failures.values()),
        "said": bool(machine.token_ids),
        "unconfirmed": len(machine.unconfirmed),
    }


def _request(values: Values) -> request.Request:
    items = ITEMS if values["IMAGES"] else ()
    message = SimpleNamespace(**vars(tables.MESSAGE) | {"items": items})
    made = request.Request("r/1", message, (1, 2, 3) if items else (1, 2))
    made.decode_here = values["DECODE_HERE"]
    made.min_early_tokens = 1 if values["BEGINS_EARLY"] else 2
    made.missing = {room for room in ("a", "b") if values[f"lacks_{room}"]}
    made.num_computed = values["computed"]
    made.steps = (request.Launched(1, False),) * values["in_flight"]
    made.output = [TOKEN] * values["output"]
    made.finish_reason = "stop" if values["said_all"] else ""
    return made


def _of_request(machine: Any) -> Values:
    return {
        "computed": machine.num_computed,
        "in_flight": len(machine.steps),
        "output": len(machine.output),
        "said_all": bool(machine.finish_reason),
        **{f"lacks_{room}": room in machine.missing for room in ("a", "b")},
    }


def _encoding(values: Values) -> encoding.Encoding:
    made = tables.make_encoding(stored=values["STORED"], encodes=values["ENCODES"])
    made.rooms = {room: None for room in ("a", "b") if values[f"in_{room}"]}
    made.in_batch = values["in_batch"]
    made.rows = "rows" if values["has_rows"] else None
    return made


def _of_encoding(machine: Any) -> Values:
    return {
        "in_batch": machine.in_batch,
        "has_rows": machine.rows is not None,
        **{f"in_{room}": room in machine.rooms for room in ("a", "b")},
    }


def _embedding(values: Values) -> embedding.Embedding:
    made = tables.make_embedding()
    order = ("b", "a") if values["b_first"] else ("a", "b")
    made.waiters = {room: "item" for room in order if values[f"in_{room}"]}
    made.failure = tables.FAILURE
    made.tried = {room for room in order if values[f"tried_{room}"]}
    made.room = "" if values["room"] == "none" else values["room"]
    made.rows = "rows" if values["has_rows"] else None
    made.rival = "" if values["rival"] == "none" else values["rival"]
    made.rival_has_slots = values["rival_load"] == "open"
    return made


def _of_embedding(machine: Any) -> Values:
    waiting = {f"in_{room}": room in machine.waiters for room in ("a", "b")}
    tried = machine.tried & machine.waiters.keys()
    return {
        **waiting,
        **{f"tried_{room}": room in tried for room in ("a", "b")},
        "b_first": list(machine.waiters) == ["b", "a"],
        "room": machine.room or "none",
        "rival": machine.rival or "none",
        "has_rows": machine.rows is not None,
    }


def _offer(values: Values) -> offer.Offer[str]:
    made = offer.Offer("r/1", {room: "image" for room in "ab" if values[f"has_{room}"]})
    made.untaken = {room: None for room in "ab" if values[f"lacks_{room}"]}
    return made


def _of_offer(machine: Any) -> Values:
    return {
        **{f"has_{room}": room in machine.images for room in "ab"},
        **{f"lacks_{room}": room in machine.untaken for room in "ab"},
    }


def _group(values: Values) -> group.Group:
    made = tables.make_group()
    made.present = {rank for rank in (1, 2) if values[f"in_{rank}"]}
    made.given = values["given"]
    made.executed = [values[f"by_{rank}"] for rank in range(3)]
    made.failed = dict.fromkeys(range(1, max(made.executed) + 1), False)
    return made


def _of_group(machine: Any) -> Values:
    """Numbers count from the oldest command that is under way."""
    return {
        **{f"in_{rank}": rank in machine.present for rank in (1, 2)},
        "given": machine.given - machine.done,
        **{f"by_{rank}": machine.executed[rank] - machine.done for rank in range(3)},
    }


def _child(values: Values) -> child.Child:
    patience = child.Patience(silent=1, stuck=2, hung=3, long_life=1, short_lives=1)
    made = child.Child("e0", patience=patience)
    made.num_unanswered = values["unanswered"]
    made.num_short_lives = int(values["was_short"])
    return made


def _of_child(machine: Any) -> Values:
    return {"unanswered": machine.num_unanswered, "was_short": bool(machine.num_short_lives)}


def _fan_out(values: Values) -> fan_out.FanOut:
    made = tables.make_fan_out()
    made.awaited = {part for part in (0, 1) if values[f"awaited_{part}"]}
    return made


def _of_fan_out(machine: Any) -> Values:
    return {f"awaited_{part}": part in machine.awaited for part in (0, 1)}


CONCRETE = {
    "FAN_OUT": Concrete(_fan_out, _of_fan_out),
    "GROUP": Concrete(_group, _of_group),
    "OFFER": Concrete(_offer, _of_offer),
    "LINK": Concrete(lambda values: tables.make_link()),
    "INSTANCE": Concrete(lambda values: tables.make_instance()),
    "CHILD": Concrete(_child, _of_child),
    "MEMBERSHIP": Concrete(lambda values: tables.make_membership()),
    "GENERATION": Concrete(_generation, _of_generation, {"placement": PLACEMENT}),
    "REQUEST": Concrete(_request, _of_request, {"kv": KV}),
    "ENCODING": Concrete(_encoding, _of_encoding),
    "EMBEDDING": Concrete(_embedding, _of_embedding),
}
"""By the name of the table."""
