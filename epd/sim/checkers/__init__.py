"""The invariants of a run, one module each; `ALL` in the order in which their findings matter.

A checker is made with the run's context; it may watch events from then on, and it is asked once at
quiescence.  What it finds goes to `World.violate`.
"""

from epd.sim.checkers.answers import Answers
from epd.sim.checkers.attempts import Attempts
from epd.sim.checkers.books import Books
from epd.sim.checkers.bounds import Bounds
from epd.sim.checkers.conservation import Conservation
from epd.sim.checkers.deadlines import Deadlines
from epd.sim.checkers.durations import Durations
from epd.sim.checkers.faultless import Faultless
from epd.sim.checkers.firsttoken import FirstToken
from epd.sim.checkers.forsaken import Forsaken
from epd.sim.checkers.integrity import Integrity
from epd.sim.checkers.links import Links
from epd.sim.checkers.liveness import Liveness
from epd.sim.checkers.lives import Lives
from epd.sim.checkers.residency import Residency
from epd.sim.checkers.scopes import Scopes
from epd.sim.checkers.silence import Silence
from epd.sim.checkers.singleflight import SingleFlight
from epd.sim.checkers.tokens import GoldenTokens
from epd.sim.checkers.tombstones import Tombstones
from epd.sim.checkers.wakeups import WakeUps

ALL = (
    Integrity,
    GoldenTokens,
    Answers,
    Deadlines,
    Lives,
    Scopes,
    Links,
    Silence,
    SingleFlight,
    Residency,
    Bounds,
    Durations,
    Attempts,
    Tombstones,
    FirstToken,
    WakeUps,
    Forsaken,
    Conservation,
    Books,
    Faultless,
    Liveness,
)

__all__ = [
    "ALL",
    "Answers",
    "Attempts",
    "Books",
    "Bounds",
    "Conservation",
    "Deadlines",
    "Durations",
    "Faultless",
    "FirstToken",
    "Forsaken",
    "GoldenTokens",
    "Integrity",
    "Links",
    "Liveness",
    "Lives",
    "Residency",
    "Scopes",
    "Silence",
    "SingleFlight",
    "Tombstones",
    "WakeUps",
]
