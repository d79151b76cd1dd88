"""Objects for operators that a Kubernetes cluster may have: Prometheus, KEDA, an inference gateway.

All of them look at the gateway, whose /metrics has every instance."""

from __future__ import annotations

from epd.cli.k8s.manifests import component_of, groups_of
from epd.cli.k8s.pods import ClusterManifests, Json, Object, labels, named
from epd.topology import Roles

# Above these there are too few; guesses to begin with.
LOAD_S = 2  # predicted seconds of images, or of prompts, that wait for each instance
WAITING = 4  # requests that wait for the batch of each that decodes
PICKER_PORT = 9002  # of the extension's endpoint picker


def pod_monitor(cluster: ClusterManifests) -> Object:
    """For the operator of Prometheus; `instance` stays the name that epd gives."""
    endpoint: Object = {"port": "http", "path": "/metrics", "honorLabels": True}
    spec: Object = {
        "selector": {"matchLabels": labels(cluster, "gateway")},
        "podMetricsEndpoints": [endpoint],
    }
    return named(cluster, "monitoring.coreos.com/v1", "PodMonitor", "gateway") | {"spec": spec}


def scaled_objects(
    cluster: ClusterManifests, prometheus_url: str, max_replicas: int
) -> list[Object]:
    """For KEDA, one for each group.  Raises ConfigError."""
    made = []
    for roles, ranks, count in groups_of(cluster):
        component = component_of(roles, ranks)
        spec: Object = {
            "scaleTargetRef": {"name": f"{cluster.name}-{component}"},
            "minReplicaCount": count,
            "maxReplicaCount": max(count, max_replicas),
            "triggers": [
                _trigger(query, threshold, prometheus_url)
                for query, threshold in _queries(cluster, roles, component)
            ],
        }
        made.append(named(cluster, "keda.sh/v1alpha1", "ScaledObject", component) | {"spec": spec})
    return made


def _queries(cluster: ClusterManifests, roles: Roles, component: str) -> list[tuple[str, int]]:
    """The work that waits for a group, and how much of it each instance may have."""
    chosen = f'instance=~"{cluster.name}-{component}-[^-]+-[^-]+"'
    if cluster.namespace:
        chosen = f'namespace="{cluster.namespace}",{chosen}'
    queries = [
        (_at_all(f'epd_instance_load_seconds{{stage="{stage}",{chosen}}}'), LOAD_S)
        for stage in ("encode", "prefill")
        if stage in roles
    ]
    if "decode" in roles:
        queries.append((_at_all(f"epd_instance_requests_waiting{{{chosen}}}"), WAITING))
    return queries


def _at_all(metric: str) -> str:
    """Each gateway shows every instance."""
    return f"sum(max by (instance) ({metric}))"


def _trigger(query: str, threshold: int, prometheus_url: str) -> Json:
    metadata: Object = {
        "serverAddress": prometheus_url,
        "query": query,
        "threshold": str(threshold),
    }
    return {"type": "prometheus", "metadata": metadata}


def picker_plugin() -> Object:
    """Of llm-d's endpoint picker, for its configuration: whose metrics are what, of pods whose
    label `llm-d.ai/engine-type` is `epd`.  It has those of `vllm` by itself."""
    own: Object = {
        "name": "epd",
        "queuedRequestsSpec": "epd_requests_waiting",
        "runningRequestsSpec": "epd_requests_running",
        "kvUsageSpec": "epd_kv_cache_usage",
        "cacheInfoSpec": "epd_cache_config_info",
    }
    return {"type": "core-metrics-extractor", "parameters": {"engineConfigs": [own]}}


def inference_pool(cluster: ClusterManifests, picker: str) -> Object:
    """Gateways of all clusters of the namespace; `picker`: the Service that chooses among them."""
    chosen = labels(cluster, "gateway")
    del chosen["app.kubernetes.io/instance"]
    spec: Object = {
        "selector": {"matchLabels": chosen},
        "targetPorts": [{"number": cluster.port}],
        "endpointPickerRef": {"name": picker, "port": {"number": PICKER_PORT}},
    }
    api = "inference.networking.k8s.io/v1"
    return named(cluster, api, "InferencePool", "") | {"spec": spec}
