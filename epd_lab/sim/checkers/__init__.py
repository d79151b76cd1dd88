"""The invariants of a run, one module each; `ALL` in the order in which their findings matter.

A checker is made with the run's context; it may watch events from then on, and it is asked once at
quiescence.  What it finds goes to `World.violate`.
"""

from epd_lab.sim.checkers.adapters import Adapters
from epd_lab.sim.checkers.attempts import Attempts
from epd_lab.sim.checkers.clients.answers import Answers
from epd_lab.sim.checkers.clients.deadlines import Deadlines
from epd_lab.sim.checkers.clients.firsttoken import FirstToken
from epd_lab.sim.checkers.clients.liveness import Liveness
from epd_lab.sim.checkers.clients.silence import Silence
from epd_lab.sim.checkers.clients.tokens import GoldenTokens
from epd_lab.sim.checkers.clients.turns import Turns
from epd_lab.sim.checkers.drains import Drains
from epd_lab.sim.checkers.durations import Durations
from epd_lab.sim.checkers.elsewhere import Elsewhere
from epd_lab.sim.checkers.faultless import Faultless
from epd_lab.sim.checkers.forsaken import Forsaken
from epd_lab.sim.checkers.gateways import Gateways
from epd_lab.sim.checkers.groups import Groups
from epd_lab.sim.checkers.links import Links
from epd_lab.sim.checkers.lives import Lives
from epd_lab.sim.checkers.memory.books import Books
from epd_lab.sim.checkers.memory.bounds import Bounds
from epd_lab.sim.checkers.memory.conservation import Conservation
from epd_lab.sim.checkers.memory.integrity import Integrity
from epd_lab.sim.checkers.memory.residency import Residency
from epd_lab.sim.checkers.memory.scopes import Scopes
from epd_lab.sim.checkers.memory.singleflight import SingleFlight
from epd_lab.sim.checkers.poison import Poison
from epd_lab.sim.checkers.switches import Switches
from epd_lab.sim.checkers.tombstones import Tombstones
from epd_lab.sim.checkers.wakeups import WakeUps
from epd_lab.sim.checkers.wedges import Wedges

ALL = (
    Integrity, GoldenTokens, Answers, Deadlines, Lives, Scopes, Links, Silence, SingleFlight,
    Residency, Bounds, Durations, Attempts, Elsewhere, Poison, Groups, Tombstones, FirstToken,
    Turns, WakeUps, Wedges, Adapters, Drains, Switches, Forsaken, Gateways, Conservation, Books,
    Faultless,
    Liveness,
)  # fmt: skip

__all__ = [
    "ALL", "Adapters", "Answers", "Attempts", "Books", "Bounds", "Conservation", "Deadlines",
    "Drains", "Durations", "Elsewhere", "Faultless", "FirstToken", "Forsaken", "Gateways",
    "GoldenTokens", "Groups", "Integrity", "Links", "Liveness", "Lives", "Poison", "Residency",
    "Scopes", "Silence", "SingleFlight", "Switches", "Tombstones", "Turns", "WakeUps", "Wedges",
]  # fmt: skip
