"""CPUs for the processes of one command: named by the user, or an equal number of its own each.

The gateway gets the rest, if there is any: it must neither wait for an instance's threads nor
disturb them."""

from __future__ import annotations

from epd.config import ConfigError, Settings
from epd.runtime.cpus import format_cpus, parse_cpus, usable_cpus


def deal_cpus(settings: Settings, count: int) -> tuple[list[str], str]:
    """Lists for `count` instances, in order, and one for the gateway; empty: not bound.

    Raises ConfigError when there are not enough.
    """
    named, each = settings.engine.cpu_affinity, settings.cpus_per_instance
    if not named and not each:
        return [""] * count, ""
    if named and each:
        raise ConfigError(
            "cpus_per_instance deals CPUs out and engine.cpu_affinity names them; give one of them"
        )
    usable = usable_cpus()
    lists = _named(named, count, usable) if named else _dealt(each, count, usable)
    taken = {cpu for cpus in lists for cpu in cpus}
    rest = tuple(cpu for cpu in usable if cpu not in taken)
    return [format_cpus(cpus) for cpus in lists], format_cpus(rest)


def _named(text: str, count: int, usable: tuple[int, ...]) -> list[tuple[int, ...]]:
    lists = [parse_cpus(part) for part in text.split("|")]
    missing = sorted({cpu for cpus in lists for cpu in cpus} - set(usable))
    if missing:
        raise ConfigError(
            f"engine.cpu_affinity names CPU {missing[0]}, which this process may not use; it has "
            f"{format_cpus(usable)}"
        )
    return [lists[index % len(lists)] for index in range(count)]


def _dealt(each: int, count: int, usable: tuple[int, ...]) -> list[tuple[int, ...]]:
    if each * count > len(usable):
        raise ConfigError(
            f"{count} instances of {each} CPUs need {each * count}, and this process may use "
            f"{len(usable)}; give fewer, or 0 to share them (--cpus-per-instance)"
        )
    return [usable[index * each : (index + 1) * each] for index in range(count)]
