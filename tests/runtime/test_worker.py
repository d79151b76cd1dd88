"""How a worker ends when it cannot serve any more."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from unittest import mock

from epd.config import InstanceConfig
from epd.engine.base import DeviceLost, EngineError
from epd.messages import Address, InstanceInfo
from epd.records import RowContract
from epd.roles.compose import Engines
from epd.roles.holding import Holding
from epd.runtime.worker import (
    EXIT_DEVICE_LOST,
    EXIT_DRAINED,
    Ending,
    end_with_device,
    follow_membership,
    is_gone,
    show_cluster,
)
from epd.transport.host import this_host_id
from epd_lab.bench.gateway.null_engine import NullLanguage
from tests.patience import PATIENCE_S
from tests.roles.topologies.cluster import Cluster

CONFIG = InstanceConfig(instance_id="d0", roles=("decode",))


async def test_it_ends_with_its_device() -> None:
    """Fault F49: not after a failed step, but after one that says that all others will fail."""
    cluster = Cluster()
    instance = cluster.add("pd0", ("prefill", "decode"), Engines(language=NullLanguage()))
    ending = Ending()
    told: list[tuple[str, str]] = []
    end_with_device(instance, ending, lambda state, detail: told.append((state, detail)))
    instance.start()
    instance.actor.fault("step", EngineError("out of memory"))
    await asyncio.sleep(0.01)
    assert not ending.now.is_set() and told == []
    instance.actor.fault("step", DeviceLost("an illegal memory access"))
    await asyncio.wait_for(ending.now.wait(), PATIENCE_S)
    assert ending.exit_status == EXIT_DEVICE_LOST
    assert told == [("device lost", "an illegal memory access")]
    await instance.close()
    await cluster.gateway.close()


def test_who_joins_shows_its_gateway_and_the_roles_that_are_missing() -> None:
    contract = RowContract(hidden=8, row_width=8, num_deepstack=0, dtype="float32", row_nbytes=32)
    infos = {
        role: InstanceInfo(
            address=Address(role, 1, ""), roles=(role,), host_id="", pid=1,
            row_contract=contract if role != "decode" else None,
        )
        for role in ("encode", "prefill", "decode")
    }  # fmt: skip
    told: list[tuple[str, str]] = []

    def status(state: str, detail: str) -> None:
        told.append((state, detail))

    instance, ending, held = mock.Mock(), Ending(), Holding(CONFIG, Engines())
    show_cluster(instance, "tcp://gw:7000", ending, status, held)
    instance.member.on_welcome()
    assert told.pop() == ("serving", "tcp://gw:7000")
    for roles, lacks in (
        (("decode",), "; no healthy instance has the role prefill"),
        (("decode", "prefill"), "; no healthy instance has the role encode"),
        (("decode", "prefill", "encode"), ""),
    ):
        for _ in range(2):
            instance.member.on_list([infos[role] for role in roles])
        assert told == [("serving", f"tcp://gw:7000{lacks}")]
        told.clear()
    ending.drain.set()
    instance.member.on_list([infos["decode"]])
    assert told == [], "it is draining"
    show_cluster(instance, "ipc:///run/gateway.sock", Ending(), status, held)
    instance.member.on_list([infos["decode"]])
    instance.member.on_welcome()
    assert told == [("serving", "")], "its gateway's console is the same"


async def test_a_terminal_that_closes_drains_however_often_it_says_so() -> None:
    ending, loop = Ending(), asyncio.get_running_loop()
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # with nohup it is ignored
    ending.watch_signals()
    try:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.wait_for(ending.drain.wait(), PATIENCE_S)
            await asyncio.sleep(0.01)
        assert not ending.now.is_set() and ending.exit_status == 0
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(ending.now.wait(), PATIENCE_S)
    finally:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGHUP, before)


async def test_a_signal_behind_an_operators_word_drains_on() -> None:
    """A drain that the gateway asked for is not cut short by the first SIGTERM of a supervisor."""
    instance, ending, held = mock.Mock(), Ending(), Holding(CONFIG, Engines())
    follow_membership(instance, ending, lambda state, detail: None, held)
    instance.member.on_drain_asked(False, ())
    assert ending.drain.is_set() and ending.exit_status == EXIT_DRAINED
    ending.ask()
    assert not ending.now.is_set()
    ending.ask()
    assert ending.now.is_set()
    restarted = Ending()
    follow_membership(instance, restarted, lambda state, detail: None, held)
    instance.member.on_drain_asked(True, ())
    assert restarted.drain.is_set() and restarted.exit_status == 0


async def test_nohup_is_heeded() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        Ending().watch_signals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(signal.SIGHUP, before)


def test_only_of_a_process_of_this_host_it_is_known_that_it_is_gone() -> None:
    """F78: the same number elsewhere is another process."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    for pid, host_id, gone in (
        (ended.pid, this_host_id(), True),
        (os.getpid(), this_host_id(), False),
        (ended.pid, "elsewhere", False),
    ):
        address = Address("e0", 1, "")
        info = InstanceInfo(address=address, roles=(), host_id=host_id, pid=pid)
        assert is_gone(info) is gone
