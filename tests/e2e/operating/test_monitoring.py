"""docs/monitoring, and objects of KEDA and of endpoint pickers, against a cluster that runs: each
name, and each label, that a rule asks for."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from epd.cli.k8s.operators import picker_plugin, scaled_objects
from epd.cli.k8s.pods import ClusterManifests
from epd.tiny import SAMPLES
from tests.e2e.client import data_url, post_all, question
from tests.e2e.server import Server, wait_for

ROOT = Path(__file__).parents[3]
RULES = ROOT / "docs" / "monitoring" / "alerts.yml"
DASHBOARD = ROOT / "docs" / "monitoring" / "dashboard.json"
# There from the first such event on, of which a healthy cluster has none.
ODD = {
    "epd_certificate_expiry_seconds": set[str](),  # only with HTTPS
    "epd_api_key_expiry_seconds": {"key"},  # and these with keys of a file
    "epd_reloads_total": {"what", "outcome"},
    "epd_instance_events_total": {"instance", "kind"},
    "epd_gateway_events_total": {"kind"},
}
IMAGE = data_url((SAMPLES / "receipt-cafe.png").read_bytes())


def expressions() -> Iterator[str]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["alert"] and rule["annotations"]["summary"]
            yield rule["expr"]
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    cluster = ClusterManifests("epd", "1e1p1d", "IMAGE")
    for scaled in scaled_objects(cluster, "http://prometheus", 4):
        for trigger in scaled["spec"]["triggers"]:
            yield trigger["metadata"]["query"]
    (names,) = picker_plugin()["parameters"]["engineConfigs"]
    yield from (value for key, value in names.items() if key != "name")


def test_every_name_and_label_exists(apart: Server) -> None:
    (reply,) = asyncio.run(post_all(apart.base_url, [question("What is the total?", IMAGE)]))
    assert reply.status == 200

    def labels() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {name: set(names) for name, names in ODD.items()}
        for family in text_string_to_metric_families(apart.get("/metrics")[1]):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
        return found

    asked = {name for expression in expressions() for name in re.findall(r"\bepd_\w+", expression)}
    for name in sorted(asked):
        wait_for(lambda name=name: name in labels(), 10.0, f"heartbeats tell of {name}")
    known = labels()
    if promtool := shutil.which("promtool"):
        told = apart.get("/metrics")[1].encode()
        subprocess.run([promtool, "check", "metrics"], check=True, input=told)
    for expression in expressions():
        names = re.findall(r"\bepd_\w+", expression)
        assert names, expression
        wanted = set(re.findall(r"(\w+)=~?\"", expression))
        for group in re.findall(r"by \(([^)]*)\)", expression):
            wanted |= {name.strip() for name in group.split(",")}
        for name in names:
            assert name in known, f"{expression}: no {name} in /metrics"
        have = set.union(*(known[name] for name in names))
        assert wanted <= have, f"{expression}: no label {wanted - have}"


def test_each_instance_has_what_computes_its_attention_and_decodes_films(apart: Server) -> None:
    families = text_string_to_metric_families(apart.get("/metrics")[1])
    samples = [sample for family in families for sample in family.samples]
    found = {s.labels["instance"]: s.labels for s in samples if s.name == "epd_instance_info"}
    assert {name: labels["attention"] for name, labels in found.items()} == dict.fromkeys(
        apart.instances(), "torch"
    )
    assert {name: labels["films"] for name, labels in found.items()} == {
        name: "cpu" if name.startswith("e") else "" for name in apart.instances()
    }


def test_every_process_says_how_late_it_is(apart: Server) -> None:
    def watched() -> set[str]:
        families = text_string_to_metric_families(apart.get("/metrics")[1])
        samples = [sample for family in families for sample in family.samples]
        return {s.labels["instance"] for s in samples if s.name == "epd_loop_lag_seconds_count"}

    processes = {"gateway", *apart.instances()}
    wait_for(lambda: watched() == processes, 10.0, "heartbeats tell of it")


def test_a_panel_has_a_title_and_its_own_place() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["title"] for panel in panels}) == len(panels)
    assert len({(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels}) == len(panels)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_the_rules() -> None:
    subprocess.run(["promtool", "check", "rules", str(RULES)], check=True)
