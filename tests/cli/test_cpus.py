"""CPUs of instances: how they are written, dealt out, and really bound."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from epd.cli.configure.settings import build_settings
from epd.cli.start import cpus as dealing
from epd.cli.start.cpus import deal_cpus
from epd.config import ConfigError, Settings
from epd.runtime.cpus import format_cpus, parse_cpus, usable_cpus


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealing, "usable_cpus", lambda: tuple(range(8)))


def settings(each: int = 0, named: str = "") -> Settings:
    base = Settings(cpus_per_instance=each)
    return msgspec.structs.replace(
        base, engine=msgspec.structs.replace(base.engine, cpu_affinity=named)
    )


@pytest.mark.parametrize("text", ["", "a", "3-1", "0,,1", "-1", "1-"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="list of CPUs"):
        parse_cpus(text)


def test_lists_are_written_as_taskset_writes_them() -> None:
    assert parse_cpus("0-2,8, 1") == (0, 1, 2, 8)
    assert parse_cpus(format_cpus(usable_cpus())) == usable_cpus()
    assert set(usable_cpus()) == os.sched_getaffinity(0)


def test_each_gets_its_own_and_the_gateway_the_rest() -> None:
    assert deal_cpus(settings(), 3) == (["", "", ""], "")
    assert deal_cpus(settings(2), 3) == (["0,1", "2,3", "4,5"], "6,7")
    assert deal_cpus(settings(4), 2) == (["0,1,2,3", "4,5,6,7"], "")
    assert deal_cpus(settings(named="0-1|5"), 3) == (["0,1", "5", "0,1"], "2,3,4,6,7")


def test_what_cannot_be_had_is_told() -> None:
    with pytest.raises(ConfigError, match="3 instances of 3 CPUs need 9, and this process may use"):
        deal_cpus(settings(3), 3)
    with pytest.raises(ConfigError, match="names CPU 8"):
        deal_cpus(settings(named="0-11"), 1)
    with pytest.raises(ConfigError, match="give one of them"):
        deal_cpus(settings(2, "0-1"), 1)
    with pytest.raises(ConfigError, match=r"engine.cpu_affinity.*as taskset does"):
        build_settings(flags={"engine.cpu_affinity": "0-1|two"})


def test_a_process_and_its_threads_are_bound() -> None:
    """In a process of its own: what is bound stays so."""
    cpu = min(os.sched_getaffinity(0))
    code = f"""
import os, threading
from epd.runtime.child import ChildSpec, _cpus_of
from epd.runtime.cpus import pin
from epd.config import EngineConfig, GatewayConfig, InstanceConfig
own = EngineConfig(cpu_affinity="{cpu}")
instance = InstanceConfig(instance_id="e0", roles=("encode",), engine=own)
spec = ChildSpec("e0", instance, GatewayConfig())
pin(_cpus_of(ChildSpec("gateway", None, GatewayConfig())))
before = os.sched_getaffinity(0)
pin(_cpus_of(spec))
seen = []
thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
thread.start(); thread.join()
print(len(before), seen == [{{{cpu}}}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(os.sched_getaffinity(0))), "True"]
