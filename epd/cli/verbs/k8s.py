"""`epd k8s render`: manifests of a topology for Kubernetes."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from epd.cli.configure import options
from epd.cli.parser import UsageError, one_of

if TYPE_CHECKING:
    from epd.cli.k8s.manifests import ClusterManifests, Object
    from epd.config import Settings

DESCRIPTION = """
Write the manifests of a topology, to look at and to give to kubectl: a Deployment of the gateway
and one for each group of equal instances, Services, and PodDisruptionBudgets. Flags of epd run are
given to every process. Nothing is sent anywhere, and no secret is written: the first lines say
which command makes it.

docs/kubernetes.md explains the choices, and what was not tried.
"""

EXAMPLES = (
    (
        "epd k8s render --topology 2e1p1d --image registry/epd:0.1 | kubectl apply -f -",
        "the bundled tiny model, to see it work",
    ),
    (
        (
            "epd k8s render --topology 1e2pd --image registry/epd:0.1-cuda --device cuda \\\n"
            "      --claim models --model /models/Qwen3-VL-4B --namespace vision --output manifests"
        ),
        "a GPU for each instance, a checkpoint of a volume claim, a file per object",
    ),
    (
        (
            "epd k8s render --topology 1e1p1d --image registry/epd:0.1 --pod-monitor \\\n"
            "      --scale-by http://prometheus.monitoring:9090 --max-replicas 4"
        ),
        "for the operators of Prometheus and KEDA",
    ),
)

GIVEN = {  # settings that the manifests decide, and why
    "host": "the gateway listens on all addresses of its pod",
    "access.api_keys": "keys come from the Secret",
    "access.ssl_certfile": "let TLS end before the Service",
    "access.ssl_keyfile": "let TLS end before the Service",
    "access.ssl_ca_certs": "let TLS end before the Service",
    "health_when_ready": "the manifests ask /health and /ready for what each tells",
    "cpus_per_instance": "each pod is one process",
    "engine.cpu_affinity": "each pod has its own CPUs",
}
IN_IMAGE = ("chat_template", "limits.allowed_local_media_path")  # paths that are not here
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,22}[a-z0-9])?")  # room for what Kubernetes appends


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", type=one_of("render"), help="render")
    group = parser.add_argument_group("manifests")
    group.add_argument(
        "--topology", required=True, metavar="TOPOLOGY", help="such as 2e1p1d, 1e1pd:tp2"
    )
    group.add_argument("--image", required=True, metavar="IMAGE", help="with epd in its PATH")
    group.add_argument("--name", default="epd", help="of the cluster's objects, default epd")
    group.add_argument("--namespace", default="", help="default: kubectl's")
    group.add_argument("--secret", default="", metavar="NAME", help="default: --name")
    group.add_argument(
        "--claim", default="", metavar="NAME", help="a volume claim with models, read at /models"
    )
    group.add_argument(
        "--gpu-resource", default="nvidia.com/gpu", metavar="NAME",
        help="one for each rank of an instance with --device cuda, default nvidia.com/gpu",
    )  # fmt: skip
    group.add_argument("--cpu", default="", metavar="QUANTITY", help="that an instance asks for")
    group.add_argument(
        "--memory", default="", metavar="QUANTITY", help="that an instance asks for, and its limit"
    )
    group.add_argument(
        "--output", default="-", metavar="DIR", help="a file per object there; default -: stdout"
    )
    _add_operators(parser)
    options.add_settings(parser, "where", "flags of epd run: where")
    options.add_settings(parser, "watch", "for what watches it")
    options.add_model_flags(parser)
    options.add_settings(parser, "encoders", "encoders: cache of rows, send buffer")
    options.add_settings(parser, "access", "who may ask, and what may be fetched")
    options.add_settings(parser, "limits", "limits and times")
    options.add_config_flags(parser)


def _add_operators(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("for operators that the cluster must have")
    group.add_argument("--pod-monitor", action="store_true", help="Prometheus scrapes the gateway")
    group.add_argument(
        "--scale-by", default="", metavar="URL",
        help="KEDA scales each group by what waits there, as this Prometheus knows",
    )  # fmt: skip
    group.add_argument(
        "--max-replicas", type=int, default=4, metavar="N", help="of a scaled group, default 4"
    )
    group.add_argument(
        "--inference-pool", default="", metavar="PICKER",
        help="an InferencePool of gateways, with the Service that picks one of them",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from epd.cli.k8s import operators
    from epd.cli.k8s.manifests import manifests

    cluster = cluster_of(args)
    objects = manifests(cluster)
    if args.pod_monitor:
        objects.append(operators.pod_monitor(cluster))
    if args.scale_by:
        objects += operators.scaled_objects(cluster, args.scale_by, args.max_replicas)
    if args.inference_pool:
        objects.append(operators.inference_pool(cluster, args.inference_pool))
    head = _head(cluster)
    if args.inference_pool and cluster.metrics_names == "epd":
        head += _for_picker()
    _write(objects, head, args.output)
    return 0


def cluster_of(args: argparse.Namespace) -> ClusterManifests:
    """Raises UsageError, or ConfigError where `epd run` would refuse the flags."""
    from epd.cli.k8s.manifests import ClusterManifests

    if not DNS_LABEL.fullmatch(args.name):
        raise UsageError(
            f"--name {args.name!r}: write up to 24 small letters, digits and hyphens, such as epd"
        )
    flags = flags_of(args)
    settings = _settings(args)
    if not settings.port:
        raise UsageError("--port 0: a Service needs to know the port; choose one")
    on_gpu = settings.engine.device != "cpu"
    if settings.engine.device not in {"cpu", "cuda"}:
        raise UsageError(
            f"--device {settings.engine.device}: a pod has one for each rank; write cpu or cuda"
        )
    return ClusterManifests(
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
        port=settings.port,
        drain_s=round(settings.timing.drain_timeout_s),
        scaled=bool(args.scale_by),
        metrics_names=settings.metrics_names,
    )


def flags_of(args: argparse.Namespace) -> tuple[str, ...]:
    """What was given of `epd run`'s flags, to be written into command lines.  Raises UsageError."""
    from epd.cli.configure.settings import leaves

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


def _head(cluster: ClusterManifests) -> str:
    from epd.cli.k8s.manifests import KEY_FILE

    where = f" --namespace {cluster.namespace}" if cluster.namespace else ""
    return (
        "# The Secret is not here. Once, before the first of these objects:\n"
        f"#   epd run --new-key {KEY_FILE}\n"
        f"#   kubectl create secret generic {cluster.secret or cluster.name}{where} \\\n"
        f"#     --from-file={KEY_FILE} --from-literal=api-keys=KEY   # several: with commas\n"
    )


def _for_picker() -> str:
    import yaml

    from epd.cli.k8s.operators import picker_plugin

    lines = yaml.safe_dump([picker_plugin()], sort_keys=False).splitlines()
    return "\n".join(
        ["# Among the plugins of llm-d's endpoint picker:", *map("#   {}".format, lines), ""]
    )


def _write(objects: list[Object], head: str, output: str) -> None:
    import yaml

    texts = [yaml.safe_dump(one, sort_keys=False, width=96) for one in objects]
    if output == "-":
        print(head + "---\n" + "---\n".join(texts), end="")
        return
    directory = Path(output)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        written = set()
        for one, text in zip(objects, texts, strict=True):
            metadata = one["metadata"]
            assert isinstance(metadata, dict)
            file = f"{str(one['kind']).lower()}-{metadata['name']}.yaml"
            (directory / file).write_text(head + "---\n" + text, encoding="utf-8")
            written.add(file)
    except OSError as error:
        raise UsageError(
            f"--output {output} cannot be written ({error.strerror}); give a directory of your own"
        ) from None
    print(f"{len(written)} files written to {directory}: kubectl apply -f {directory}")
