"""Manifests in every form that `epd k8s render` has, and where their pods are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from epd.cli.main import main

Manifest = dict[str, Any]
ON_GPUS = "--device cuda --image registry.example/epd:1"
ALL_RULES = (
    "--node-selector pool/kind=gpu --toleration nvidia.com/gpu --priority-class serving "
    "--pull-secret registry --pull-policy Always --volume rows:/rows --pre-stop 15 "
    "--encoder-cache-dir /rows/cache --rdma-resource rdma/hca --cpu 16 --memory 64Gi"
)
FORMS = {
    "deployments": f"--topology 2e1pd:tp2,1pd {ON_GPUS} {ALL_RULES}",
    "pod-per-node": f"--topology 2e2pd --pod-per-node --nodes 3 {ON_GPUS}",
    "lws": f"--topology 1e1pd:tp2 --lws --nodes 2 {ON_GPUS} {ALL_RULES}",
    "disaggregated-set": f"--topology 2e1p:tp2,1d --disaggregated-set {ON_GPUS} {ALL_RULES}",
}


def rendered_as(form: str, captured: pytest.CaptureFixture[str], *flags: str) -> list[Manifest]:
    assert main(["k8s", "render", *FORMS[form].split(), *flags]) == 0
    return list(yaml.safe_load_all(captured.readouterr().out))


def templates(objects: list[Manifest]) -> Iterator[Manifest]:
    """Of pods, whatever makes them."""
    for one in objects:
        spec = one["spec"]
        if one["kind"] == "Deployment":
            yield spec["template"]
        sets = {"LeaderWorkerSet": [spec], "DisaggregatedSet": []}.get(one["kind"], [])
        if one["kind"] == "DisaggregatedSet":
            sets = [role["spec"] for role in spec["roles"]]
        for group in sets:
            parts = group["leaderWorkerTemplate"]
            yield from (parts[n] for n in ("leaderTemplate", "workerTemplate") if n in parts)
