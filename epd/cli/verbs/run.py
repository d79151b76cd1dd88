"""`epd run`: one process with its roles, or a supervised topology."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from epd.cli.configure import options

if TYPE_CHECKING:
    from epd.cli.start.plan import StartPlan
    from epd.config import Settings
    from epd.runtime.program import ServerCommand

DESCRIPTION = """
Start one process with --role, one process per instance of a topology with --topology, ranks of an
instance of another host with --rank-of, or with --auto the topology that epd plan finds for a load.

A topology counts instances and names their roles: 2e1pd is two encoders and one instance of
prefill and decode; 1e1p1d has a process for each stage; 2epd are two replicas that do everything.
The supervisor shows a line per instance while they start, restarts what dies, and leaves nothing
behind after Ctrl-C or SIGTERM: open requests are finished first.

Processes of one host that use the same --port find each other. To join from another host, name the
gateway's endpoint with --join, an own address with --listen, and the same --cluster-key everywhere.
Then a topology may be a part, such as 1e1p here and 1d there.
A name that a living instance has is refused; one whose process is dead or lost is taken over.
Each pair of instances moves embeddings and KV over the best transport that both offer.
"""

EXAMPLES = (
    ("epd run --topology 1e1p1d", "the bundled tiny model behind http://127.0.0.1:8000/v1"),
    (
        "epd run --topology 2e1pd --model ~/Qwen3-VL-4B --dtype bfloat16 --kv-nbytes 4GiB",
        "a real checkpoint",
    ),
    (
        "epd run --topology 1e1pd --model Qwen/Qwen3-VL-4B-Instruct --device cuda:0,cuda:1",
        "one from the Hugging Face cache, on two GPUs (hf download puts it there)",
    ),
    (
        "epd run --role gateway --listen tcp://10.0.0.1:7000 --cluster-key key.json",
        "a gateway that other hosts can join",
    ),
    (
        "epd run --role encode --join tcp://10.0.0.1:7000 --listen tcp://10.0.0.2:7001",
        "an encoder on another host (and the same --cluster-key)",
    ),
    (
        (
            "epd run --topology 1pd:tp2 --ranks-elsewhere 1 --listen tcp://10.0.0.1:7000 "
            "--cluster-key key.json"
        ),
        "a gateway, and the first rank of a group over two hosts",
    ),
    (
        "epd run --rank-of pd0 --join tcp://10.0.0.1:7001 --listen tcp://10.0.0.2:7000",
        "its second rank, on the other host (and the same --cluster-key and --model)",
    ),
    (
        (
            "epd run --role encode --ec-transfer-config "
            """'{"ec_connector": "auto", "ec_role": "ec_both"}'"""
        ),
        "connectors as vLLM spells them",
    ),
    (
        (
            "epd run --role decode --join tcp://10.0.0.1:7000,tcp://10.0.0.2:7000 "
            "--listen tcp://10.0.0.3:7001"
        ),
        "a worker of two gateways, each started with --role gateway and an own --listen",
    ),
    ("epd run --role all --set timing.request_timeout_s=30", "everything in one process"),
    (
        "epd run --topology 1epd --model ~/Qwen3-VL-235B --load-format dummy --layers 2",
        "two layers of a large model, with random weights of config.json alone",
    ),
    ("epd run --topology 1epd --show-config", "all settings as they would be used, and no start"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_what(parser)
    options.add_place_flags(parser, port="")
    options.add_settings(parser, "watch", "for what watches it")
    _add_net(parser)
    _add_rest(parser)


def _add_what(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to start (one of the four)")
    what.add_argument(
        "--role", metavar="ROLES", help="gateway, all, or some of encode+prefill+decode"
    )
    what.add_argument("--topology", metavar="TOPOLOGY", help="such as 1e1p1d, 1e1pd, 2epd")
    what.add_argument(
        "--auto", default="", metavar="LOAD",
        help="the topology and settings that epd plan finds for this load, on the GPUs of --device "
        "or all of this host; what it cannot plan is refused before anything starts",
    )  # fmt: skip
    what.add_argument("--slo", default="", metavar="BOUNDS", help="of --auto, as in epd plan")
    what.add_argument(
        "--rank-of", metavar="NAME",
        help="ranks of instance NAME, whose leader is on another host (--ranks-elsewhere); one for "
        "each --device. They wait for the leader, and for its next life when it ends",
    )  # fmt: skip
    what.add_argument(
        "--for", dest="peer", default="", choices=("vllm",), metavar="vllm",
        help="with --role encode or a topology such as 1e1p1d: its encoders and a gateway; vLLM "
        "servers compute prompts and answers; prints how to start them (docs/vllm.md)",
    )  # fmt: skip
    what.add_argument(
        "--start-vllm", nargs="?", const="", metavar="FLAGS",
        help="with --for vllm: those servers are started here, by `vllm` of this environment; they "
        "are restarted and ended as the other processes are. --start-vllm='--max-model-len 4096' "
        "has further flags of `vllm serve`",
    )  # fmt: skip
    what.add_argument("--id", dest="instance_id", default="", metavar="NAME", help="with --role")
    what.add_argument(
        "--id-prefix", default="", metavar="NAME",
        help="what names of instances begin with; default with --join: this host's name (and its "
        "address, and a number from its second command on)",
    )  # fmt: skip


def _add_net(parser: argparse.ArgumentParser) -> None:
    net = options.add_settings(parser, "hosts", "between hosts")
    net.add_argument(
        "--join", default="", metavar="ENDPOINT",
        help="the gateway's tcp:// endpoint, or those of several, with commas between them; a name "
        "with several addresses stands for as many gateways, and is looked up again and again. "
        "With --rank-of the leader's address and --ranks-port",
    )  # fmt: skip
    net.add_argument(
        "--listen", default="", metavar="ENDPOINT",
        help="own endpoint for the other processes; default: ipc in the run directory",
    )  # fmt: skip
    net.add_argument(
        "--ranks-elsewhere", type=int, default=0, metavar="N",
        help="of the group that this command starts (1pd:tp2), the last N ranks run on other hosts "
        "(--rank-of); it serves when they are there. For networks of microseconds: docs/hosts.md",
    )  # fmt: skip
    net.add_argument(
        "--ranks-port", type=int, default=7001, metavar="PORT",
        help="where these ask for their places, at the address of --listen; default 7001",
    )  # fmt: skip
    net.add_argument("--new-key", metavar="FILE", help="write a new key file and exit")


def _add_rest(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("connectors, as vLLM spells them")
    for hop, text in (("ec", "rows, from encode to prefill"), ("kv", "KV, from prefill to decode")):
        group.add_argument(
            f"--{hop}-transfer-config", metavar="JSON",
            help=f'{text}: {{"{hop}_connector": ..., "{hop}_role": ...}}',
        )  # fmt: skip
    options.add_model_flags(parser).add_argument(
        "--layers", type=int, metavar="N",
        help="only the first N layers of the language model, behind the whole tower: to see how a "
        "large model starts and how fast it is (--load-format dummy), not for answers",
    )  # fmt: skip
    options.add_settings(parser, "encoders", "encoders: cache of rows, send buffer")
    options.add_settings(parser, "access", "who may ask, and what may be fetched")
    options.add_settings(parser, "limits", "limits and times (--show-config lists all settings)")
    options.add_config_flags(parser)
    parser.add_argument(
        "--show-config", action="store_true", help="print every setting as JSON and exit"
    )


def run(args: argparse.Namespace) -> int:
    if args.new_key:
        return _new_key(args.new_key)
    if args.auto or args.slo:
        _choose(args)
    if args.show_config:
        from epd.cli.configure.settings import shown

        print(json.dumps(shown(_settings(args)), indent=2))
        return 0
    with ExitStack() as held:
        plan = make_plan(args, held)
        from epd.cli.start.supervisor import run_role, run_topology

        if args.peer:
            return run_topology(plan, _vllm_servers(args, plan))
        return run_role(plan) if args.role else run_topology(plan)


def _vllm_servers(args: argparse.Namespace, plan: StartPlan) -> dict[str, ServerCommand]:
    """Those to start here, by name; else it prints how they are started.  Raises ConfigError."""
    from epd.runtime import lines
    from epd.vllm.command import check_startable, in_words, servers_of

    found = servers_of(plan, args.topology or "1e", args.start_vllm or "")
    if args.start_vllm is None:
        for server in found.values():
            lines.say(f"for prompts and answers start:\n  {in_words(server)}")
        return {}
    return check_startable(found)


def _choose(args: argparse.Namespace) -> None:
    """The topology of --auto, its devices and its settings.  Raises ConfigError, ModelError and
    UsageError."""
    from epd.cli.configure.settings import leaves, named
    from epd.cli.parser import UsageError
    from epd.runtime.cuda_driver import NoCuda, device_sizes

    given = vars(args)
    flags_of = {key: value for key, value in given.items() if key in leaves()}
    asked = named(args.config, args.assignments, flags_of)
    if not args.auto:
        raise UsageError("--slo bounds what --auto plans: add --auto LOAD")
    if args.role or args.topology or args.rank_of:
        raise UsageError("--auto finds the topology: leave out --role, --topology and --rank-of")
    if not (model := asked.get("model_dir")):
        raise UsageError("--auto plans for a model on GPUs: add --model")
    device = asked.pop("engine.device", "")
    if device.startswith("cpu") or asked.get("engine.tensor_parallel_size", 1) > 1:
        raise UsageError(
            "--auto plans for GPUs, an instance on each: leave out --device cpu and -tp"
        )
    try:
        devices = device.split(",") if device else [f"cuda:{n}" for n in range(len(device_sizes()))]
    except NoCuda as error:
        raise UsageError(f"--auto plans for GPUs: {error}") from None
    flags = ["--load", args.auto, "--gpus", str(len(devices)), "--model", model]
    flags += ["--slo", args.slo] if args.slo else []
    transport = asked.get("transport", "")
    flags += ["--transport", transport] if transport else []
    for name, value in asked.items():
        if name.startswith("engine.") or name in {"placement", "prefix_affinity", "encode_policy"}:
            flags += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    print(f"epd plan {' '.join(flags)}", file=sys.stderr, flush=True)
    try:
        planner = importlib.import_module("epd_lab.plan.verb")
    except ModuleNotFoundError as error:
        if error.name != "epd_lab":
            raise
        raise UsageError(
            "--auto asks the laboratory, which is not here: pip install epd-lab"
        ) from None
    args.topology, found = planner.best(flags)
    given["engine.device"] = ",".join(devices)
    args.assignments = [*args.assignments, *found]
    print(f"{args.topology} {' '.join(found)}".rstrip(), file=sys.stderr, flush=True)


def make_plan(args: argparse.Namespace, held: ExitStack) -> StartPlan:
    """What to start; everything that can be refused without starting is refused here.

    `held`: what is there as long as that."""
    from epd.cli.parser import UsageError
    from epd.cli.start.plan import plan_encoders, plan_rank, plan_role, plan_topology

    if args.start_vllm is not None and not args.peer:
        raise UsageError("--start-vllm goes with --for vllm")
    if sum(map(bool, (args.role, args.topology, args.rank_of))) != 1:
        raise UsageError(
            "say what to start: --role, --topology, --rank-of or --auto (epd run --help)"
        )
    if not 0 < args.ranks_port < 65536:
        raise UsageError(f"--ranks-port {args.ranks_port}: a port is 1 to 65535")
    settings = _settings(args)
    if args.topology and args.instance_id:
        raise UsageError("--id names one process: it goes with --role, not with --topology")
    if args.layers is not None:
        from epd.cli.scratch import scratch

        place = held.enter_context(scratch("epd-layers-"))
        settings = _of_first_layers(settings, args.layers, place)
    placing, log = options.placing_of(args), options.log_of(args)
    if settings.cluster_key:
        from epd.transport.bus.curve import ClusterKey

        ClusterKey.load(settings.cluster_key)
    if args.peer:
        text = "1e" if args.role == "encode" else args.topology or ""
        return plan_encoders(text, settings, placing, log)
    if args.rank_of:
        return plan_rank(args.rank_of, settings, placing, log)
    if args.topology:
        return plan_topology(args.topology, settings, placing, log)
    return plan_role(args.role, args.instance_id, settings, placing, log)


def _of_first_layers(settings: Settings, num_layers: int, place: Path) -> Settings:
    """With a directory of so many layers, which keeps the model's name.  Raises ModelError."""
    import msgspec

    from epd.cli.configure.hub import find_model
    from epd.cli.configure.model_check import bundled_model, served_name
    from epd.model_files.first_layers import cut

    given = settings.model_dir
    whole = find_model(given, weights=False) if given else bundled_model()
    target = place / whole.name
    return msgspec.structs.replace(
        settings,
        model_dir=str(cut(whole, num_layers, target)),
        model_name=settings.model_name or served_name(given),
        engine=msgspec.structs.replace(settings.engine, allow_unused_tensors=True),
    )


def _settings(args: argparse.Namespace) -> Settings:
    """All settings, with those of the connectors, which may set --id and --listen of `args`."""
    settings = options.settings_of(args)
    connectors = (args.ec_transfer_config, args.kv_transfer_config)
    if connectors == (None, None):
        return settings
    from epd.cli.configure.connectors import apply, read_transfer_configs
    from epd.cli.parser import UsageError

    if bool(args.role) == bool(args.topology):
        raise UsageError(
            "what a connector means depends on the roles: add --role or --topology, as you would "
            "start it"
        )
    applied = read_transfer_configs(*connectors, _roles_of(args))
    args.instance_id = _agreed("--id", args.instance_id, "engine_id", applied.instance_id)
    args.listen = _agreed("--listen", args.listen, "address", applied.listen)
    return apply(settings, applied)


def _agreed(flag: str, own: str, name: str, its: str) -> str:
    """Raises ConfigError if flag and connector differ."""
    from epd.config import ConfigError

    if own and its and own != its:
        raise ConfigError(f"{flag} is {own} and the connector's {name} {its}: drop one of them")
    return own or its


def _roles_of(args: argparse.Namespace) -> tuple[str, ...]:
    """All roles that the command starts, for flags of them together."""
    from epd.topology import ROLES, parse_groups, parse_roles

    if args.topology:
        played = {role for roles, _ in parse_groups(args.topology, whole=False) for role in roles}
        return tuple(role for role in ROLES if role in played)
    if args.role in {"all", "gateway"}:
        return ROLES if args.role == "all" else ()
    return parse_roles(args.role)


def _new_key(path: str) -> int:
    from epd.transport.bus.curve import ClusterKey

    ClusterKey.generate().save(path)
    print(f"{path} is written; copy it to every host and pass --cluster-key {path} to each process")
    return 0
