"""`epd k8s render`: manifests of a topology for Kubernetes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from epd.cli.configure import options
from epd.cli.parser import UsageError, one_of

if TYPE_CHECKING:
    from epd.cli.k8s.pods import ClusterManifests, Object

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

FORMS = {
    "--pod-per-node": "on each of --nodes a pod with the whole topology and its GPUs",
    "--lws": "the same as a LeaderWorkerSet, whose first pod has the gateway as well",
    "--disaggregated-set": "instances as a DisaggregatedSet, so that roles roll out together",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", type=one_of("render", "probe"), help="render; probe: in pods only")
    group = parser.add_argument_group("manifests")
    add = group.add_argument
    add("--topology", default="", metavar="TOPOLOGY", help="such as 2e1p1d, 1e1pd:tp2")
    add("--image", default="", metavar="IMAGE", help="with epd in its PATH")
    add("--name", default="epd", help="of the cluster's objects, default epd")
    add("--namespace", default="", help="default: kubectl's")
    add("--secret", default="", metavar="NAME", help="default: --name")
    form = group.add_mutually_exclusive_group()
    for flag, text in FORMS.items():
        form.add_argument(
            flag, dest="form", action="store_const", const=flag, default="", help=text
        )
    add("--nodes", type=int, default=1, metavar="N", help="of --pod-per-node and --lws, default 1")
    add(
        "--gateways", type=int, metavar="N",
        help="that serve the API over the same instances (not with --lws), default 2",
    )  # fmt: skip
    add("--output", default="-", metavar="DIR", help="a file per object there; default -: stdout")
    _add_pods(parser)
    _add_operators(parser)
    probe = parser.add_argument_group("of probe")
    probe.add_argument("--gateway", default="", metavar="HOST:PORT", help="of the pod's cluster")
    probe.add_argument(
        "--pod", default="", metavar="NAME", help="what names of instances begin with"
    )
    probe.add_argument(
        "--instances", type=int, default=1, metavar="N", help="of the pod, default 1"
    )
    probe.add_argument(
        "--alive", action="store_true", help="0, too, if the gateway does not answer"
    )
    options.add_settings(parser, "where", "flags of epd run: where")
    options.add_settings(parser, "watch", "for what watches it")
    options.add_settings(parser, "hosts", "between pods")
    options.add_model_flags(parser)
    options.add_settings(parser, "encoders", "encoders: cache of rows, send buffer")
    options.add_settings(parser, "access", "who may ask, and what may be fetched")
    options.add_settings(parser, "limits", "limits and times")
    options.add_config_flags(parser)


def _add_pods(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("pods").add_argument
    add("--cpu", default="4", metavar="QUANTITY", help="of a pod with instances, default 4")
    add("--memory", default="16Gi", metavar="QUANTITY", help="and memory, default 16Gi")
    add("--claim", default="", metavar="NAME", help="a volume claim with models, read at /models")
    add(
        "--volume", action="append", default=[], metavar="CLAIM:/PATH",
        help="a volume claim that pods write to, for a flag with a directory; may be repeated",
    )  # fmt: skip
    add(
        "--gpu-resource", default="nvidia.com/gpu", metavar="NAME",
        help="one for each rank of an instance with --device cuda, default nvidia.com/gpu",
    )  # fmt: skip
    add(
        "--rdma-resource", default="", metavar="NAME",
        help="one for each pod with instances, such as rdma/hca, and the capability IPC_LOCK",
    )  # fmt: skip
    add("--node-selector", action="append", default=[], metavar="LABEL=VALUE", help="repeatable")
    add(
        "--toleration", action="append", default=[], metavar="KEY",
        help="of a taint of nodes, such as nvidia.com/gpu; may be repeated",
    )  # fmt: skip
    add("--priority-class", default="", metavar="NAME", help="of all pods")
    add("--pull-secret", default="", metavar="NAME", help="of the image's registry")
    add(
        "--pull-policy", type=one_of("Always", "IfNotPresent", "Never"), default="IfNotPresent",
        metavar="WHEN", help="Always, IfNotPresent or Never; default IfNotPresent",
    )  # fmt: skip
    add(
        "--pre-stop", type=int, default=5, metavar="SECONDS",
        help="until a gateway that ends is asked to, for Services to forget it; default 5",
    )  # fmt: skip


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
    if args.what == "probe":
        return _probe(args)
    from epd.cli.k8s import nodes, operators
    from epd.cli.k8s.choices import cluster_of
    from epd.cli.k8s.manifests import manifests

    if not args.topology or not args.image:
        raise UsageError("render needs --topology and --image")
    cluster = cluster_of(args)
    if args.form == "--pod-per-node":
        objects = nodes.pod_per_node(cluster, args.nodes)
    elif args.form == "--lws":
        objects = nodes.leader_worker_set(cluster, args.nodes)
    elif args.form == "--disaggregated-set":
        objects = nodes.disaggregated_set(cluster)
    else:
        objects = manifests(cluster)
    if args.pod_monitor:
        objects.append(operators.pod_monitor(cluster))
    if args.scale_by:
        objects += operators.scaled_objects(cluster, args.scale_by, args.max_replicas)
    head = _head(cluster)
    if args.inference_pool:
        objects.append(operators.inference_pool(cluster, args.inference_pool))
        head += _for_picker() if cluster.metrics_names == "epd" else ""
    _write(objects, head, args.output)
    return 0


def _probe(args: argparse.Namespace) -> int:
    from epd.cli.k8s.probe import problem

    if not args.gateway or not args.pod:
        raise UsageError("probe needs --gateway and --pod")
    found = problem(args.gateway, args.pod, args.instances, alive=args.alive)
    if found:
        print(found)
    return 1 if found else 0


def _head(cluster: ClusterManifests) -> str:
    from epd.cli.k8s.pods import KEY_FILE

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

    plain = type("Plain", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})
    texts = [yaml.dump(one, Dumper=plain, sort_keys=False, width=96) for one in objects]
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
