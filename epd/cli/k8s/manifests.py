"""Manifests of one cluster for Kubernetes: plain data, made of a topology and flags of `epd run`.

Theory of operation
-------------------
A gateway and each group of equal instances are a Deployment.  A process is called as its pod, so a
pod that replaces another is a new instance and never a second life of a name that may still write.
Instances find the gateway by a headless Service that has its address before it is ready: it is
ready only when every stage has an instance.  Pods of one node have a /dev/shm each, so rows and KV
go over TCP between pods, whatever node they are on (`epd.cli.k8s.nodes` has other forms).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from epd.cli.k8s.pods import (
    GRACE_S,
    JOIN_PORT,
    PORTS,
    ClusterManifests,
    Json,
    Object,
    add_gateway,
    add_probes,
    container,
    labels,
    labels_of_all,
    named,
    pod,
    resources_of,
    same,
)
from epd.topology import ROLES, Roles

INSTANCE_PORT = 7001  # of an instance that is a pod
GATEWAY = ("2", "4Gi")  # CPUs and memory


def groups_of(cluster: ClusterManifests) -> list[tuple[Roles, int, int]]:
    """Equal instances together, in the order of the topology: their roles, the ranks of each,
    and how many they are.  Raises ConfigError."""
    counted = Counter(cluster.instances())
    return [(roles, ranks, count) for (roles, ranks), count in counted.items()]


def manifests(cluster: ClusterManifests) -> list[Object]:
    """Services, then the gateway, then each group of instances.  Raises ConfigError."""
    made = [*around(cluster), gateway(cluster), budget(cluster, "gateway")]
    for roles, ranks, count in groups_of(cluster):
        component = component_of(roles, ranks)
        template = instance_pod(cluster, roles, ranks)
        replicas = None if cluster.scaled else count
        made += [deployment(cluster, component, template, replicas), budget(cluster, component)]
    return made


def around(cluster: ClusterManifests) -> list[Object]:
    """Services and the rules of the network, whatever runs the pods."""
    return [_api_service(cluster), _join_service(cluster), *_network_policies(cluster)]


def component_of(roles: Roles, ranks: int) -> str:
    """A name for each group of equal instances, and for no other."""
    return "-".join([*roles, f"tp{ranks}"] if ranks > 1 else roles)


def _api_service(cluster: ClusterManifests) -> Object:
    ports: list[Json] = [{"name": "http", "port": cluster.port, "targetPort": "http"}]
    spec: Object = {"selector": labels(cluster, "gateway"), "ports": ports}
    return named(cluster, "v1", "Service", "") | {"spec": spec}


def _join_service(cluster: ClusterManifests) -> Object:
    spec: Object = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": labels(cluster, "gateway"),
        "ports": [{"name": "join", "port": JOIN_PORT, "targetPort": "join"}],
    }
    return named(cluster, "v1", "Service", "join") | {"spec": spec}


def _network_policies(cluster: ClusterManifests) -> list[Object]:
    """Pods of the cluster reach each other where they listen; all else reaches the API alone."""
    ports: list[Json] = [{"port": JOIN_PORT}, {"port": INSTANCE_PORT}]
    ports += [{"port": first, "endPort": last} for first, last in (PORTS, cluster.mooncake_ports)]
    everyone: Object = {"matchLabels": labels_of_all(cluster)}
    within: Object = {"from": [{"podSelector": everyone}], "ports": ports}
    at_gateway: Object = {"matchLabels": labels(cluster, "gateway")}
    api: Object = {"ports": [{"port": cluster.port}]}
    rules = (("within", everyone, within), ("gateway", at_gateway, api))
    return [
        named(cluster, "networking.k8s.io/v1", "NetworkPolicy", name)
        | {"spec": {"podSelector": whom, "policyTypes": ["Ingress"], "ingress": [rule]}}
        for name, whom, rule in rules
    ]


def gateway(cluster: ClusterManifests, nodes: int = 1) -> Object:
    arguments = ["--role", "gateway", *of_gateway(cluster, nodes)]
    made = container(cluster, arguments, resources=same(*GATEWAY))
    add_gateway(cluster, made)
    surge: Object = {"maxSurge": 1, "maxUnavailable": 0}  # it needs no GPU
    spec: Object = {
        "replicas": cluster.num_gateways,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": surge},
        "selector": {"matchLabels": labels(cluster, "gateway")},
        "template": pod(cluster, "gateway", ROLES, made, grace_s_of_gateway(cluster)),
    }
    return named(cluster, "apps/v1", "Deployment", "gateway") | {"spec": spec}


def of_gateway(cluster: ClusterManifests, nodes: int) -> list[str]:
    """`nodes`: with a whole topology each."""
    expected = f"expected_instances={nodes * len(cluster.instances())}"
    listen = f"tcp://$(POD_IP):{JOIN_PORT}"
    peers = f"http://{cluster.name}-join:{cluster.port}"
    return ["--host", "0.0.0.0", "--listen", listen, "--peers", peers, "--set", expected]


def grace_s_of_gateway(cluster: ClusterManifests) -> int:
    return cluster.rules.pre_stop_s + cluster.drain_s + GRACE_S


def grace_s_of_instance(cluster: ClusterManifests) -> int:
    """The kubelet's SIGTERM drains it, as `epd drain` does."""
    return cluster.drain_s + cluster.move_s + GRACE_S


def instance_pod(cluster: ClusterManifests, roles: Roles, ranks: int) -> Object:
    """Called as its pod."""
    arguments = ["--role", "+".join(roles), "--id", "$(POD_NAME)"]
    arguments += ["--join", f"tcp://{cluster.name}-join:{JOIN_PORT}"]
    arguments += ["--listen", f"tcp://$(POD_IP):{INSTANCE_PORT}"]
    resources = resources_of(cluster, ranks)
    made = container(cluster, arguments, _of_ranks(cluster, ranks), resources=resources)
    made["ports"] = [{"name": "instance", "containerPort": INSTANCE_PORT}]
    add_probes(cluster, made, 1, supervised=False)
    return pod(cluster, component_of(roles, ranks), roles, made, grace_s_of_instance(cluster))


def deployment(
    cluster: ClusterManifests, component: str, template: Object, replicas: int | None
) -> Object:
    """Without a surge: there may be no further GPU."""
    spec: Object = {} if replicas is None else {"replicas": replicas}
    spec |= {
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
        },
        "minReadySeconds": 5,
        "progressDeadlineSeconds": 3600,
        "selector": {"matchLabels": labels(cluster, component)},
        "template": template,
    }
    return named(cluster, "apps/v1", "Deployment", component) | {"spec": spec}


def budget(cluster: ClusterManifests, component: str) -> Object:
    selector: Object = {"matchLabels": labels(cluster, component)}
    spec: Object = {"maxUnavailable": 1, "selector": selector}
    return named(cluster, "policy/v1", "PodDisruptionBudget", component) | {"spec": spec}


def _of_ranks(cluster: ClusterManifests, ranks: int) -> list[str]:
    """Processes of one pod, each with a GPU of its own if there are any."""
    flags = ["--tensor-parallel-size", str(ranks)] if ranks > 1 else []
    return [*flags, *on_devices(cluster, ranks if ranks > 1 else 0), *on_cpus(cluster, ranks)]


def on_devices(cluster: ClusterManifests, count: int) -> Sequence[str]:
    if not count or not cluster.gpu_resource:
        return []
    return ["--device", ",".join(f"cuda:{at}" for at in range(count))]


def on_cpus(cluster: ClusterManifests, count: int) -> Sequence[str]:
    """Half of the pod's for threads of so many processes: they see the node's."""
    each = max(1, cluster.num_cpus // (2 * count))
    return ["--threads", str(each)] if cluster.num_cpus else []
