"""Real machines from the variables of their models, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from epd.failure import Failure, FailureKind
from epd.fsm import (
    child,
    embedding,
    encoding,
    fan_out,
    generation,
    group,
    incoming,
    offer,
    outgoing,
    request,
)
from epd.fsm.kernel import Event, Machine
from epd.messages import Load, TokenLogprobs
from epd_lab.formal import machines

Values = dict[str, Any]
TOKEN = TokenLogprobs(9, 0.0)
KV = SimpleNamespace(num_tokens=2, rope_delta=0, num_cached=0, first_token=TOKEN)
PLACEMENT = SimpleNamespace(prefill=machines.PEER, decode=SimpleNamespace(instance_id="other"))
ITEMS = machines.MESSAGE.items  # rooms a and b, tokens 1 and 2 of a prompt of three
NBYTES = 64  # of a room; models count its halves


def _nothing(machine: Machine) -> Values:
    return {}


@dataclass(frozen=True)
class Concrete:
    """How a real machine is made from variables, and read back.

    Variables have their names in the model, those of an end of a pair without its own.  `also`:
    what `make` needs besides what `read` returns, and the model's constants.  `carry`: the fields
    of events, by the machine and by their fields in the model.
    """

    make: Callable[[Values], Machine]
    read: Callable[[Any], Values] = _nothing
    also: tuple[str, ...] = ()
    carry: Callable[[Any, Values], Values] = lambda machine, fields: {}
    tells: Mapping[str, str] = field(default_factory=dict)
    """Effects by which somebody hears of what has just failed, if this holds of the variables."""
    why: Callable[[Any], Failure | None] = lambda machine: machine.failure
    joins: tuple[type[Event], ...] = ()
    """Events after which a room's letter stands for a new room."""


def _generation(values: Values) -> generation.Generation:
    made = generation.Generation("g", values["MAX_ATTEMPTS"], machines.LIMITS, machines.CLIENT)
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
    message: Any = SimpleNamespace(**vars(machines.MESSAGE) | {"items": items})
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


def _encoding(values: Values) -> Any:
    made: Any = machines.make_encoding(stored=values["STORED"], encodes=values["ENCODES"])
    made.rooms = {room: None for room in ("a", "b") if values[f"in_{room}"]}
    made.in_batch = values["in_batch"]
    made.rows = "rows" if values["has_rows"] else None
    return made


def _of_encoding(machine: Any) -> Values:
    return {
        "in_batch": machine.in_batch,
        "has_rows": machine.rows is not None,
        **{f"in_{room}": room in _letters(machine.rooms) for room in ("a", "b")},
    }


def _letters(rooms: Iterable[str]) -> list[str]:
    return [room[0] for room in rooms]


def _embedding(values: Values) -> Any:
    made: Any = machines.make_embedding()
    order = ("b", "a") if values["b_first"] else ("a", "b")
    made.waiters = {room: "item" for room in order if values[f"in_{room}"]}
    made.failure = machines.FAILURE
    made.tried = {room for room in order if values[f"tried_{room}"]}
    made.room = "" if values["room"] == "none" else values["room"]
    made.rows = "rows" if values["has_rows"] else None
    made.rival = "" if values["rival"] == "none" else values["rival"]
    made.rival_has_slots = values["rival_load"] == "open"
    return made


def _of_embedding(machine: Any) -> Values:
    waiters = _letters(machine.waiters)
    tried = _letters(machine.tried & machine.waiters.keys())
    return {
        **{f"in_{room}": room in waiters for room in ("a", "b")},
        **{f"tried_{room}": room in tried for room in ("a", "b")},
        "b_first": waiters == ["b", "a"],
        "room": machine.room[:1] or "none",
        "rival": machine.rival[:1] or "none",
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
    made = machines.make_group()
    made.present = {rank for rank in (1, 2) if values[f"in_{rank}"]}
    made.beaten = {rank for rank in (1, 2) if values[f"beat_{rank}"]}
    made.given = values["given"]
    made.executed = [values[f"by_{rank}"] for rank in range(3)]
    made.failed = dict.fromkeys(range(1, max(made.executed) + 1), False)
    return made


def _of_group(machine: Any) -> Values:
    """Numbers count from the oldest command that is under way."""
    return {
        **{f"in_{rank}": rank in machine.present for rank in (1, 2)},
        **{f"beat_{rank}": rank in machine.beaten for rank in (1, 2)},
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
    made = machines.make_fan_out()
    made.awaited = {part for part in (0, 1) if values[f"awaited_{part}"]}
    return made


def _of_fan_out(machine: Any) -> Values:
    return {f"awaited_{part}": part in machine.awaited for part in (0, 1)}


def _outgoing(values: Values) -> outgoing.Outgoing:
    made = machines.make_outgoing()
    offer_ = machines.OFFER if values["OFFERS"] else None
    made.manifest = outgoing.Manifest(machines.CONTRACT, 4, offer_)
    made.nbytes = NBYTES
    made.grant = _grant(values) if values["granted"] else None
    for name in ("ready", "part", "written"):
        setattr(made, f"{name}_nbytes", values[name] * NBYTES // 2)
    return made


def _grant(values: Values) -> Any:
    return replace(machines.GRANT, num_rows=4 if values["CONTRACT_HOLDS"] else 3)


def _of_outgoing(machine: Any) -> Values:
    halves = ("ready", "part", "written")
    return {name: getattr(machine, f"{name}_nbytes") * 2 // NBYTES for name in halves}


def _incoming(values: Values) -> incoming.Incoming:
    made = machines.make_incoming()
    made.nbytes = NBYTES
    return made


def _to_generation(machine: Any, fields: Values) -> Values:
    last = min(machine.unconfirmed, default="peer")  # of those that have not called it off
    carried: Values = {"placement": PLACEMENT, "instance_id": last}
    if kind := fields.get("failure"):
        carried["failure"] = Failure(FailureKind(kind), kind)
    return carried


def _to_group(machine: Any, fields: Values) -> Values:
    """Models count from the oldest command that is under way."""
    return {"number": fields["number"] + machine.done} if "number" in fields else {}


def _to_instance(machine: Any, fields: Values) -> Values:
    """How many waits are beyond their bound; by how much a self-test is an earlier one; whether its
    process returns."""
    load = Load(waits=(machines.WAIT,) * fields.get("num_over", 0))
    roles = ("decode",) * fields.get("returns", 0)
    serial = machine.num_probes - fields.get("age", 0)
    return {"load": load, "serial": serial, "next_roles": roles}


CONCRETE = {
    "OUTGOING": Concrete(
        _outgoing, _of_outgoing, ("granted",), lambda machine, fields: {"grant": _grant(fields)},
        {"CONCLUDE_FAILED": "True"}, lambda machine: machine.why,
    ),
    "INCOMING": Concrete(
        _incoming, tells={"CONCLUDE_FAILED": "not consumer_cancelled"},
        why=lambda machine: machine.why,
    ),
    "FAN_OUT": Concrete(_fan_out, _of_fan_out),
    "ADAPTER": Concrete(
        lambda values: machines.make_adapter(), carry=lambda machine, fields: fields
    ),
    "GROUP": Concrete(_group, _of_group, carry=_to_group), "OFFER": Concrete(_offer, _of_offer),
    "LINK": Concrete(lambda values: machines.make_link()),
    "INSTANCE": Concrete(lambda values: machines.make_instance(), carry=_to_instance),
    "CHILD": Concrete(_child, _of_child),
    "MEMBERSHIP": Concrete(lambda values: machines.make_membership()),
    "GENERATION": Concrete(
        _generation, _of_generation, carry=_to_generation,
        tells={"ANSWER_ERROR": "True", "LOG_FAILURE": "True"},
    ),
    "REQUEST": Concrete(
        _request, _of_request, carry=lambda machine, fields: {"kv": KV, "num_tokens": 1},
        tells={"SEND_FAILURE": "True"},
    ),
    "ENCODING": Concrete(
        _encoding, _of_encoding, tells={"FAIL_ROOMS": "True"}, joins=(encoding.Requested,),
    ),
    "EMBEDDING": Concrete(
        _embedding, _of_embedding, ("rival_load",), tells={"NOTIFY_FAILED": "True"},
        joins=(embedding.Wanted, embedding.RivalWanted),
    ),
}  # fmt: skip
"""By the name of the table."""
