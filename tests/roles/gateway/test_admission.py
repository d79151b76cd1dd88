"""What a prediction refuses, and turns of keys, in a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest

from epd.frontend import Leave, Refused, TimeLimits
from epd.fsm import generation as fsm
from epd.roles.gateway.admission import FEW, SURE
from epd.roles.gateway.dispatch import Dispatcher
from epd.roles.gateway.stream import Stream
from epd.scheduling.predicted_rule import Outlook
from epd_lab.sim.cluster import GATEWAY
from epd_lab.sim.workload import Ask
from tests.roles.simulated import Simulated, simulated

PRICES = (0.0, 0.1)  # of a patch, of a token: a prompt of five takes half a second


@contextmanager
def ahead(
    waits_s: float, num_ahead: int = 1, *, is_measured: bool = True, is_sure: bool = True
) -> Iterator[None]:
    """Instances have so much to do, whatever is asked."""
    found = Outlook(waits_s, 1, num_ahead, PRICES, is_measured, is_sure)
    with (
        mock.patch.object(Dispatcher, "outlook", lambda *_, with_images: found),
        mock.patch.object(Dispatcher, "amounts", lambda _, m: (0, len(m.prompt.token_ids))),
    ):
        yield


def ask(who: str, **more: int) -> Ask:
    return Ask(1, 0.0, (11, 12, 13, 14, 15), (), 3, 1, tenant=who, **more)


def submitted(cluster: Simulated, who: str, limits: TimeLimits | None = None) -> Stream:
    submit: Callable[..., Stream] = cluster.gateway.role.submit
    return cluster.within(GATEWAY, submit, ask(who).generation(), limits)


def state(cluster: Simulated, stream: Stream) -> object:
    by_key = {machine.key: machine for machine in cluster.gateway.role.open_ones()}
    return by_key[stream.request_id].state


IN_FOUR_S = TimeLimits(4.0, 9.0, 9.0)


@pytest.mark.parametrize(
    ("waits_s", "is_measured", "is_refused"),
    [(5.0, True, True), (SURE * 4.0 - 0.6, True, False), (5.0, False, False), (0.0, True, False)],
)
def test_who_would_be_too_late_gets_no_place(
    waits_s: float, is_refused: bool, *, is_measured: bool
) -> None:
    with simulated("1epd") as cluster, ahead(waits_s, is_measured=is_measured):
        role = cluster.gateway.role
        if not is_refused:
            submitted(cluster, "a", IN_FOUR_S)
            return
        waits = []
        for _ in range(3):
            with pytest.raises(Refused, match=r"would come in 5\.0 s, and it has 4\.0 s") as found:
                cluster.within(GATEWAY, role.admit, IN_FOUR_S, "a")
            assert found.value.status == 429
            waits.append(found.value.retry_after_s)
        assert (
            waits[0] == 3.0 and not role.open_ones()
        )  # 5 s less 4 s, three quarters, and a second's work
        assert role.outcomes == {"rejected": 3}


@pytest.mark.parametrize(("num_ahead", "is_refused"), [(1, False), (10, True)])
def test_a_step_that_was_held_up_refuses_nobody(num_ahead: int, *, is_refused: bool) -> None:
    """Of few steps nobody knows whether each takes so long; ten that wait are too many."""
    with simulated("1epd") as cluster, ahead(5.0, num_ahead, is_sure=False):
        refused = pytest.raises(Refused) if is_refused else nullcontext()
        with refused:
            cluster.within(GATEWAY, cluster.gateway.role.admit, IN_FOUR_S, "a")


def test_who_turns_out_to_be_too_large_is_refused_before_any_attempt() -> None:
    with simulated("1epd") as cluster, ahead(SURE * 4.0 - 0.4):
        stream = submitted(cluster, "a", IN_FOUR_S)
        cluster.pass_time(0.01)
        update = stream.next_ready()
        assert update is not None and update.error is not None
        error = update.error
        assert (error.kind, error.status, error.retryable) == ("overloaded", 429, True)
        assert error.retry_after_s >= 1.0
        assert not cluster.gateway.dispatcher.books and not cluster.gateway.is_busy()


def test_keys_take_turns_as_soon_as_there_are_two() -> None:
    with simulated("1epd") as cluster:
        with ahead(9.0):
            alone = submitted(cluster, "a")
            assert state(cluster, alone) is fsm.S.PLACED
            first, second = (submitted(cluster, "b") for _ in range(2))
            third = submitted(cluster, "a")
            waiting = [first, second, third]
            assert {state(cluster, stream) for stream in waiting} == {fsm.S.QUEUED}
            cluster.pass_time(1.0)
            assert cluster.gateway.role.live()["queued"] == 3
            cluster.within(GATEWAY, second.cancel, Leave.GONE, "the client left")
            assert cluster.gateway.role.live()["queued"] == 2
        cluster.pass_time(1.0)  # a heartbeat comes, and finds room
        assert cluster.gateway.role.live()["queued"] == 0
        cluster.pass_time(2.0)
        assert not cluster.gateway.is_busy()


@pytest.mark.parametrize(
    ("num_ahead", "is_measured", "has_room"),
    [(FEW, False, False), (FEW - 1, False, True), (FEW, True, True)],
)
def test_few_go_out_while_nobody_knows_what_they_cost(
    num_ahead: int, has_room: bool, *, is_measured: bool
) -> None:
    with simulated("1epd") as cluster, ahead(0.1, num_ahead, is_measured=is_measured):
        submitted(cluster, "a")
        stream = submitted(cluster, "b")
        assert state(cluster, stream) is (fsm.S.PLACED if has_room else fsm.S.QUEUED)


def test_a_full_batch_of_decodes_holds_up_who_takes_turns() -> None:
    with simulated("1epd") as cluster, ahead(0.1):
        most = cluster.settings.decode.max_running
        submitted(cluster, "a")
        with mock.patch.object(Dispatcher, "num_least_decoding", lambda _: most):
            stream = submitted(cluster, "b")
            assert state(cluster, stream) is fsm.S.QUEUED
        with mock.patch.object(Dispatcher, "num_least_decoding", lambda _: most - 1):
            cluster.within(GATEWAY, cluster.gateway.role.admission.go_on)
            assert state(cluster, stream) is fsm.S.PLACED
