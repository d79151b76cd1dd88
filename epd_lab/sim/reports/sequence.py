"""A run's messages as a mermaid sequence diagram, in a Markdown page that code hosts draw.

Only messages of the serving protocol: heartbeats and reports would bury them.  `focus` is what a
message or a fault must contain (a request id, a room); messages without an identity stay out then.
"""

from __future__ import annotations

from epd_lab.sim.cluster import GATEWAY
from epd_lab.sim.world import World

MAX_ARROWS = 160
HOUSEKEEPING = (
    "Heartbeat",
    "HeartbeatAck",
    "Join",
    "Welcome",
    "Membership",
    "StageReport",
    "Leave",
)
NOTES = ("fault", "violation", "spawn", "exit", "resume", "expelled", "device_lost", "lost")


def draw(world: World, lanes: list[str], title: str, focus: str, until_s: float) -> str:
    """The page; arrows are arrivals, in order, with their virtual times."""
    first_s = next((at_s for at_s, kind, _ in world.events if kind == "ask"), 0.0)
    lines, num_arrows = [f"    participant {_name(lane)}" for lane in lanes], 0
    for at_s, kind, what in world.events:
        if at_s < first_s or (at_s > until_s and kind != "violation"):
            continue
        if num_arrows >= MAX_ARROWS:
            lines.append(f"    Note over {GATEWAY}: and so on; --grep ROOM shows less")
            break
        if kind == "arrive":
            arrow = _arrow(at_s, what, focus)
            num_arrows += bool(arrow)
            lines.extend(arrow)
        elif kind == "land" and not focus:
            lines.append(_over(_name(str(what[0])), at_s, f"wrote {_safe(what[1:])}"))
        elif kind == "ask" and focus in str(what[1]):
            lines.append(_over(GATEWAY, at_s, f"request {what[0]} is {_safe(what[1:])}"))
        elif kind == "answer" and not focus:
            lines.append(_over(GATEWAY, at_s, f"request {_safe(what)}"))
        elif kind in NOTES:
            lines.append(_note(at_s, kind, what, lanes))
    body = "\n".join(lines)
    return f"# {title}\n\n```mermaid\nsequenceDiagram\n{body}\n```\n"


def _arrow(at_s: float, what: tuple[object, ...], focus: str) -> list[str]:
    source, target, text = map(str, what[:3])
    kind = text.split()[0]
    if kind in HOUSEKEEPING or focus not in text:
        return []
    return [f"    {_name(source)}->>{_name(target)}: {at_s:.4f} {_safe((text,))}"]


def _note(at_s: float, kind: str, what: tuple[object, ...], lanes: list[str]) -> str:
    where = next((_name(str(w)) for w in reversed(what) if _name(str(w)) in lanes), GATEWAY)
    return _over(where, at_s, f"{kind.upper()} {_safe(what)}")


def _over(lane: str, at_s: float, text: str) -> str:
    return f"    Note over {lane}: {at_s:.4f} {text}"


def _name(process: str) -> str:
    """`e0:2` is the second life of e0: the same lane."""
    return process.split(":", maxsplit=1)[0]


def _safe(what: tuple[object, ...]) -> str:
    """Mermaid ends a line at `;` and starts entities at `#`."""
    return " ".join(map(str, what)).replace(";", ",").replace("#", "/")[:140]
