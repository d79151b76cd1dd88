"""Manifests of one cluster for Kubernetes: plain data, made of a topology and flags of `epd run`.

Theory of operation
-------------------
A gateway and each group of equal instances are a Deployment.  A process is called as its pod, so a
pod that replaces another is a new instance and never a second life of a name that may still write.
Instances find the gateway by a headless Service that has its address before it is ready: it is
ready only when every stage has an instance.  Pods of one node have a /dev/shm each, so rows and KV
go over TCP between pods, whatever node they are on.

`epd` refuses a cluster key that others can read, and a mounted Secret is readable by the pod's
group; so an init container copies it into memory with mode 0600.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from epd.topology import ROLES, Roles, parse_groups

Json: TypeAlias = "str | int | bool | list[Json] | dict[str, Json]"
Object: TypeAlias = dict[str, Json]

JOIN_PORT = 7000  # the gateway's end of the control plane
INSTANCE_PORT = 7001  # an instance's; bound when its model is loaded
USER_ID = 1000
KEY_DIR = "/run/epd"
KEY_FILE = "cluster-key.json"
MOUNT_DIR = "/etc/epd/secret"  # of the Secret, before its key is copied
CLAIM_DIR = "/models"
ENDPOINTS_S = 5  # until Services have forgotten a pod that ends
GRACE_S = 10  # behind the drain, to close


@dataclass(frozen=True, slots=True)
class ClusterManifests:
    """What is rendered.  Empty strings: not asked for."""

    name: str
    topology: str
    image: str
    flags: tuple[str, ...] = ()  # of `epd run`, for every process
    namespace: str = ""
    secret: str = ""  # empty: called as the cluster
    claim: str = ""  # a PersistentVolumeClaim with models
    gpu_resource: str = ""  # one of it for each rank of an instance
    num_ranks: int = 1  # of instances of which the topology does not say it
    cpu: str = ""
    memory: str = ""
    port: int = 8000
    drain_s: int = 30
    scaled: bool = False  # replicas are somebody else's business
    metrics_names: str = "epd"

    def groups(self) -> list[tuple[Roles, int, int]]:
        """Equal instances together, in the order of the topology: their roles, the ranks of each,
        and how many they are.  Raises ConfigError."""
        counted = Counter(parse_groups(self.topology, self.num_ranks))
        return [(roles, ranks, count) for (roles, ranks), count in counted.items()]


def manifests(cluster: ClusterManifests) -> list[Object]:
    """Services, then the gateway, then each group of instances.  Raises ConfigError."""
    made = [_api_service(cluster), _join_service(cluster), _gateway(cluster)]
    for roles, ranks, count in cluster.groups():
        made += [_instances(cluster, roles, ranks, count), _budget(cluster, roles, ranks)]
    return made


def component_of(roles: Roles, ranks: int) -> str:
    """A name for each group of equal instances, and for no other."""
    return "-".join([*roles, f"tp{ranks}"] if ranks > 1 else roles)


def named(cluster: ClusterManifests, api: str, kind: str, component: str) -> Object:
    """The head of an object; without a component it has the cluster's own name."""
    name = f"{cluster.name}-{component}" if component else cluster.name
    metadata: Object = {"name": name}
    if cluster.namespace:
        metadata["namespace"] = cluster.namespace
    metadata["labels"] = labels(cluster, component or "gateway")
    return {"apiVersion": api, "kind": kind, "metadata": metadata}


def labels(cluster: ClusterManifests, component: str) -> Object:
    prefix = "app.kubernetes.io"
    return {
        f"{prefix}/name": "epd",
        f"{prefix}/instance": cluster.name,
        f"{prefix}/component": component,
    }


def labels_of_pod(cluster: ClusterManifests, component: str, roles: Sequence[str]) -> Object:
    """Further ones are llm-d's, in no selector: `roles` in its words, and whose names /metrics has.

    To its endpoint picker a cluster is one server, at its gateway.
    """
    further: Object = {
        "llm-d.ai/engine-type": cluster.metrics_names,
        "llm-d.ai/role": "-".join(roles),
    }
    return labels(cluster, component) | further


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


def _gateway(cluster: ClusterManifests) -> Object:
    arguments = ["--role", "gateway", "--host", "0.0.0.0"]
    arguments += ["--listen", f"tcp://$(POD_IP):{JOIN_PORT}"]
    container = _container(cluster, arguments)
    container["env"] = [*_environment(), _api_keys(cluster)]
    container["ports"] = [
        {"name": "http", "containerPort": cluster.port},
        {"name": "join", "containerPort": JOIN_PORT},
    ]
    container["startupProbe"] = _http("/health", 2, 60)
    container["livenessProbe"] = _http("/health", 10, 3)
    container["readinessProbe"] = _http("/ready", 2, 2)
    container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(ENDPOINTS_S)]}}}
    grace_s = ENDPOINTS_S + cluster.drain_s + GRACE_S
    spec: Object = {  # two gateways would share the instances' heartbeats: the old one ends first
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": labels(cluster, "gateway")},
        "template": _pod(cluster, "gateway", ROLES, container, grace_s),
    }
    return named(cluster, "apps/v1", "Deployment", "gateway") | {"spec": spec}


def _instances(cluster: ClusterManifests, roles: Roles, ranks: int, count: int) -> Object:
    component = component_of(roles, ranks)
    arguments = ["--role", "+".join(roles), "--id", "$(POD_NAME)"]
    arguments += ["--join", f"tcp://{cluster.name}-join:{JOIN_PORT}"]
    arguments += ["--listen", f"tcp://$(POD_IP):{INSTANCE_PORT}"]
    container = _container(cluster, arguments, _of_ranks(cluster, ranks))
    container["env"] = list(_environment())
    container["ports"] = [{"name": "instance", "containerPort": INSTANCE_PORT}]
    container["readinessProbe"] = {"tcpSocket": {"port": "instance"}, "periodSeconds": 5}
    if resources := _resources(cluster, ranks):
        container["resources"] = resources
    spec: Object = {} if cluster.scaled else {"replicas": count}
    spec |= {  # no surge: there may be no further GPU
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
        },
        "minReadySeconds": 5,
        "selector": {"matchLabels": labels(cluster, component)},
        "template": _pod(cluster, component, roles, container, cluster.drain_s + GRACE_S),
    }
    return named(cluster, "apps/v1", "Deployment", component) | {"spec": spec}


def _budget(cluster: ClusterManifests, roles: Roles, ranks: int) -> Object:
    component = component_of(roles, ranks)
    selector: Object = {"matchLabels": labels(cluster, component)}
    spec: Object = {"maxUnavailable": 1, "selector": selector}
    return named(cluster, "policy/v1", "PodDisruptionBudget", component) | {"spec": spec}


def _of_ranks(cluster: ClusterManifests, ranks: int) -> list[str]:
    """Processes of one pod, each with a GPU of its own if there are any."""
    flags = ["--tensor-parallel-size", str(ranks)] if ranks > 1 else []
    if ranks > 1 and cluster.gpu_resource:
        flags += ["--device", ",".join(f"cuda:{rank}" for rank in range(ranks))]
    return flags


def _container(
    cluster: ClusterManifests, arguments: Sequence[str], own: Sequence[str] = ()
) -> Object:
    """`own`: flags that count more than the cluster's."""
    key = ["--cluster-key", f"{KEY_DIR}/{KEY_FILE}"]
    given = [flag.replace("$(", "$$(") for flag in cluster.flags]  # Kubernetes would expand it
    mounts: list[Json] = [
        {"name": "key", "mountPath": KEY_DIR, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if cluster.claim:
        mounts.append({"name": "models", "mountPath": CLAIM_DIR, "readOnly": True})
    return {
        "name": "epd",
        "image": cluster.image,
        "command": ["epd"],
        "args": ["run", *arguments, *key, *given, *own],
        "securityContext": _confined(),
        "volumeMounts": mounts,
    }


def _pod(
    cluster: ClusterManifests,
    component: str,
    roles: Sequence[str],
    container: Object,
    grace_s: int,
) -> Object:
    copy = ["install", "-m", "0600", f"{MOUNT_DIR}/{KEY_FILE}", f"{KEY_DIR}/{KEY_FILE}"]
    init: Object = {
        "name": "cluster-key",
        "image": cluster.image,
        "command": list(copy),
        "securityContext": _confined(),
        "volumeMounts": [
            {"name": "secret", "mountPath": MOUNT_DIR, "readOnly": True},
            {"name": "key", "mountPath": KEY_DIR},
        ],
    }
    spec: Object = {
        "terminationGracePeriodSeconds": grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [init],
        "containers": [container],
        "volumes": _volumes(cluster),
    }
    return {"metadata": {"labels": labels_of_pod(cluster, component, roles)}, "spec": spec}


def _volumes(cluster: ClusterManifests) -> list[Json]:
    name = cluster.secret or cluster.name
    items: list[Json] = [{"key": KEY_FILE, "path": KEY_FILE}]
    made: list[Json] = [
        {"name": "secret", "secret": {"secretName": name, "items": items}},
        {"name": "key", "emptyDir": {"medium": "Memory"}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if cluster.claim:
        claim: Object = {"claimName": cluster.claim, "readOnly": True}
        made.append({"name": "models", "persistentVolumeClaim": claim})
    return made


def _environment() -> tuple[Object, ...]:
    return (
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "HOME", "value": "/tmp"},  # caches of compilers; all else is read-only
    )


def _api_keys(cluster: ClusterManifests) -> Object:
    source: Object = {"name": cluster.secret or cluster.name, "key": "api-keys"}
    return {"name": "EPD_API_KEY", "valueFrom": {"secretKeyRef": source}}


def _resources(cluster: ClusterManifests, ranks: int) -> Object:
    requests: Object = {}
    if cluster.cpu:
        requests["cpu"] = cluster.cpu
    if cluster.memory:
        requests["memory"] = cluster.memory
    limits: Object = {"memory": cluster.memory} if cluster.memory else {}
    if cluster.gpu_resource:
        limits[cluster.gpu_resource] = ranks
    return {name: value for name, value in (("requests", requests), ("limits", limits)) if value}


def _confined() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _http(path: str, period_s: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "failureThreshold": failures,
    }
