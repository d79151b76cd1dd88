"""The leader's part of a group over hosts, as a command of its host starts it."""

from __future__ import annotations

import msgspec

from epd.config import ConfigError, InstanceConfig
from epd.runtime.loading import backends_of
from epd.transport.backends import BACKENDS
from epd.transport.endpoint import is_tcp, split_tcp


def of_this_host(ranks: list[int], elsewhere: int) -> list[int]:
    """How many ranks of each instance are left here.  Raises ConfigError."""
    groups = [index for index, num_ranks in enumerate(ranks) if num_ranks > 1]
    if len(groups) != 1 or not 0 < elsewhere < ranks[groups[0]]:
        raise ConfigError(
            f"--ranks-elsewhere {elsewhere} is of one group, whose leader is here: start one "
            f"instance of more than {max(elsewhere, 0)} ranks, such as 1pd:tp{abs(elsewhere) + 1}, "
            "and other groups by commands of their own"
        )
    return [n - elsewhere * (index in groups) for index, n in enumerate(ranks)]


def with_ranks_elsewhere(instance: InstanceConfig, number: int, port: int) -> InstanceConfig:
    """Its transports are those that all ranks have: between hosts.  Raises ConfigError."""
    if not is_tcp(instance.endpoint):
        raise ConfigError(
            "ranks of other hosts join an address of this one: add --listen tcp://ADDRESS:PORT"
        )
    names = [backend.name for backend in backends_of(instance)]
    near = [name for name in names if name in BACKENDS and not BACKENDS[name].leaves_host]
    if near and instance.transport != "auto":
        raise ConfigError(
            f"--transport {instance.transport}: {near[0]} does not leave a host, and ranks are on "
            "several; name tcp, mooncake or nixl"
        )
    return msgspec.structs.replace(
        instance,
        transport=",".join(name for name in names if name not in near),
        ranks_elsewhere=number,
        ranks_endpoint=f"tcp://{split_tcp(instance.endpoint)[0]}:{port}",
    )
