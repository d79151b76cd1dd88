"""What `epd top` shows: three views, one below the other, each asked for anew every second.

`TopView` holds the screen's content and is driven by keys and answers; it draws text only, so that
tests need no terminal. `watch` is the loop around it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from epd.api.watching.cluster_view import ClusterView
from epd.cli.ask.client import Client
from epd.cli.boundary import CommandFailed
from epd.cli.look.machines import machine_lines, process_lines, state_lines, story_lines

HELP = "↑ ↓ choose   enter look into   esc back   space pause   q quit"
STATES, MACHINES, STORY = range(3)  # levels


class TopView:
    """Counts of states; behind one of them its oldest machines; behind one of those its story."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.paused = False
        self.trouble = ""  # why the last question was not answered
        self._told = ClusterView()
        self._level = 0
        self._rows = [0, 0, 0]  # chosen on each level
        self._query: dict[str, str] = {}
        self._behind: list[dict[str, str]] = []  # queries of the levels above
        self._seen: Counter[tuple[str, str]] = Counter()
        self._seen_s = 0.0
        self._rates: dict[tuple[str, str], float] = {}

    @property
    def query(self) -> Mapping[str, str]:
        return self._query

    def update(self, told: ClusterView, now_s: float) -> None:
        self.trouble = ""
        seen: Counter[tuple[str, str]] = Counter()
        for edge in told.edges:
            if edge.source != edge.target:
                seen[edge.machine, edge.target] += edge.count
        if self._seen_s and now_s > self._seen_s:
            spent_s = now_s - self._seen_s
            self._rates = {key: (n - self._seen[key]) / spent_s for key, n in seen.items()}
        before = {level: self._items(level) for level in (STATES, self._level)}
        self._told, self._seen, self._seen_s = told, seen, now_s
        for level, items in before.items():  # rows come and go: what is chosen stays chosen
            row, now = self._rows[level], self._items(level)
            if row < len(items) and items[row] in now:
                self._rows[level] = now.index(items[row])

    def move(self, by: int) -> None:
        last = max(0, len(self._items(self._level)) - 1)
        self._rows[self._level] = min(last, max(0, self._rows[self._level] + by))

    def enter(self) -> None:
        row = min(self._rows[self._level], len(self._items(self._level)) - 1)
        if self._level == STORY or row < 0:
            return
        self._behind.append(self._query)
        if self._level == STATES:
            state = self._told.states[row]
            self._query = {"machine": state.machine, "state": state.state, "limit": "100"}
        else:
            self._query = {"key": self._told.machines[row].key, "limit": "200"}
        self._level += 1
        self._rows[self._level] = 0
        self._told.machines = []

    def back(self) -> None:
        if self._level:
            self._level -= 1
            self._query = self._behind.pop()
            self._told.machines = []

    def _items(self, level: int) -> Sequence[object]:
        """What can be chosen from, by what it is called."""
        if level == STATES:
            return [(one.machine, one.state) for one in self._told.states]
        machines = self._told.machines
        if level == MACHINES:
            return [(one.instance, one.machine, one.key) for one in machines]
        return range(len(story_lines(machines)) - 1)

    def _is_late(self, row: int) -> bool:
        if self._level == STATES:
            return self._told.states[row].late > 0
        return self._level == MACHINES and self._told.machines[row].is_late

    def lines(self, height: int) -> list[tuple[str, str]]:
        """Style and text of each line; the chosen one is in sight."""
        above = [("bold", f"{self.title}{'   PAUSED' if self.paused else ''}")]
        above += [("red", self.trouble)] if self.trouble else []
        if self._level == STATES:
            above += [("", line) for line in ("", *process_lines(self._told))]
            listed = state_lines(self._told, self._rates)
        elif self._level == MACHINES:
            listed = machine_lines(self._told)
        else:
            listed = story_lines(self._told.machines)
        above += [("", ""), ("bold", listed[0])]
        room = max(1, height - len(above) - 2)
        row = min(self._rows[self._level], max(0, len(listed) - 2))
        first = max(0, row - room + 1)
        shown = [
            ("reverse" if at == row else "red" if self._is_late(at) else "", line)
            for at, line in enumerate(listed[1:])
            if first <= at < first + room
        ]
        return [*above, *shown, ("", ""), ("dim", HELP)]


async def watch(
    client: Client, view: TopView, every_s: float, asked: asyncio.Event, redraw: Callable[[], None]
) -> None:
    """Ask every so often, and when somebody asked; who does not answer is asked again, too."""
    while True:
        if not view.paused or asked.is_set():
            asked.clear()
            query = view.query
            try:
                told = await client.state(query)
            except CommandFailed as error:
                view.trouble = str(error)
            else:
                if query is view.query:  # else a key was pressed meanwhile
                    view.update(told, time.monotonic())
            redraw()
        with suppress(TimeoutError):
            await asyncio.wait_for(asked.wait(), every_s)
