"""What one command starts: validated configurations of a gateway, of instances, or of both."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from epd.cli.configure.model_check import check_model, served_name
from epd.cli.configure.names import default_prefix, gateway_name
from epd.cli.configure.settings import gateway_config, instance_config
from epd.cli.start.cpus import deal_cpus
from epd.cli.start.rundir import cluster_dir, ipc_endpoint, make_private
from epd.config import ConfigError, GatewayConfig, InstanceConfig, LoraConfig, Settings
from epd.runtime import lines
from epd.runtime.logs import json_line
from epd.topology import (
    ROLES,
    Roles,
    check_ranks,
    name_instances,
    num_ranks_of,
    parse_groups,
    parse_roles,
)
from epd.transport.codec import check_instance_id
from epd.transport.endpoint import check_reach, is_tcp, split_tcp

GATEWAY_ID = "gateway"
RANKS_PORT = 7001


@dataclass(frozen=True, slots=True)
class LogOptions:
    level: str = "info"
    as_json: bool = False

    def say(self, line: str, text: str, fields: Mapping[str, object]) -> None:
        """A line of the console, or `text` with fields."""
        lines.say(json_line("info", "supervisor", "epd", text, fields) if self.as_json else line)


@dataclass(frozen=True, slots=True)
class StartPlan:
    """Processes to be. `gateway` is None where the instances join one that runs elsewhere."""

    gateway: GatewayConfig | None
    instances: tuple[InstanceConfig, ...]
    log: LogOptions
    run_dir: str  # of sockets and claims; exists and is private if a socket lies in it


@dataclass(frozen=True, slots=True)
class Placing:
    """Where the control plane of a command's processes is; empty strings mean the defaults.

    `join`: endpoints of gateways that run elsewhere, with commas between them. `listen`: own
    endpoint; of the gateway if the command starts one, else of its instance. `run_dir`: parent of
    the cluster's directory.
    `id_prefix`: what the names of its instances begin with.  `ranks_elsewhere`: of the group that
    it starts, which is one then; they ask for their places at `ranks_port`.
    """

    join: str = ""
    listen: str = ""
    run_dir: str = ""
    id_prefix: str = ""
    ranks_elsewhere: int = 0
    ranks_port: int = RANKS_PORT

    def named(self, name: str) -> str:
        """The name of an instance in its cluster.  Raises ConfigError."""
        prefix = self.id_prefix or default_prefix(self.join, self.listen)
        return f"{prefix}-{name}" if prefix else name


def plan_topology(text: str, settings: Settings, placing: Placing, log: LogOptions) -> StartPlan:
    """A process per instance, and a gateway unless one is joined.  The rest of the topology may be
    on other hosts, if these join or can be joined by them.  Raises what `_plan` raises."""
    is_whole = not (placing.join or is_tcp(placing.listen))
    groups = parse_groups(text, settings.engine.tensor_parallel_size, whole=is_whole)
    instances = name_instances([roles for roles, _ in groups])
    named = [(placing.named(name), roles) for name, roles in instances]
    ranks = [num_ranks for _, num_ranks in groups]
    return _plan(named, ranks, settings, placing, log, with_gateway=not placing.join)


def plan_encoders(text: str, settings: Settings, placing: Placing, log: LogOptions) -> StartPlan:
    """A process per encoder, and a gateway unless one is joined; somebody else has the rest of the
    topology.  Raises what `_plan` raises."""
    groups = parse_groups(text, settings.engine.tensor_parallel_size, whole=False) if text else []
    apart = [roles == ("encode",) or "encode" not in roles for roles, _ in groups]
    groups = [one for one in groups if one[0] == ("encode",)]
    if not groups or not all(apart):
        raise ConfigError(
            "--for goes with encoders apart: --role encode, or a --topology such as 2e or 1e1p1d"
        )
    named = [(placing.named(name), roles) for name, roles in name_instances([g[0] for g in groups])]
    ranks = [num_ranks for _, num_ranks in groups]
    return _plan(named, ranks, settings, placing, log, with_gateway=not placing.join)


def plan_role(
    text: str, instance_id: str, settings: Settings, placing: Placing, log: LogOptions
) -> StartPlan:
    """One process: `gateway`, `all`, or roles joined by `+`.  Raises what `_plan` raises."""
    if instance_id and placing.id_prefix:
        raise ConfigError("--id is the whole name of the instance: drop --id-prefix")
    if text == "gateway":
        if placing.join:
            raise ConfigError("--join is for workers; a gateway is what they join: drop it")
        if placing.id_prefix:
            raise ConfigError("a gateway has no --id-prefix: give its whole name, --id NAME")
        own = instance_id or gateway_name(placing.listen)
        check_instance_id(own)
        return _plan([], [], settings, placing, log, with_gateway=True, gateway_id=own)
    num_ranks = settings.engine.tensor_parallel_size
    if text == "all":
        if placing.join:
            raise ConfigError("--role all has its own gateway and joins none: drop --join")
        named = [(instance_id or placing.named("all"), ROLES)]
        return _plan(named, [num_ranks], settings, placing, log, with_gateway=True)
    roles = parse_roles(text)
    named = [(instance_id or _name_of(roles, placing), roles)]
    num_ranks = num_ranks_of(roles, num_ranks)
    check_ranks(f"role {text!r}", roles, num_ranks)
    return _plan(named, [num_ranks], settings, placing, log, with_gateway=False)


def plan_rank(leader: str, settings: Settings, placing: Placing, log: LogOptions) -> StartPlan:
    """Ranks of a group whose leader is on another host, one for each device.  The rest of its
    configuration is the leader's.  Raises what `_plan` raises."""
    if not is_tcp(placing.join) or not is_tcp(placing.listen):
        raise ConfigError(
            f"--rank-of {leader} needs --join tcp://ADDRESS:PORT, with the address of its leader "
            "and the --ranks-port of that, and an own address: --listen tcp://ADDRESS:*"
        )
    own = f"tcp://{split_tcp(placing.listen)[0]}:*"
    settings = _checked(settings, {"prefill", "decode"}, with_gateway=False)
    devices = settings.engine.device.split(",")
    cpus, _ = deal_cpus(settings, len(devices))
    instances = []
    for number, device in enumerate(devices, 1):
        name = f"rank-of-{leader}" + f"-{number}" * (number > 1)
        check_instance_id(name)
        its, others = _on_device(settings, device, cpus[number - 1]), tuple(devices[1:])
        config = instance_config(its, name, (), own, placing.join, others)
        instances.append(msgspec.structs.replace(config, rank_of=leader))
    for endpoint in (placing.join, own):
        _check_endpoint(endpoint, settings)
    directory = cluster_dir(settings.port, _base(placing))
    make_private(directory)
    return StartPlan(None, tuple(instances), log, str(directory))


def _check_lists(placing: Placing, settings: Settings) -> None:
    if "," in placing.join and settings.engine.lora.runtime_dir:
        raise ConfigError(
            "each gateway has a list of adapters of its own: with several, name them at the start"
        )


def _base(placing: Placing) -> Path | None:
    return Path(placing.run_dir).absolute() if placing.run_dir else None


def _name_of(roles: Roles, placing: Placing) -> str:
    """Of one process: by its pid, where that is a name: beside a gateway of the same host."""
    ((name, _),) = name_instances([roles])
    if placing.join or placing.id_prefix:
        return placing.named(name)
    return f"{name[:-1]}-{os.getpid()}"


def _plan(
    named: list[tuple[str, Roles]],
    ranks: list[int],
    settings: Settings,
    placing: Placing,
    log: LogOptions,
    *,
    with_gateway: bool,
    gateway_id: str = GATEWAY_ID,
) -> StartPlan:
    """Raises ConfigError, ModelError or TransportError: nothing has been started then."""
    for instance_id, _ in named:
        check_instance_id(instance_id)
    _check_lists(placing, settings)
    all_roles = {role for _, roles in named for role in roles}
    settings = _checked(settings, all_roles, with_gateway)
    directory = cluster_dir(settings.port, _base(placing))
    listens = placing.listen if with_gateway else ""
    gateway_endpoint = listens or placing.join or ipc_endpoint(directory, GATEWAY_ID)
    own = "" if with_gateway else placing.listen
    cpus, gateway_cpus = deal_cpus(settings, len(named))
    all_ranks, elsewhere = ranks, placing.ranks_elsewhere
    if elsewhere:
        from epd.cli.start.ranks import of_this_host, with_ranks_elsewhere

        ranks = of_this_host(ranks, elsewhere)
    devices = _deal_devices(settings.engine.device, ranks)
    lineage = secrets.token_hex(8)
    instances = tuple(
        instance_config(
            _on_device(settings, devices[index][0], cpus[index]),
            instance_id,
            roles,
            own or _instance_endpoint(directory, instance_id, gateway_endpoint, placing.listen),
            gateway_endpoint,
            tuple(devices[index][1:]),
            lineage,
        )
        for index, (instance_id, roles) in enumerate(named)
    )
    if elsewhere:
        instances = tuple(
            with_ranks_elsewhere(one, elsewhere, placing.ranks_port) if here < whole else one
            for one, here, whole in zip(instances, ranks, all_ranks, strict=True)
        )
    endpoints = [*gateway_endpoint.split(","), *(instance.endpoint for instance in instances)]
    for endpoint in endpoints:
        _check_endpoint(endpoint, settings)
    try:
        make_private(directory)
    except ConfigError:
        if any(endpoint.startswith(f"ipc://{directory}/") for endpoint in endpoints):
            raise
    if own and len(instances) > 1 and not own.endswith(":*"):
        raise ConfigError(f"--listen {own} names one endpoint for several instances: write port *")
    gateway = msgspec.structs.replace(
        gateway_config(settings, gateway_id, gateway_endpoint, gateway_cpus),
        starts_instances=bool(instances),
        expected_instances=settings.expected_instances or len(instances),
    )
    return StartPlan(gateway if with_gateway else None, instances, log, str(directory))


def _checked(settings: Settings, roles: set[str], with_gateway: bool) -> Settings:
    """With directories that are absolute, and what is in them looked at.  Raises ConfigError and
    ModelError."""
    checkpoint = check_model(
        settings.model_dir,
        roles,
        with_gateway,
        weights=settings.engine.load_format != "dummy",
        allow_unused=settings.engine.allow_unused_tensors,
        template=settings.chat_template,
    )
    settings = msgspec.structs.replace(
        settings,
        model_dir=str(checkpoint.directory),
        model_name=settings.model_name or served_name(settings.model_dir),
    )
    if settings.engine.lora == LoraConfig():
        return settings
    from epd.cli.configure.adapters import checked

    return checked(settings)


def _deal_devices(text: str, ranks: list[int]) -> list[list[str]]:
    """Of several devices each rank gets the next one, in the order of the topology.

    Raises ConfigError if ranks of one instance would share a GPU.
    """
    devices = text.split(",")
    dealt, first = [], 0
    for num_ranks in ranks:
        if num_ranks > len(devices) and devices != ["cpu"]:
            raise ConfigError(
                f"{num_ranks} ranks need {num_ranks} devices and --device {text} names "
                f"{len(devices)}: write cuda:0,cuda:1 and so on"
            )
        dealt.append([devices[(first + rank) % len(devices)] for rank in range(num_ranks)])
        first += num_ranks
    return dealt


def _on_device(settings: Settings, device: str, cpus: str) -> Settings:
    engine = msgspec.structs.replace(settings.engine, device=device, cpu_affinity=cpus)
    return msgspec.structs.replace(settings, engine=engine)


def _instance_endpoint(
    directory: Path, instance_id: str, gateway_endpoint: str, listen: str
) -> str:
    """On this host like the gateways': ipc, or a tcp port of the address they listen on."""
    of_tcp = [one for one in gateway_endpoint.split(",") if is_tcp(one)]
    if not of_tcp:
        return ipc_endpoint(directory, instance_id)
    if listen:
        return f"tcp://{split_tcp(listen)[0]}:*"
    if {split_tcp(one)[0] for one in of_tcp} <= {"127.0.0.1", "localhost"}:
        return "tcp://127.0.0.1:*"
    raise ConfigError(
        f"--join {gateway_endpoint} is on another host; tell where this instance can be reached "
        "from there: --listen tcp://ADDRESS-OF-THIS-HOST:*"
    )


def _check_endpoint(endpoint: str, settings: Settings) -> None:
    if not is_tcp(endpoint) and not endpoint.startswith("ipc://"):
        raise ConfigError(
            f"endpoint {endpoint!r} cannot be used: write tcp://HOST:PORT or ipc:///PATH/NAME.sock"
        )
    check_reach(endpoint, encrypted=bool(settings.cluster_key))
