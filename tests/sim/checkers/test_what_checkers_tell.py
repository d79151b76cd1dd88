"""What checkers of clients' answers and of memory tell of, and what they do not, one thing each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from epd.frontend import GenerationError
from epd.fsm import incoming
from epd.messages import SamplingParams
from epd_lab.sim import checkers
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.client import Clients, Record
from epd_lab.sim.cluster import Settings
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.run import nothing_may_fail
from epd_lab.sim.wishes import SEEDED
from epd_lab.sim.workload import Ask
from tests.roles.simulated import Simulated, simulated


def wish(**wishes: Any) -> SamplingParams:
    return msgspec.structs.replace(SEEDED, **wishes)


ASK = Ask(1, 0.0, (11, 12, 13), (), 6, 1, stops_at_eos=False)
STOPS = replace(ASK, wishes=wish(stop_token_ids=(ASK.answer()[3],)))
SCORED = replace(ASK, wishes=wish(num_logprobs=1))
ASKED_S, TIMING = 5.0, Settings().timing


@pytest.fixture(scope="module")
def world() -> Iterator[Simulated]:
    with simulated("1e1p1d") as cluster:
        yield cluster


def answered(ask: Ask = ASK, **other: Any) -> Record:
    """As it should be; `other`: what is not."""
    golden = ask.answer()
    stopped = golden[-1] in ask.sampling().stop_token_ids
    good: dict[str, Any] = {
        "request_id": "r",
        "asked_s": ASKED_S,
        "first_s": ASKED_S + 0.1,
        "last_s": ASKED_S + 0.2,
        "gap_s": 0.1,
        "ended_s": ASKED_S + 0.2,
        "tokens": list(golden),
        "logprobs": list(ask.said()) if ask.sampling().tells_logprobs else [],
        "finish_reason": "stop" if stopped else "length",
        "num_answers": 1,
    }
    return Record(ask, **(good | other))


def told(
    cluster: Simulated, kind: type[Checker], record: Record, may_fail: Any = nothing_may_fail
) -> list[str]:
    """What it says of a run in which a client saw this."""
    clients = Clients(cluster.cluster, ())
    clients.records.append(record)
    checker: Any = kind(Context(cluster.world, cluster.cluster, clients, may_fail))
    checker.probes = [record]
    checker.at_end()
    found = list(cluster.world.violations)
    cluster.world.violations.clear()
    return found


def failed(kind: str) -> GenerationError:
    return GenerationError(kind, "it broke", 503, True)


GOLDEN = list(ASK.answer())
BROKEN = replace(ASK, images=((0, Image("bad", flaw="broken")),))
LATE_S = ASKED_S + TIMING.request_timeout_s
OF_CLIENTS: list[tuple[type[Checker], Record, str]] = [
    (checkers.GoldenTokens, answered(), ""),
    (checkers.GoldenTokens, answered(STOPS), ""),
    (checkers.GoldenTokens, answered(SCORED), ""),
    (checkers.GoldenTokens, answered(tokens=GOLDEN[:-1], finish_reason="stop"), "after 5 of 6"),
    (checkers.GoldenTokens, answered(tokens=[], finish_reason="stop"), "after 0 of 6"),
    (checkers.GoldenTokens, answered(STOPS, finish_reason="length"), "finished by length"),
    (checkers.GoldenTokens, answered(finish_reason="stop"), "finished by stop"),
    (checkers.GoldenTokens, answered(tokens=[*GOLDEN, 9]), "differs from the golden tokens at 6"),
    (checkers.GoldenTokens, answered(tokens=[9, *GOLDEN[1:]]), "golden tokens at 0"),
    (checkers.GoldenTokens, answered(tokens=[9], finish_reason=""), "golden tokens at 0"),
    (checkers.GoldenTokens, answered(staged=[9]), "was told (9,) of its prompt"),
    (checkers.GoldenTokens, answered(SCORED, logprobs=[]), "0 log-probabilities of 6"),
    (checkers.GoldenTokens, answered(BROKEN), "without its damaged image"),
    (checkers.Answers, answered(), ""),
    (checkers.Answers, answered(ended_s=0.0, finish_reason=""), "no answer at all"),
    (checkers.Answers, answered(num_answers=2), "2 terminal answers"),
    (checkers.Answers, answered(num_answers=0), "0 terminal answers"),
    (checkers.Answers, answered(ended_s=LATE_S + 1.5), "its deadline is"),
    (checkers.Answers, answered(finish_reason="", error=failed("lost")), "gives no reason"),
    (checkers.Answers, answered(finish_reason="", error=failed("capacity")), "and fits"),
    (checkers.Answers, answered(finish_reason="", hung_up=True), ""),
    (checkers.Deadlines, answered(), ""),
    (checkers.Deadlines, answered(tokens=GOLDEN[:3], finish_reason="length"), "was cut after"),
    (checkers.Deadlines, answered(first_s=LATE_S + 2.0), "for its first token"),
    (checkers.Deadlines, answered(gap_s=TIMING.token_timeout_s + 2.0), "for a further token"),
    (
        checkers.Deadlines,
        answered(tokens=GOLDEN[:3], finish_reason="", error=failed("deadline")),
        "failed by a deadline after",
    ),
    (checkers.Liveness, answered(), ""),
    (checkers.Liveness, answered(ended_s=ASKED_S + 3.5), "took 3.50 s"),
    (checkers.Liveness, answered(finish_reason="", error=failed("lost")), "ended with: lost"),
]


@pytest.mark.parametrize(("kind", "record", "words"), OF_CLIENTS)
def test_what_a_client_saw(
    kind: type[Checker], record: Record, words: str, world: Simulated
) -> None:
    found = told(world, kind, record)
    assert bool(found) == bool(words), found
    assert words in "".join(found)


MAY_BE_WRITTEN = {"RESERVED", "CANCEL_PENDING", "EXPIRE_PENDING", "QUARANTINED"}


@pytest.mark.parametrize("state", incoming.S, ids=lambda state: state.name)
def test_memory_is_written_only_while_its_lease_says_so(
    state: incoming.S, world: Simulated
) -> None:
    """And by the very life that it was granted to."""
    clients = Clients(world.cluster, ())
    checker = checkers.Integrity(Context(world.world, world.cluster, clients, nothing_may_fail))
    owner, writer = world.node("p0").process, world.node("e0").process
    write: Any = SimpleNamespace(writer=writer, target=SimpleNamespace(region_id="rows"))

    def lands(lease: Any) -> str:
        if lease is not None:
            checker._leases[owner.name, "rows", 3] = lease
        checker._landed(write, owner, [3])
        found = "".join(world.world.violations)
        world.world.violations.clear()
        return found

    peer: Callable[..., Any] = lambda epoch: SimpleNamespace(instance_id="e0", epoch=epoch)  # noqa: E731
    assert "leased to nobody" in lands(None)
    own = SimpleNamespace(state=state, key="r/1/0", peer=peer(writer.epoch))
    assert bool(lands(own)) is (state.name not in MAY_BE_WRITTEN)
    other = SimpleNamespace(state=state, key="r/1/0", peer=peer(writer.epoch + 1))
    assert lands(other)
