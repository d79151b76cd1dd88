"""Pods of one cluster: containers with their limits and probes, volumes, and places to run.

Theory of operation
-------------------
`epd` refuses a cluster key that others can read, and a mounted Secret is readable by the pod's
group; so an init container copies it into memory with mode 0600.

An instance has no HTTP.  Its probes ask the gateway (`epd k8s probe`).  It is ready while its
heartbeats arrive, which its event loop sends.  It is started anew if the gateway lacks it or has
declared it lost.  A gateway that does not answer proves nothing of an instance.

Listeners without a port of their own take one of `PORTS`, by a sysctl of the pod, so that a
NetworkPolicy can name them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from epd.topology import Roles, parse_groups

Json: TypeAlias = "str | int | bool | list[Json] | dict[str, Json]"
Object: TypeAlias = dict[str, Json]

JOIN_PORT = 7000  # the gateway's end of the control plane
PORTS = (20000, 20999)  # all other listeners of a pod, mooncake's own apart
USER_ID = 1000
KEY_DIR = "/run/epd"
KEY_FILE = "cluster-key.json"
MOUNT_DIR = "/etc/epd/secret"  # of the Secret, before its key is copied
CLAIM_DIR = "/models"
GRACE_S = 10  # behind the drain, to close
DRAIN = "kill -TERM 1; while kill -0 1; do sleep 0.2; done"  # a second SIGTERM would cut it short
LOADING_S = 1800  # until weights are read


@dataclass(frozen=True, slots=True)
class PodRules:
    """What a Kubernetes cluster has of its own for pods.  Empty: not asked for."""

    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[str, ...] = ()  # keys of taints, of any value and effect
    priority_class: str = ""
    pull_secret: str = ""
    pull_policy: str = "IfNotPresent"
    volumes: tuple[tuple[str, str], ...] = ()  # a claim, and where it is written to
    rdma_resource: str = ""
    pre_stop_s: int = 5  # until Services have forgotten a gateway that ends


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
    cpu: str = "4"
    memory: str = "16Gi"
    num_cpus: int = 0  # for threads of a pod's instances; 0: these are given
    port: int = 8000
    drain_s: int = 30
    move_s: int = 10  # behind the drain of an instance
    num_gateways: int = 2  # one may end
    scaled: bool = False  # replicas are somebody else's business
    metrics_names: str = "epd"
    mooncake_ports: tuple[int, int] = (15000, 17000)
    rules: PodRules = field(default_factory=PodRules)

    def instances(self) -> list[tuple[Roles, int]]:
        """Their roles and ranks, in the order of the topology.  Raises ConfigError."""
        return parse_groups(self.topology, self.num_ranks)


def named(cluster: ClusterManifests, api: str, kind: str, component: str) -> Object:
    """The head of an object; without a component it has the cluster's own name."""
    name = f"{cluster.name}-{component}" if component else cluster.name
    metadata: Object = {"name": name}
    if cluster.namespace:
        metadata["namespace"] = cluster.namespace
    metadata["labels"] = labels(cluster, component or "gateway")
    return {"apiVersion": api, "kind": kind, "metadata": metadata}


def labels(cluster: ClusterManifests, component: str) -> Object:
    return {**labels_of_all(cluster), "app.kubernetes.io/component": component}


def labels_of_all(cluster: ClusterManifests) -> Object:
    prefix = "app.kubernetes.io"
    return {f"{prefix}/name": "epd", f"{prefix}/instance": cluster.name}


def labels_of_pod(cluster: ClusterManifests, component: str, roles: Sequence[str]) -> Object:
    """Further ones are llm-d's, in no selector: `roles` in its words, and whose names /metrics has.

    To its endpoint picker a cluster is one server, at its gateway.
    """
    further: Object = {
        "llm-d.ai/engine-type": cluster.metrics_names,
        "llm-d.ai/role": "-".join(roles),
    }
    return labels(cluster, component) | further


def container(
    cluster: ClusterManifests,
    arguments: Sequence[str],
    own: Sequence[str] = (),
    *,
    resources: Object,
) -> Object:
    """`own`: flags that count more than the cluster's."""
    rdma = cluster.rules.rdma_resource
    key = ["--cluster-key", f"{KEY_DIR}/{KEY_FILE}"]
    given = [flag.replace("$(", "$$(") for flag in cluster.flags]  # Kubernetes would expand it
    mounts: list[Json] = [
        {"name": "key", "mountPath": KEY_DIR, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if cluster.claim:
        mounts.append({"name": "models", "mountPath": CLAIM_DIR, "readOnly": True})
    mounts += [{"name": f"to-{c}", "mountPath": path} for c, path in cluster.rules.volumes]
    return {
        "name": "epd",
        "image": cluster.image,
        "imagePullPolicy": cluster.rules.pull_policy,
        "command": ["epd"],
        "args": ["run", *arguments, *key, *given, *own],
        "env": list(_environment()),
        "resources": resources,
        "securityContext": _confined(locks_memory=bool(rdma) and rdma in str(resources)),
        "volumeMounts": mounts,
    }


def add_gateway(cluster: ClusterManifests, made: Object) -> None:
    """What a container has that serves the API as well."""
    source: Object = {"name": cluster.secret or cluster.name, "key": "api-keys"}
    key: Object = {"name": "EPD_API_KEY", "valueFrom": {"secretKeyRef": source}}
    made["env"] = [*_environment(), key]
    made["ports"] = [
        {"name": "http", "containerPort": cluster.port},
        {"name": "join", "containerPort": JOIN_PORT},
    ]
    made["startupProbe"] = _http("/health", 2, 60)
    made["livenessProbe"] = _http("/health", 10, 3)
    made["readinessProbe"] = _http("/ready", 2, 2)
    add_pre_stop(made, "sleep", str(cluster.rules.pre_stop_s))


def add_pre_stop(made: Object, *command: str) -> None:
    made["lifecycle"] = {"preStop": {"exec": {"command": list(command)}}}


def add_probes(cluster: ClusterManifests, made: Object, count: int, *, supervised: bool) -> None:
    """Of so many instances, as the gateway has them.

    `supervised`: whatever ends or hangs is started anew within the container, and may be lost until
    it has read its weights.
    """
    where = f"{cluster.name}-join:{cluster.port}"
    ask = f'exec epd k8s probe --gateway {where} --pod "$POD_NAME" --instances {count}'
    add_pre_stop(made, "sh", "-c", DRAIN)
    made["startupProbe"] = _exec(ask, 10, LOADING_S // 10)
    made["livenessProbe"] = _exec(f"{ask} --alive", 20, LOADING_S // 20 if supervised else 3)
    made["readinessProbe"] = _exec(ask, 10, 2)


def _exec(command: str, period_s: int, failures: int) -> Object:
    """By a shell, which has the variables of the container."""
    return {
        "exec": {"command": ["sh", "-c", command]},
        "periodSeconds": period_s,
        "failureThreshold": failures,
        "timeoutSeconds": 10,
    }


def pod(
    cluster: ClusterManifests, component: str, roles: Sequence[str], made: Object, grace_s: int
) -> Object:
    """`made`: its container."""
    rules = cluster.rules
    copy = ["install", "-m", "0600", f"{MOUNT_DIR}/{KEY_FILE}", f"{KEY_DIR}/{KEY_FILE}"]
    init: Object = {
        "name": "cluster-key",
        "image": cluster.image,
        "imagePullPolicy": rules.pull_policy,
        "command": list(copy),
        "resources": same("100m", "64Mi"),
        "securityContext": _confined(),
        "volumeMounts": [
            {"name": "secret", "mountPath": MOUNT_DIR, "readOnly": True},
            {"name": "key", "mountPath": KEY_DIR},
        ],
    }
    spread: Object = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels(cluster, component)},
    }
    ports: Object = {"name": "net.ipv4.ip_local_port_range", "value": "{} {}".format(*PORTS)}
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
            "sysctls": [ports],
        },
        "topologySpreadConstraints": [spread],
        "initContainers": [init],
        "containers": [made],
        "volumes": _volumes(cluster),
    }
    if rules.node_selector:
        spec["nodeSelector"] = dict(rules.node_selector)
    if rules.tolerations:
        spec["tolerations"] = [{"key": key, "operator": "Exists"} for key in rules.tolerations]
    if rules.priority_class:
        spec["priorityClassName"] = rules.priority_class
    if rules.pull_secret:
        spec["imagePullSecrets"] = [{"name": rules.pull_secret}]
    return {"metadata": {"labels": labels_of_pod(cluster, component, roles)}, "spec": spec}


def resources_of(cluster: ClusterManifests, num_gpus: int) -> Object:
    """Requests are limits, so that a pod is not the first to be evicted."""
    made = same(cluster.cpu, cluster.memory)
    for name, count in ((cluster.gpu_resource, num_gpus), (cluster.rules.rdma_resource, 1)):
        if name and isinstance(limits := made["limits"], dict):
            limits[name] = count
    return made


def same(cpu: str, memory: str) -> Object:
    return {
        "requests": {"cpu": cpu, "memory": memory},
        "limits": {"cpu": cpu, "memory": memory},
    }


def _volumes(cluster: ClusterManifests) -> list[Json]:
    name = cluster.secret or cluster.name
    items: list[Json] = [{"key": KEY_FILE, "path": KEY_FILE}]
    shm: Object = {"medium": "Memory", "sizeLimit": cluster.memory}
    made: list[Json] = [
        {"name": "secret", "secret": {"secretName": name, "items": items}},
        {"name": "key", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": shm},
    ]
    if cluster.claim:
        models: Object = {"claimName": cluster.claim, "readOnly": True}
        made.append({"name": "models", "persistentVolumeClaim": models})
    for claim, _ in cluster.rules.volumes:
        made.append({"name": f"to-{claim}", "persistentVolumeClaim": {"claimName": claim}})
    return made


def _environment() -> tuple[Object, ...]:
    return (
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "HOME", "value": "/tmp"},  # caches of compilers; all else is read-only
    )


def _confined(*, locks_memory: bool = False) -> Object:
    capabilities: Object = {"drop": ["ALL"]}
    if locks_memory:
        capabilities["add"] = ["IPC_LOCK"]
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": capabilities,
    }


def _http(path: str, period_s: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "failureThreshold": failures,
    }
