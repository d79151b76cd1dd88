"""The state machine kernel: tables are data, one function changes a state.

There are two rules. Everything that affects a transition is in a table of rows; and a machine has
no part of the outside: no clock, no I/O, no log. `fire(event)` looks up the row, runs the row's
action on the machine's own fields, which nothing else writes, sets the state, and returns the row's
effects.  The caller performs these orders; their results come back as further events.

A row holds everything: `Row(source, event, target, effects=(...), do=action, when=guard,
note=...)`. Tables are defined, validated and drawn with `transitions`
(github.com/pytransitions/transitions).  Each becomes one `transitions.Machine` without models,
whose events are compiled into a two-level dict for the hot path.  A differential test drives both
with every state, event and guard value.

Owners are data. A state names what it owns, and an owned thing names the effect that gives it
back.  Rows do not write that effect.  The kernel gives back what the source owns or the event
`brings` and the target does not own, unless the event `ends` it. Releases come first, in the order
in which the machine's `Owned` lists them; then the row's own effects, as written. A state may own a
thing only possibly (a text has no images), so giving it back twice must do no harm. A row may part
with a thing by another effect that the thing names (`passed_on_by`): a hand-over, or one of several
answers. A thing without a release is in use: only an event ends it.

Timers are data. A table names the events that its own timers fire, and the effects that arm each
(none means that it runs from birth). A timer runs in the states that have a row for its event.
Entering any other state ends it, so no row and no role disarms a timer, and its event changes
nothing there.

What the table must satisfy is checked at import, see `epd.fsm.laws`:

- every (state, event) is a row, an `Ignore` with a written reason, or illegal;
- guards of one (state, event) are total and exclusive by construction: either no guard, or a
  predicate `when=p` and its complement `when=unless(p)`;
- no unreachable state and no trap (every state reaches a terminal one).  No edge out of a terminal
  state; a row that stays (`target=None`) may still answer a late message;
- what a state owns has a way back on every path out: it is given back, passed on, or ended.
  Terminal states own nothing, no row writes by hand what follows from owners, and no state ignores
  an event that brings something, or ends what it owns;
- what is armed runs in the state that is entered;
- every non-terminal state has an exit by time, whatever led to it.  A timer that is armed then, or
  another machine's clock (an event with `by_time` that is no timer of its own), has an edge out of
  it.  Or it is `held`, with a written reason, and a row by time tries again.

An illegal event raises `IllegalEvent` with the machine's story.  It fails that one object: the
caller turns it into the object's own fault, never into the death of the process.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar, Protocol

from epd.fsm.definition import Definition, GuardCall, RowCall, TableError
from epd.fsm.entry import StoryEntry
from epd.fsm.laws import LAWS
from epd.fsm.rows import Effect, Event, Ignore, Owned, Row, State, Timers, Unless, unless

__all__ = [
    "NULL_JOURNAL",
    "STORY_LENGTH",
    "Effect",
    "Event",
    "GuardCall",
    "Ignore",
    "IllegalEvent",
    "Journal",
    "Machine",
    "Owned",
    "Row",
    "RowCall",
    "State",
    "Table",
    "TableError",
    "Timers",
    "Told",
    "Unless",
    "read_story",
    "unless",
]


class IllegalEvent(Exception):
    """An event that its machine's table does not allow in the present state."""

    def __init__(self, machine: Machine, event: Event) -> None:
        super().__init__(
            f"{machine.table.name} {machine.key}: {type(event).__name__} is illegal in "
            f"{machine.state.name}; story: {machine.tell_story()}"
        )


class Journal(Protocol):
    """Sees the birth and every transition of the machines made with it, and every event that moved
    none: ignored or illegal.  Gives stories their times."""

    def now_s(self) -> float: ...

    def opened(self, machine: Machine) -> None: ...

    def observe(self, machine: Machine, event: Event, source: State, target: State) -> None: ...

    def unmoved(self, machine: Machine, event: Event) -> None: ...


class _NullJournal:
    def now_s(self) -> float:
        return 0.0

    def opened(self, machine: Machine) -> None:
        pass

    def observe(self, machine: Machine, event: Event, source: State, target: State) -> None:
        pass

    def unmoved(self, machine: Machine, event: Event) -> None:
        pass


NULL_JOURNAL: Journal = _NullJournal()


class Table(Definition):
    """A definition that keeps the laws."""

    def check(self) -> None:
        for law in LAWS:
            if problem := law(self):
                raise TableError(f"{self.name}: {problem}")


STORY_LENGTH = 48
TAKES_TURNS = (-1, -2, -3)  # what comes again and again in one state is counted if no more do
Told = deque[tuple[float, State, type[Event], State, int]]  # as in StoryEntry


def read_story(told: Told) -> tuple[StoryEntry, ...]:
    return tuple(
        StoryEntry(at_s, source.name, kind.__name__, target.name, times)
        for at_s, source, kind, target, times in told
    )


class Machine:
    """An object with a table: subclasses add slotted context fields that guards and actions
    read."""

    __slots__ = ("_journal", "_state", "_story", "key")
    table: ClassVar[Table]

    def __init__(self, key: str, journal: Journal = NULL_JOURNAL) -> None:
        self.key = key
        self._journal = journal
        self._state = self.table.initial
        self._story: Told = deque(maxlen=STORY_LENGTH)
        journal.opened(self)

    @property
    def state(self) -> State:
        return self._state

    @property
    def terminal(self) -> bool:
        return self._state in self.table.terminal

    @property
    def held(self) -> bool:
        """Whether time alone must not end the present state."""
        return self._state in self.table.held

    def fire(self, event: Event) -> tuple[Effect, ...]:
        """Apply an event; the only writer of the state.  Returns the effects to perform, in
        order."""
        source, kind = self._state, type(event)
        edges = self.table.dispatch[source].get(kind)
        if edges is None:
            self._journal.unmoved(self, event)
            raise IllegalEvent(self, event)
        for guard, action, effects, target in edges:
            if guard is not None and not guard(self, event):
                continue
            if action is not None:
                action(self, event)
            if target is None:
                target = source
            self._state = target
            journal, story = self._journal, self._story
            # what repeats (steps, tokens, retries) must not push out what happened
            for at in TAKES_TURNS[: len(story)] if target is source else ():
                if (told := story[at])[1] is not source:
                    story.append((journal.now_s(), source, kind, target, 1))
                    break
                if told[2] is kind:
                    story[at] = (told[0], source, kind, source, told[4] + 1)
                    break
            else:
                story.append((journal.now_s(), source, kind, target, 1))
            journal.observe(self, event, source, target)
            return effects
        self._journal.unmoved(self, event)
        return ()

    @property
    def story(self) -> tuple[StoryEntry, ...]:
        return read_story(self._story)

    @property
    def told(self) -> Told:
        """The story as it is kept, which is cheap to hold on to; `read_story` reads it."""
        return self._story

    def tell_story(self) -> str:
        """The story on one line: `RESERVED -RowsReady@1.204-> WRITING; ...`."""
        return "; ".join(map(str, self.story)) or "(nothing happened yet)"

    def __repr__(self) -> str:
        return f"<{self.table.name} {self.key} {self._state.name}>"
