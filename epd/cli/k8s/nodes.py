"""Other forms of a cluster: a pod for each node, and objects of LeaderWorkerSet.

A pod of a node has a whole topology under one supervisor.  So rows and KV move within it by shared
memory or between its GPUs, and a process that ends or hangs is started anew without the pod.
"""

from __future__ import annotations

from epd.cli.k8s.manifests import (
    around,
    budget,
    component_of,
    deployment,
    gateway,
    grace_s_of_gateway,
    grace_s_of_instance,
    groups_of,
    instance_pod,
    of_gateway,
    on_cpus,
    on_devices,
)
from epd.cli.k8s.pods import (
    JOIN_PORT,
    ClusterManifests,
    Object,
    add_gateway,
    add_probes,
    container,
    labels_of_pod,
    named,
    pod,
    resources_of,
)
from epd.topology import ROLES

ROLLOUT: Object = {
    "type": "RollingUpdate",
    "rollingUpdateConfiguration": {"maxSurge": 0, "maxUnavailable": 1},
}


def pod_per_node(cluster: ClusterManifests, nodes: int) -> list[Object]:
    """The gateway, and on each node a pod with the whole topology.  Raises ConfigError."""
    joined = _node_pod(cluster, f"{cluster.name}-join")
    made = deployment(cluster, "node", joined, None if cluster.scaled else nodes)
    own = [gateway(cluster, nodes), budget(cluster, "gateway")]
    return [*around(cluster), *own, made, budget(cluster, "node")]


def leader_worker_set(cluster: ClusterManifests, nodes: int) -> list[Object]:
    """A group of pods with a topology each; the first has the gateway as well.

    A pod that is gone is made again alone: its instances join again by themselves.  Raises
    ConfigError.
    """
    leader = _whole(cluster, of_gateway(cluster, nodes))
    add_gateway(cluster, leader)
    first = pod(cluster, "gateway", ROLES, leader, grace_s_of_gateway(cluster))
    template: Object = {
        "size": nodes,
        "restartPolicy": "None",
        "leaderTemplate": first,
        "workerTemplate": _node_pod(cluster, "$(LWS_LEADER_ADDRESS)"),
    }
    spec: Object = {
        "replicas": 1,
        "rolloutStrategy": ROLLOUT,
        "leaderWorkerTemplate": template,
    }
    group = named(cluster, "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "") | {"spec": spec}
    return [*around(cluster), group]


def disaggregated_set(cluster: ClusterManifests) -> list[Object]:
    """A LeaderWorkerSet for each group of equal instances, of pods that stand alone, which roll out
    together.  Raises ConfigError."""
    roles: list[Object] = []
    for own, ranks, count in groups_of(cluster):
        component = component_of(own, ranks)
        template: Object = {"size": 1, "workerTemplate": instance_pod(cluster, own, ranks)}
        spec: Object = {
            "replicas": count,
            "rolloutStrategy": ROLLOUT,
            "leaderWorkerTemplate": template,
        }
        metadata: Object = {"labels": labels_of_pod(cluster, component, own)}
        roles.append({"name": component, "metadata": metadata, "spec": spec})
    api = "disaggregatedset.x-k8s.io/v1"
    made = named(cluster, api, "DisaggregatedSet", "") | {"spec": {"roles": [*roles]}}
    return [*around(cluster), gateway(cluster), budget(cluster, "gateway"), made]


def _node_pod(cluster: ClusterManifests, address: str) -> Object:
    """Its instances are called as the pod, and by the topology."""
    arguments = ["--id-prefix", "$(POD_NAME)", "--join", f"tcp://{address}:{JOIN_PORT}"]
    made = _whole(cluster, [*arguments, "--listen", "tcp://$(POD_IP):*"])
    add_probes(cluster, made, len(cluster.instances()), supervised=True)
    return pod(cluster, "node", ROLES, made, grace_s_of_instance(cluster))


def _whole(cluster: ClusterManifests, arguments: list[str]) -> Object:
    count = sum(ranks for _, ranks in cluster.instances())
    own = [*on_devices(cluster, count), *on_cpus(cluster, count)]
    what = ["--topology", cluster.topology, *arguments]
    return container(cluster, what, own, resources=resources_of(cluster, count))
