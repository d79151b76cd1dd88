"""Samples as Prometheus' text exposition format, version 0.0.4.

Nearly all of them are counted by instances and come with heartbeats, so nothing is registered with
prometheus_client, which writes the present samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from epd.frontend import Metric

# For whom a cluster is one server: a series of each, and the same meaning.
VLLM_NAMES = {
    "epd_requests_waiting": "vllm:num_requests_waiting",
    "epd_requests_running": "vllm:num_requests_running",
    "epd_kv_cache_usage": "vllm:kv_cache_usage_perc",
    "epd_cache_config_info": "vllm:cache_config_info",
}
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4.encode()


class _Told(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Family]:
        """All samples of a name together, as the format demands."""
        families: dict[str, Family] = {}
        for metric in self._metrics:
            name = _family(metric)
            if name not in families:
                families[name] = Family(name, metric.help, metric.kind)
            families[name].add_sample(metric.name, dict(metric.labels), metric.value)
        return families.values()


def with_vllm_names(metrics: Iterable[Metric], model_name: str) -> Iterator[Metric]:
    """All of them, and those of the whole cluster under vLLM's names as well."""
    for metric in metrics:
        yield metric
        if name := VLLM_NAMES.get(metric.name):
            labels = (("model_name", model_name), ("engine", "0"), *metric.labels)
            yield replace(metric, name=name, labels=labels)


def exposition(metrics: Iterable[Metric]) -> bytes:
    return generate_latest(_Told(metrics))


def _family(metric: Metric) -> str:
    """A histogram's samples have names of their own; a counter's family lacks its suffix."""
    if metric.kind == "histogram":
        return metric.name.rpartition("_")[0]
    return metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
