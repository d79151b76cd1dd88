"""What is rendered, of the command line: checked as `epd run` checks it, and for pods besides."""

from __future__ import annotations

import argparse
import re
from operator import attrgetter
from pathlib import PurePosixPath

from epd.cli.configure import options
from epd.cli.configure.settings import leaves
from epd.cli.k8s.pods import ClusterManifests, PodRules
from epd.cli.parser import UsageError
from epd.config import ConfigError, Settings
from epd.scheduling.pairing import HOPS
from epd.transport.backends import BACKENDS, is_foreign

GIVEN = {  # settings that the manifests decide, and why
    "host": "the gateway listens on all addresses of its pod",
    "access.api_keys": "keys come from the Secret",
    "access.key_file": "keys come from the Secret",
    "access.ssl_certfile": "let TLS end before the Service",
    "access.ssl_keyfile": "let TLS end before the Service",
    "access.ssl_ca_certs": "let TLS end before the Service",
    "health_when_ready": "the manifests ask /health and /ready for what each tells",
    "cluster_key": "it comes from the Secret",
    "peers": "gateways find each other by the headless Service",
    "cpus_per_instance": "each pod is one process",
    "engine.cpu_affinity": "each pod has its own CPUs",
}
# Paths that are not here.
IN_IMAGE = ("chat_template", "engine.lora.runtime_dir", "limits.allowed_local_media_path")
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,22}[a-z0-9])?")  # room for what Kubernetes appends
DIRECTORIES = ("transport_directory", "profile_dir", "encode.cache_dir")  # that pods write to
CPUS = re.compile(r"(\d+(?:\.\d+)?)(m?)")
LABEL_VALUE = re.compile(r"([A-Za-z0-9./_-]+)=([A-Za-z0-9._-]*)")


def cluster_of(args: argparse.Namespace) -> ClusterManifests:
    """Raises UsageError, or ConfigError where `epd run` would refuse the flags."""
    if not DNS_LABEL.fullmatch(args.name):
        raise UsageError(
            f"--name {args.name!r}: write up to 24 small letters, digits and hyphens, such as epd"
        )
    flags = flags_of(args)
    settings = _settings(args)
    if args.gateways is not None and args.form == "--lws":
        raise UsageError("--lws has one gateway, in its first pod: drop --gateways")
    if args.gateways is not None and args.gateways < 1:
        raise UsageError(f"--gateways {args.gateways}: there is at least one")
    if not settings.port:
        raise UsageError("--port 0: a Service needs to know the port; choose one")
    on_gpu = settings.engine.device != "cpu"
    if settings.engine.device not in {"cpu", "cuda"}:
        raise UsageError(
            f"--device {settings.engine.device}: a pod has one for each rank; write cpu or cuda"
        )
    rules = _rules(args)
    _check_directories(settings, rules)
    cluster = ClusterManifests(
        name=args.name,
        topology=args.topology,
        image=args.image,
        flags=flags,
        namespace=args.namespace,
        secret=args.secret,
        claim=args.claim,
        gpu_resource=args.gpu_resource if on_gpu else "",
        num_ranks=settings.engine.tensor_parallel_size,
        cpu=args.cpu,
        memory=args.memory,
        num_cpus=0 if settings.engine.threads else _cpus(args.cpu),
        port=settings.port,
        drain_s=round(settings.timing.drain_timeout_s),
        move_s=round(settings.timing.move_timeout_s),
        num_gateways=args.gateways or 2,
        scaled=bool(args.scale_by),
        metrics_names=settings.metrics_names,
        mooncake_ports=(settings.mooncake.min_port, settings.mooncake.max_port),
        rules=rules,
    )
    lists = vars(args).get("engine.lora.runtime_dir")
    if lists and cluster.num_gateways > 1 and args.form != "--lws":
        raise ConfigError(
            "each gateway has a list of adapters of its own: drop --lora-runtime-dir and name them "
            "at the start (--lora-modules), or add --gateways 1"
        )
    _check_transport(settings.transport, cluster, args.nodes if args.form else 0)
    if args.form and args.scale_by:
        raise UsageError(f"--scale-by scales Deployments of equal instances: drop {args.form}")
    if args.form not in {"--pod-per-node", "--lws"} and args.nodes != 1:
        raise UsageError("--nodes is for --pod-per-node and --lws")
    return cluster


def _rules(args: argparse.Namespace) -> PodRules:
    selector, volumes = [], []
    for text in args.node_selector:
        if not (found := LABEL_VALUE.fullmatch(text)):
            raise UsageError(f"--node-selector {text!r}: write LABEL=VALUE")
        selector.append((found[1], found[2]))
    for text in args.volume:
        claim, _, path = text.partition(":")
        if not DNS_LABEL.fullmatch(claim) or not PurePosixPath(path).is_absolute():
            raise UsageError(f"--volume {text!r}: write CLAIM:/PATH, such as rows:/rows")
        volumes.append((claim, path))
    return PodRules(
        node_selector=tuple(selector),
        tolerations=tuple(args.toleration),
        priority_class=args.priority_class,
        pull_secret=args.pull_secret,
        pull_policy=args.pull_policy,
        volumes=tuple(volumes),
        rdma_resource=args.rdma_resource,
        pre_stop_s=args.pre_stop,
    )


def _cpus(text: str) -> int:
    """Whole ones of a quantity, at least one."""
    if not (found := CPUS.fullmatch(text)):
        raise UsageError(f"--cpu {text!r}: write a quantity such as 4 or 500m")
    return max(1, int(float(found[1]) / (1000 if found[2] else 1)))


def _check_directories(settings: Settings, rules: PodRules) -> None:
    """A pod's root is read-only."""
    places = [PurePosixPath("/tmp"), *(PurePosixPath(path) for _, path in rules.volumes)]
    for key in DIRECTORIES:
        path = attrgetter(key)(settings)
        if path and not any(PurePosixPath(path).is_relative_to(place) for place in places):
            raise UsageError(
                f"{leaves()[key].flag} {path} is in no volume that pods can write to: give "
                f"--volume CLAIM:{path}"
            )


def _check_transport(transport: str, cluster: ClusterManifests, nodes: int) -> None:
    """Two pods have no memory in common.  `nodes`: with all of the topology; 0: with instances."""
    names = transport.split(",")
    if any(n == "auto" or is_foreign(n) or BACKENDS[n].leaves_host for n in names):
        return
    roles = (
        [own for own, _ in cluster.instances()] if not nodes else [("encode", "prefill")] * nodes
    )
    if any(
        sends in one and takes in other
        for at, one in enumerate(roles)
        for other in (*roles[:at], *roles[at + 1 :])
        for sends, takes in HOPS
    ):
        raise UsageError(
            f"--transport {transport}: two pods have no memory in common; drop it, or give "
            "--pod-per-node with --nodes 1"
        )


def flags_of(args: argparse.Namespace) -> tuple[str, ...]:
    """What was given of `epd run`'s flags, to be written into command lines.  Raises UsageError."""
    if args.config is not None:
        raise UsageError("--config: a file of this host is in no pod; give --set KEY=VALUE instead")
    given = vars(args)
    words: list[str] = []
    for key, setting in leaves().items():
        value = given.get(key)
        if value is None:
            continue
        if key in GIVEN:
            raise UsageError(f"{setting.flag} is no choice here: {GIVEN[key]}; drop it")
        many = setting.type == tuple[str, ...]
        words.append(setting.flag)
        words += value if many else [] if value is True else [setting.in_words(value) or str(value)]
    if args.model_names:
        words += ["--served-model-name", *args.model_names]
    if args.speculative_config is not None:
        words += ["--speculative-config", args.speculative_config]
    for assignment in args.assignments:
        words += ["--set", assignment]
    if args.log_level:
        words += ["--log-level", args.log_level]
    return (*words, "--log-json") if args.log_json else tuple(words)


def _settings(args: argparse.Namespace) -> Settings:
    """As the pods will have them, but for paths that only the image can show."""
    here = {key: value for key, value in vars(args).items() if key not in IN_IMAGE}
    return options.settings_of(argparse.Namespace(**here))
