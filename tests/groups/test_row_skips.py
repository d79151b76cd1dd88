"""Which images a step gathers, and which it skips, is the same at every rank of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from unittest import mock

from epd.engine.base import SlotRows
from epd.groups.leader import Batch, Command, Step
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.ranks.groups import SimFollower, SimRanks
from epd_lab.sim.run import Plan, run
from epd_lab.sim.workload import Ask

TEXT = tuple(range(20, 50))
FOUND, LATER = Image("found", (1, 4, 4)), Image("later", (1, 4, 6))  # 4 and 6 rows
FIRST = Ask(0, 1.0, TEXT, ((3, FOUND),))
SECOND = Ask(1, 2.0, TEXT, ((3, FOUND), (20, LATER)))


@dataclass
class Played:
    """What came of it: answers, and how many rows of images the steps of each request gathered."""

    answers: list[list[int]]
    violations: list[str]
    happened: frozenset[str]
    gathered: dict[str, int] = field(default_factory=dict)


def played(topology: str, asks: Sequence[Ask]) -> Played:
    gathered: dict[str, int] = {}
    send = SimRanks.send

    def seen(self: SimRanks, number: int, command: Command) -> None:
        for sequence in command.batch if isinstance(command, Step) else ():
            for span in sequence.spans:
                assert isinstance(span.rows, SlotRows) and span.rows.is_sharded
                key = sequence.request_id
                gathered[key] = gathered.get(key, 0) + span.count
        send(self, number, command)

    with mock.patch.object(SimRanks, "send", seen):
        result = run(Plan(5, topology, tuple(asks)), keep=True)
    assert result.world is not None
    happened = result.world.happened()
    result.world.close()
    answers = [list(record.tokens) for record in result.records]
    return Played(answers, result.violations, happened, gathered)


def skip_the_first_image(self: SimFollower, batch: Batch) -> object:
    """F29: a rank that decides by itself."""
    mine = [replace(sequence, spans=sequence.spans[1:]) for sequence in batch]
    return STEP(self, mine)


STEP = SimFollower.step


def test_an_image_in_the_prefix_cache_is_skipped_by_all_ranks_while_another_is_gathered() -> None:
    alone = played("1e1pd", (FIRST, SECOND))
    group = played("1e1pd:tp3", (FIRST, SECOND))
    assert group.violations == [] and group.answers == alone.answers
    assert "prefix_hit" in group.happened
    first, second, *_ = group.gathered.values()  # and what is asked once all is quiet
    assert (first, second) == (FOUND.num_rows, LATER.num_rows)


def test_a_rank_that_skips_by_itself_is_found() -> None:
    with mock.patch.object(SimFollower, "step", skip_the_first_image):
        said = played("1e1pd:tp3", (FIRST, SECOND)).violations
    assert any("was told another command" in line for line in said), said
