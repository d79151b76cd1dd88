"""Every form of the manifests: pods by Kubernetes' schemas, sets by their CRDs, command lines."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from epd.cli.main import main
from epd.cli.parser import Parser
from epd.cli.verbs import run
from epd.topology import parse_groups
from tests.cli.manifests_of_kinds import FORMS, Manifest, rendered_as, templates

SCHEMAS = sorted((Path(__file__).parent / "schemas").glob("*.json"))
POD = "io.k8s.api.core.v1.PodTemplateSpec"
CRDS = os.environ.get("EPD_LWS_CRDS", "")

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda path: path.stem)
@pytest.mark.parametrize("form", FORMS)
def test_kubernetes_takes_all_pods(form: str, schema: Path, capsys: Captured) -> None:
    known = json.loads(schema.read_text())
    check = jsonschema_rs.validator_for({"$ref": f"#/$defs/{POD}", "$defs": known["$defs"]})
    found = [*templates(rendered_as(form, capsys))]
    assert len(found) >= 2
    for template in found:
        check.validate(template)
    found[0]["spec"]["containers"][0]["livenessProbe"]["periodSecond"] = 1
    assert not check.is_valid(found[0])


@pytest.mark.skipif(not CRDS, reason="EPD_LWS_CRDS names no directory with the CRDs of LWS")
@pytest.mark.parametrize("form", ["lws", "disaggregated-set"])
def test_sets_are_those_of_their_definitions(form: str, capsys: Captured) -> None:
    """With unknown fields refused."""
    definitions = [yaml.safe_load(path.read_text()) for path in Path(CRDS).glob("*.yaml")]
    by_kind = {one["spec"]["names"]["kind"]: one for one in definitions}
    (made,) = (one for one in rendered_as(form, capsys) if one["kind"] in by_kind)
    versions = by_kind[made["kind"]]["spec"]["versions"]
    (schema,) = (v["schema"]["openAPIV3Schema"] for v in versions if v["storage"])
    assert made["apiVersion"].rpartition("/")[2] in {v["name"] for v in versions}
    check = jsonschema_rs.validator_for(strict(schema))
    check.validate(made)
    made["spec"]["sizes"] = 1
    assert not check.is_valid(made)


def strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made.pop("pattern", None)
    if "properties" in made and made.get("type") == "object":
        metadata = made["properties"].get("metadata")
        if metadata == {"type": "object"}:
            made["properties"]["metadata"] = {"type": "object"}
        made.setdefault("additionalProperties", False)
    return made


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("form", FORMS)
def test_kustomize_finds_no_name_twice(form: str, tmp_path: Path, capsys: Captured) -> None:
    objects = rendered_as(form, capsys)
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(objects))
    (tmp_path / "kustomization.yaml").write_text("resources: [all.yaml]\n")
    built = kustomize(tmp_path)
    assert built.returncode == 0, built.stderr
    assert len(list(yaml.safe_load_all(built.stdout))) == len(objects)
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all([*objects, objects[-1]]))
    assert "already registered" in kustomize(tmp_path).stderr


def kustomize(directory: Path) -> subprocess.CompletedProcess[str]:
    command = ["kubectl", "kustomize", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def words_of(template: Manifest) -> list[str]:
    (container,) = template["spec"]["containers"]
    assert container["command"] == ["epd"] and container["args"][0] == "run"
    return list(container["args"][1:])


@pytest.mark.parametrize("form", FORMS)
def test_command_lines_have_a_device_for_each_rank(form: str, capsys: Captured) -> None:
    for template in templates(rendered_as(form, capsys)):
        parser = Parser("epd run")
        run.add_arguments(parser)
        given = vars(parser.parse(words_of(template)))
        limits = template["spec"]["containers"][0]["resources"]["limits"]
        gpus = limits.get("nvidia.com/gpu", 0)
        if given["role"] == "gateway":
            assert gpus == 0
            continue
        if given["topology"]:
            assert gpus == sum(ranks for _, ranks in parse_groups(given["topology"]))
            assert given["instance_id"] == ""
        else:
            assert gpus == max(given["engine.tensor_parallel_size"] or 1, 1)
            assert given["instance_id"] == "$(POD_NAME)"
        devices = given["engine.device"].split(",")
        assert len(devices) == gpus and len(set(devices)) == gpus
        num_cpus = int(limits["cpu"])
        assert 1 <= given["engine.threads"] * gpus <= max(num_cpus // 2, gpus)


def test_the_first_pod_of_a_set_has_the_gateway(capsys: Captured) -> None:
    objects = rendered_as("lws", capsys)
    leader, worker = templates(objects)
    assert "--join" not in words_of(leader) and "--host" in words_of(leader)
    assert "tcp://$(LWS_LEADER_ADDRESS):7000" in words_of(worker)
    (api,) = (o for o in objects if o["kind"] == "Service" and o["metadata"]["name"] == "epd")
    chosen = api["spec"]["selector"].items()
    assert chosen <= leader["metadata"]["labels"].items()
    assert not chosen <= worker["metadata"]["labels"].items()


@pytest.mark.parametrize("form", FORMS)
def test_pods_reach_each_other_and_nothing_else_does(form: str, capsys: Captured) -> None:
    objects = rendered_as(form, capsys)
    within, at_gateway = (one["spec"] for one in objects if one["kind"] == "NetworkPolicy")
    for template in templates(objects):
        pod, labels = template["spec"], template["metadata"]["labels"].items()
        assert within["podSelector"]["matchLabels"].items() <= labels
        (sysctl,) = pod["securityContext"]["sysctls"]
        first, last = map(int, sysctl["value"].split())
        open_ = [(p["port"], p.get("endPort", p["port"])) for p in within["ingress"][0]["ports"]]
        assert (first, last) in open_
        ports = [port["containerPort"] for port in pod["containers"][0].get("ports", ())]
        for port in ports:
            assert port == 8000 or any(low <= port <= high for low, high in open_)
    assert within["ingress"][0]["from"] == [{"podSelector": within["podSelector"]}]
    assert at_gateway["ingress"] == [{"ports": [{"port": 8000}]}]


def test_rules_reach_every_pod(capsys: Captured) -> None:
    for template in templates(rendered_as("disaggregated-set", capsys)):
        pod = template["spec"]
        assert pod["nodeSelector"] == {"pool/kind": "gpu"}
        assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
        assert pod["priorityClassName"] == "serving"
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        (container,) = pod["containers"]
        assert container["imagePullPolicy"] == "Always"
        assert {"name": "to-rows", "mountPath": "/rows"} in container["volumeMounts"]
        is_gateway = any(port["name"] == "http" for port in container["ports"])
        assert ("rdma/hca" in container["resources"]["limits"]) != is_gateway
        if is_gateway:
            assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "15"]
            assert pod["terminationGracePeriodSeconds"] == 15 + 30 + 10


@pytest.mark.parametrize(("form", "least_s"), [("pod-per-node", 1800), ("disaggregated-set", 60)])
def test_what_a_supervisor_starts_anew_may_load(form: str, least_s: int, capsys: Captured) -> None:
    *_, template = templates(rendered_as(form, capsys))
    probe = template["spec"]["containers"][0]["livenessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == least_s


@pytest.fixture
def gateway() -> Iterator[tuple[str, dict[str, str]]]:
    """Its address, and what state it has of whom."""
    states: dict[str, str] = {}

    class Ready(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told = [{"instance": name, "state": state} for name, state in states.items()]
            self.send_response(503)
            self.end_headers()
            self.wfile.write(json.dumps({"ready": False, "instances": told}).encode())

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}", states
        server.shutdown()
        thread.join()


def test_a_probe_asks_the_gateway(gateway: tuple[str, dict[str, str]], capsys: Captured) -> None:
    where, states = gateway

    def probe(*flags: str) -> int:
        return main(["k8s", "probe", "--gateway", where, "--pod", "epd-node-x1", *flags])

    assert probe() == probe("--alive") == 1
    assert "0 of 1 instances of epd-node-x1 serve; the gateway has none" in capsys.readouterr().out
    states |= {"epd-node-x1-e0": "HEALTHY", "epd-node-x1-pd0": "LOST", "epd-node-x12": "HEALTHY"}
    assert probe() == 0 and probe("--instances", "2") == probe("--instances", "2", "--alive") == 1
    assert "epd-node-x1-pd0 LOST" in capsys.readouterr().out
    states["epd-node-x1-pd0"] = "SUSPECT"
    assert probe("--instances", "2") == 0


def test_a_gateway_that_is_gone_proves_nothing(capsys: Captured) -> None:
    nobody = ["k8s", "probe", "--gateway", "127.0.0.1:9", "--pod", "p"]
    assert main(nobody) == 1 and main([*nobody, "--alive"]) == 0
    assert main(["k8s", "probe"]) == 2
