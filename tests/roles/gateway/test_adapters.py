"""Adapters at the gateway's desk: what is refused at once, and what a load waits for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from epd.config import LoraConfig
from epd.frontend import Adapter, Refused
from epd.messages import AdapterList, Heartbeat
from epd.records import Load
from epd.roles.gateway.adapters import LOAD_TIMEOUT_S
from epd_lab.sim.cluster import GATEWAY
from tests.roles.desk import Desk, desk
from tests.roles.simulated import DEFAULTS

LORA = LoraConfig(enabled=True, max_loras=2, runtime_dir="/adapters")
SETTINGS = replace(
    DEFAULTS, adapters=("poet",), engine=msgspec.structs.replace(DEFAULTS.engine, lora=LORA)
)
PIRATE = Adapter("pirate", "p" * 32)


def begin(at: Desk, work: Any) -> list[str]:
    """Someone asks; the answers, when they come."""
    told: list[str] = []

    async def ask() -> None:
        try:
            await work
        except Refused as refused:
            told.append(f"{refused.status} {refused.message}")
        else:
            told.append("done")

    process = at.cluster.node(at.name).process
    at.cluster.world.loop.create_task(ask(), name="ask", context=process.context)
    at.cluster.pass_time(0.01)
    return told


def lists(at: Desk) -> list[tuple[str, int, tuple[tuple[str, str], ...]]]:
    told = [(to, m) for to, m in at.said if isinstance(m, AdapterList)]
    at.said.clear()
    return [(to, m.serial, tuple(one[:2] for one in m.adapters)) for to, m in told]


def beat(at: Desk, name: str, serial: int, **load: Any) -> None:
    registry, epoch = at.whole.registry, at.actor.address.epoch
    told = Load(adapter_list=(epoch, serial), **load)
    received = SimpleNamespace(
        source=name, epoch=1, message=Heartbeat(load=told, version=registry.version)
    )
    at.do(registry.on_heartbeat, received)


def test_it_is_a_model_when_both_have_it_and_its_memory_is_back_at_the_end() -> None:
    """A heartbeat that has another list is answered by the list."""
    with desk("1e1p1d", GATEWAY, "adapters", SETTINGS) as at:
        assert list(at.role.offered) == ["poet"]
        told = begin(at, at.role.load(PIRATE, "x/pirate"))
        listed = (("poet", ""), (PIRATE.digest, "x/pirate"))
        found = lists(at)
        serial = found[0][1]
        assert sorted(found) == [(name, serial, listed) for name in ("d0", "e0", "p0")]
        both = ("poet", PIRATE.digest)
        for name in ("e0", "p0"):
            beat(at, name, serial, adapters=both)
        beat(at, "d0", serial - 1, adapters=("poet",))
        assert not told and lists(at) == [("d0", serial, listed)]
        beat(at, "d0", serial, adapters=both)
        at.cluster.pass_time(0.01)
        assert told == ["done"] and at.role.offered["pirate"] == PIRATE
        assert at.role.may_run(PIRATE) and not at.role.may_run(Adapter("pirate", "other"))

        told = begin(at, at.role.unload("pirate"))
        assert lists(at)[0][1:] == (serial + 1, (("poet", ""),))
        assert list(at.role.offered) == ["poet"] and not at.role.may_run(PIRATE)
        for name in ("e0", "p0"):
            beat(at, name, serial + 1, adapters=("poet",))
        assert not told
        beat(at, "d0", serial + 1, adapters=("poet",))
        at.cluster.pass_time(0.01)
        assert told == ["done"] and at.role.live() == {"adapters": 0}


def test_what_one_cannot_hold_is_refused_with_its_reason() -> None:
    with desk("1e1p1d", GATEWAY, "adapters", SETTINGS) as at:
        told = begin(at, at.role.load(PIRATE, "pirate"))
        serial = lists(at)[0][1]
        for name in ("e0", "p0"):
            beat(at, name, serial, adapters=(PIRATE.digest,))
        beat(at, "d0", serial, unheld=((PIRATE.digest, "rank 64"),))
        at.cluster.pass_time(0.01)
        assert not told and lists(at)[0][1:] == (serial + 1, (("poet", ""),))
        for name in ("e0", "p0", "d0"):
            beat(at, name, serial + 1)
        at.cluster.pass_time(0.01)
        assert told == ["400 rank 64"]


def test_who_is_silent_holds_a_load_up_for_so_long() -> None:
    with desk("1e1p1d", GATEWAY, "adapters", SETTINGS) as at:
        told = begin(at, at.role.load(PIRATE, "pirate"))
        at.cluster.pass_time(LOAD_TIMEOUT_S - 1.0)
        assert told == []
        at.cluster.pass_time(1.1 + 2 * SETTINGS.timing.lost_after_s)
        assert len(told) == 1 and told[0].startswith("503 not every instance")
        assert begin(at, at.role.load(PIRATE, "pirate")) == []  # its name is free


@pytest.mark.parametrize("is_offered", [False, True])
def test_what_is_refused_at_once(is_offered: bool) -> None:
    with desk("1e1p1d", GATEWAY, "adapters", SETTINGS) as at:
        begin(at, at.role.load(PIRATE, "pirate"))
        if is_offered:
            serial = lists(at)[0][1]
            for name in ("e0", "p0", "d0"):
                beat(at, name, serial)
            at.cluster.pass_time(0.01)
        for name, sentence in (
            ("pirate", "400 the adapter name pirate is taken"),
            ("poet", "400 the adapter name poet is taken"),
            ("third", "400 2 adapters are loaded, which is all that --max-loras admits"),
        ):
            (told,) = begin(at, at.role.load(Adapter(name, "d"), "x"))
            assert told.startswith(sentence)
        for name in ("nobody", "") if is_offered else ("nobody", "pirate"):
            (told,) = begin(at, at.role.unload(name))
            assert told.startswith(f"404 no adapter {name} is loaded")
        if is_offered:
            begin(at, at.role.unload("pirate"))
            (told,) = begin(at, at.role.unload("pirate"))  # it is on its way out
            assert told.startswith("404")


def test_one_of_the_start_is_unloaded_like_any() -> None:
    with desk("1e1p1d", GATEWAY, "adapters", SETTINGS) as at:
        told = begin(at, at.role.unload("poet"))
        found = lists(at)
        assert found and found[0][2] == () and told == []
        for name in ("e0", "p0", "d0"):
            beat(at, name, found[0][1])
        at.cluster.pass_time(0.01)
        assert told == ["done"]
        beat(at, "p0", 0, adapters=("poet",))  # restarted, and has it by its settings
        assert lists(at) == [("p0", found[0][1], ())]


def joined(at: Desk, serial: int, *names: str, epoch: int) -> None:
    """An instance comes with a list of a former gateway."""
    paths = {name: "" if name == "poet" else name for name in names}
    brought = tuple((f"{name}-digest", path, name, True) for name, path in paths.items())
    listed = AdapterList(serial=serial, adapters=brought)
    (listener,) = at.whole.registry.join_listeners
    listener(SimpleNamespace(adapters=listed, adapters_of=epoch))
    at.cluster.pass_time(0.01)


def test_a_new_gateway_goes_on_with_the_newest_list() -> None:
    """Of a former one; what that has not is unloaded, and older ones and its own say nothing."""
    with desk("1e1p1d", GATEWAY, "adapters", SETTINGS) as at:
        own = at.actor.address.epoch
        at.said.clear()
        joined(at, 9, "poet", "third", epoch=own)
        assert not lists(at)
        joined(at, 5, "poet", "pirate", epoch=own - 1)
        _, serial, told = lists(at)[-1]
        assert told == (("poet", ""), ("pirate-digest", "pirate"))
        joined(at, 4, "poet", "fourth", epoch=own - 1)
        assert not lists(at) and "pirate" not in at.role.offered
        for name in ("e0", "p0", "d0"):
            beat(at, name, serial, adapters=("poet", "pirate-digest"))
        at.cluster.pass_time(0.01)
        assert at.role.offered["pirate"] == Adapter("pirate", "pirate-digest", changes_tower=True)
        joined(at, 6, "pirate", epoch=own - 1)
        assert lists(at)[-1][2] == (("pirate-digest", "pirate"),)
        assert list(at.role.offered) == ["pirate"]
