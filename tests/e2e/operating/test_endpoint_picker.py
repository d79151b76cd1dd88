"""What llm-d's endpoint picker reads of a cluster: by the rules of its core-metrics-extractor.

A pod's label `llm-d.ai/engine-type` names an entry of `engineConfigs`.  Each of its specs is
`NAME{LABEL=VALUE,…}` and must match a series, or extraction fails; of equal times the first one
counts.  A gauge is read as it is, and so are whole numbers in the labels of the info.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from epd.cli.main import main
from epd.tiny import SAMPLES
from tests.e2e.client import data_url, post_all, question
from tests.e2e.server import Server

IMAGE = data_url((SAMPLES / "receipt-cafe.png").read_bytes())
VLLM = {  # which it has by itself
    "queuedRequestsSpec": "vllm:num_requests_waiting",
    "runningRequestsSpec": "vllm:num_requests_running",
    "kvUsageSpec": "vllm:kv_cache_usage_perc",
    "cacheInfoSpec": "vllm:cache_config_info",
}


def configured(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[str, dict[str, Any]]:
    """The engine's name on the gateway's pod, and the entry for it."""
    what = ["--topology", "1e1p1d", "--image", "I", "--inference-pool", "picker", *flags]
    assert main(["k8s", "render", *what]) == 0
    head, *texts = capsys.readouterr().out.split("---\n")
    objects = [yaml.safe_load(text) for text in texts]
    (pool,) = (one for one in objects if one["kind"] == "InferencePool")
    chosen = pool["spec"]["selector"]["matchLabels"].items()
    pods = [one["spec"]["template"] for one in objects if one["kind"] == "Deployment"]
    (labels,) = (
        pod["metadata"]["labels"] for pod in pods if chosen <= pod["metadata"]["labels"].items()
    )
    assert labels["llm-d.ai/role"] == "encode-prefill-decode"
    engine = labels["llm-d.ai/engine-type"]
    _, found, snippet = head.partition("# Among the plugins of llm-d's endpoint picker:\n")
    if not found:
        return engine, VLLM
    (plugin,) = yaml.safe_load("\n".join(line[1:] for line in snippet.splitlines()))
    assert plugin["type"] == "core-metrics-extractor"
    (entry,) = plugin["parameters"]["engineConfigs"]
    assert entry.pop("name") == engine and entry.keys() == VLLM.keys()
    return engine, entry


def extracted(text: str, spec: str) -> Sample:
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert spec in families, f"metric family {spec} not found"
    assert families[spec].type == "gauge"
    return families[spec].samples[0]


@pytest.mark.parametrize("names", ["epd", "vllm"])
def test_the_picker_reads_a_cluster(
    names: str, apart: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    (reply,) = asyncio.run(post_all(apart.base_url, [question("What is the total?", IMAGE)]))
    assert reply.status == 200
    engine, specs = configured(capsys, "--metrics-names", names)
    assert engine == names
    text = apart.get("/metrics")[1]
    found = {key: extracted(text, spec) for key, spec in specs.items()}
    for key in ("queuedRequestsSpec", "runningRequestsSpec"):
        assert found[key].value == int(found[key].value) >= 0
    assert 0 <= found["kvUsageSpec"].value <= 1
    info = found["cacheInfoSpec"].labels
    sizes = [int(info[label]) for label in ("block_size", "num_gpu_blocks")]
    assert min(sizes) > 0
    if names == "vllm":
        models = {sample.labels["model_name"] for sample in found.values()}
        assert models == {json.loads(apart.get("/v1/models")[1])["data"][0]["id"]}
