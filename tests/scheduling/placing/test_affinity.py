"""What a prefix is worth: its own time, and under load that of all who come until queues are empty;
nothing where none is held, and never more than balance allows."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from epd.scheduling.backlog import Backlog
from epd.scheduling.predicted_rule import MANY_SERVED
from tests.scheduling.test_predicted_rule import GPU, chosen, instance, pictures

PROMPT = replace(pictures(0), num_tokens=10_000)


def waits(num_tokens: int, num_served: int) -> Backlog:
    return Backlog(
        num_tokens=num_tokens, num_ready=num_tokens, num_prompts=1, num_served=num_served
    )


def test_a_prefix_is_worth_what_it_saves() -> None:
    asked = replace(pictures(0), num_tokens=10_000, held={"p1": 0.9})
    for num_tokens, expected in ((8_900, "p1"), (9_100, "p0")):
        waits = Backlog(num_tokens=num_tokens, num_ready=num_tokens)
        pool = [instance("p0"), instance("p1", waits), instance("d0")]
        assert chosen(pool, asked)[1] == expected


@given(st.integers(0, 200), st.floats(0.05, 0.95), st.floats(0.05, 0.95))
def test_a_prefix_is_worth_the_time_of_those_who_come(
    num_served: int, share: float, of_worth: float
) -> None:
    """The holder may have so much more to do that its prompt is not sooner there, and no more."""
    asked = replace(PROMPT, held={"p1": share})
    worth = share * 10_000 * (1 + min(num_served, MANY_SERVED))
    for more, expected in ((of_worth * worth, "p1"), (worth * (1 + of_worth) + 500, "p0")):
        pool = [
            instance("p0", waits(1000, num_served)),
            instance("p1", waits(1000 + int(more), num_served)),
            instance("d0"),
        ]
        assert chosen(pool, asked)[1] == expected


@given(st.integers(0, 10**6), st.floats(0.0, 1.0))
def test_no_prefix_waits_while_another_instance_is_idle(more: int, share: float) -> None:
    """Some queue is empty: the prompt goes where it is done first."""
    pool = [instance("p0"), instance("p1", waits(1 + more, 10_000)), instance("d0")]
    sooner = 1 + more < share * 10_000
    assert chosen(pool, replace(PROMPT, held={"p1": share}))[1] == ("p1" if sooner else "p0")


@given(st.lists(st.tuples(st.integers(0, 50_000), st.integers(0, 100)), min_size=2, max_size=8))
def test_without_a_prefix_load_alone_counts(queues: list[tuple[int, int]]) -> None:
    pool = [instance(f"p{n}", waits(*queue)) for n, queue in enumerate(queues)]
    pool.append(instance("d0"))
    least = min(range(len(queues)), key=lambda n: (GPU.token_s * queues[n][0], n))
    assert chosen(pool, PROMPT)[1] == f"p{least}"
