"""Manifests: as they were read by a person, as Kubernetes' schemas want them, as `epd run` takes
their command lines."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from epd.cli.configure.settings import leaves
from epd.cli.k8s import choices
from epd.cli.k8s.manifests import groups_of, manifests
from epd.cli.k8s.pods import ClusterManifests
from epd.cli.main import main
from epd.cli.parser import Parser
from epd.cli.verbs import run
from epd.config import ConfigError

HERE = Path(__file__).parent
SCHEMAS = sorted((HERE / "schemas").glob("*.json"))
PLAIN = "--topology 2e1p1d --image registry.example/epd:1"
ALL = (
    "--topology 1e2pd --image registry.example/epd:1-cuda --name eyes --namespace vision "
    "--secret keys --device cuda --claim models --model /models/Qwen3-VL-4B --kv-nbytes 4GiB "
    "--drain-timeout 60 --memory 24Gi --cpu 4 --pod-monitor --max-replicas 6 "
    "--scale-by http://prometheus.monitoring:9090 --inference-pool picker"
)
GOLDEN = {"k8s-2e1p1d.yaml": PLAIN, "k8s-1e2pd.yaml": ALL}
OF_OPERATORS = {"PodMonitor", "ScaledObject", "InferencePool"}

Captured = pytest.CaptureFixture[str]
Manifest = dict[str, Any]


def rendered(flags: str, capsys: Captured) -> str:
    assert main(["k8s", "render", *flags.split()]) == 0
    return capsys.readouterr().out


def loaded(flags: str, capsys: Captured) -> list[Manifest]:
    return list(yaml.safe_load_all(rendered(flags, capsys)))


def pods(objects: list[Manifest]) -> dict[str, Manifest]:
    """Their specs by the Deployment's name."""
    deployments = [one for one in objects if one["kind"] == "Deployment"]
    return {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in deployments}


def parsed(pod: Manifest) -> argparse.Namespace:
    """What `epd run` makes of the container's command line.  Raises UsageError."""
    (container,) = pod["containers"]
    assert container["command"] == ["epd"] and container["args"][0] == "run"
    parser = Parser("epd run")
    run.add_arguments(parser)
    return parser.parse(container["args"][1:])


@pytest.mark.parametrize("name", GOLDEN)
def test_manifests_are_those_that_were_read(name: str, capsys: Captured) -> None:
    text = (HERE / "golden" / name).read_text()
    assert rendered(GOLDEN[name], capsys) == text, (
        f"read the difference, then: epd k8s render {GOLDEN[name]} > tests/cli/golden/{name}"
    )


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda path: path.stem)
@pytest.mark.parametrize("flags", GOLDEN.values(), ids=GOLDEN)
def test_kubernetes_takes_them(flags: str, schema: Path, capsys: Captured) -> None:
    known = json.loads(schema.read_text())
    seen = set()
    for one in loaded(flags, capsys):
        if one["kind"] not in OF_OPERATORS:
            jsonschema_rs.validator_for(of_kind(known, one["kind"])).validate(one)
            seen.add(one["kind"])
    assert seen == set(known["kinds"])


def of_kind(known: Manifest, kind: str) -> Manifest:
    return {"$ref": f"#/$defs/{known['kinds'][kind]}", "$defs": known["$defs"]}


def test_the_schemas_find_slips(capsys: Captured) -> None:
    assert len(SCHEMAS) == 3
    known = json.loads(SCHEMAS[0].read_text())
    gateway = next(one for one in loaded(PLAIN, capsys) if one["kind"] == "Deployment")
    check = jsonschema_rs.validator_for(of_kind(known, "Deployment"))
    assert check.is_valid(gateway)
    pod = gateway["spec"]["template"]["spec"]
    pod["containers"][0]["portz"] = []
    assert not check.is_valid(gateway)
    del pod["containers"][0]["portz"]
    pod["terminationGracePeriodSeconds"] = "45"
    assert not check.is_valid(gateway)


@pytest.mark.parametrize("topology", ["1epd", "2e1p1d", "1e2pd", "1ep1d", "3e2p2d1epd"])
def test_command_lines_are_of_epd_run(topology: str, capsys: Captured) -> None:
    flags = (
        f"--topology {topology} --image I --max-images 4 --allowed-origins https://a https://b "
        "--set timing.lost_after_s=9 --served-model-name tiny small --chat-template /t.jinja "
        "--allow-unused-tensors --log-json --encoder-cache-device-nbytes 0 --port 9000"
    )
    found = {name: parsed(pod) for name, pod in pods(loaded(flags, capsys)).items()}
    groups = groups_of(ClusterManifests("epd", topology, "I"))
    assert list(found) == ["epd-gateway", *(f"epd-{'-'.join(roles)}" for roles, _, _ in groups)]
    for name, args in found.items():
        own = args.role.replace("+", "-")
        assert name == f"epd-{own}"
        assert args.instance_id == ("" if own == "gateway" else "$(POD_NAME)")
        assert args.join == ("" if own == "gateway" else "tcp://epd-join:7000")
        given = vars(args)
        assert given["limits.max_images"] == 4 and given["port"] == 9000
        assert given["access.allowed_origins"] == ["https://a", "https://b"]
        assert given["model_names"] == ["tiny", "small"] and given["chat_template"] == "/t.jinja"
        assert given["engine.allow_unused_tensors"] is True and args.log_json
        assert given["encode.cache_device_nbytes"] == 0
        expected = [f"expected_instances={sum(count for _, _, count in groups)}"]
        told = expected if own == "gateway" else []
        assert args.assignments == [*told, "timing.lost_after_s=9"]


@pytest.mark.parametrize(
    "flags", ["--topology 2e1pd:tp3 --device cuda", "--topology 2e1pd -tp 3 --device cuda"]
)
def test_a_group_is_a_pod_with_a_device_for_each_rank(flags: str, capsys: Captured) -> None:
    found = pods(loaded(f"{flags} --image I", capsys))
    args = {name: vars(parsed(pod)) for name, pod in found.items()}
    limits = {
        name: pod["containers"][0].get("resources", {}).get("limits") for name, pod in found.items()
    }
    assert limits == {
        "epd-gateway": {"cpu": "2", "memory": "4Gi"},
        "epd-encode": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": 1},
        "epd-prefill-decode-tp3": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": 3},
    }
    group = args["epd-prefill-decode-tp3"]
    assert group["engine.tensor_parallel_size"] == 3
    assert group["engine.device"] == "cuda:0,cuda:1,cuda:2"
    assert args["epd-encode"]["engine.device"] == "cuda"


def test_what_belongs_together_agrees(capsys: Captured) -> None:
    objects = loaded(ALL, capsys)
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    assert {one["metadata"]["namespace"] for one in objects} == {"vision"}
    (container,) = pods(objects)["eyes-gateway"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for service in ("eyes", "eyes-join"):
        spec = by_name["Service", service]["spec"]
        template = by_name["Deployment", "eyes-gateway"]["spec"]["template"]
        assert spec["selector"].items() <= template["metadata"]["labels"].items()
        assert all(ports[port["targetPort"]] == port["port"] for port in spec["ports"])
    for kind, name in by_name:
        if kind in {"PodDisruptionBudget", "ScaledObject"}:
            assert ("Deployment", name) in by_name
    for one in objects:
        if one["kind"] == "Deployment":
            labels = one["spec"]["template"]["metadata"]["labels"]
            assert one["spec"]["selector"]["matchLabels"].items() <= labels.items()
            spec = one["spec"]["template"]["spec"]
            assert spec["terminationGracePeriodSeconds"] > 60
            volumes = {volume["name"] for volume in spec["volumes"]}
            for container in (*spec["initContainers"], *spec["containers"]):
                assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    query = by_name["ScaledObject", "eyes-encode"]["spec"]["triggers"][0]["metadata"]["query"]
    pattern = re.search(r'instance=~"([^"]+)"', query)
    assert pattern and re.fullmatch(pattern[1], "eyes-encode-5d5f8c9b7d-x2x4z")
    assert not re.fullmatch(pattern[1], "eyes-encode-prefill-5d5f8c9b7d-x2x4z")


@pytest.mark.parametrize(("flags", "count"), [("", 2), (" --gateways 1", 1), (" --gateways 3", 3)])
def test_gateways_are_replaced_before_they_end(flags: str, count: int, capsys: Captured) -> None:
    objects = loaded(PLAIN + flags, capsys)
    by_name = {(one["kind"], one["metadata"]["name"]): one["spec"] for one in objects}
    spec = by_name["Deployment", "epd-gateway"]
    assert spec["replicas"] == count
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert by_name["PodDisruptionBudget", "epd-gateway"]["maxUnavailable"] == 1
    host, port = vars(parsed(spec["template"]["spec"]))["peers"][0].split("/")[-1].split(":")
    assert by_name["Service", host]["clusterIP"] == "None" and port == "8000"


def test_a_pod_of_instances_drains_before_it_is_asked_to_end(capsys: Captured) -> None:
    for name, pod in pods(loaded(f"{PLAIN} --drain-timeout 60", capsys)).items():
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert command[0] == ("sleep" if name == "epd-gateway" else "sh")
        assert pod["terminationGracePeriodSeconds"] >= (75 if name == "epd-gateway" else 80)


@pytest.mark.parametrize("sort", ["load_seconds", "requests_waiting"])
def test_what_waits_is_counted_once_for_all_gateways(sort: str, capsys: Captured) -> None:
    text = rendered(ALL, capsys)
    assert (
        text.count(f"max by (instance) (epd_instance_{sort}")
        == text.count(f"(epd_instance_{sort}")
        > 0
    )


def test_only_who_computes_gets_a_gpu(capsys: Captured) -> None:
    found = pods(loaded(ALL, capsys))
    limits = {n: p["containers"][0].get("resources", {}).get("limits") for n, p in found.items()}
    gpu = {"cpu": "4", "memory": "24Gi", "nvidia.com/gpu": 1}
    own = {"cpu": "2", "memory": "4Gi"}
    assert limits == {"eyes-gateway": own, "eyes-encode": gpu, "eyes-prefill-decode": gpu}


def test_a_file_for_each_object(tmp_path: Path, capsys: Captured) -> None:
    directory = tmp_path / "manifests"
    assert main(["k8s", "render", *PLAIN.split(), "--output", str(directory)]) == 0
    assert capsys.readouterr().out.startswith("12 files written to ")
    texts = [path.read_text() for path in directory.iterdir()]
    assert all("kubectl create secret generic epd " in text for text in texts)
    written = [yaml.safe_load(text) for text in texts]
    assert sorted(map(str, written)) == sorted(map(str, loaded(PLAIN, capsys)))


@pytest.mark.parametrize("topology", ["1e1pd:tp2,1pd", "1e:tp2,2e1e:tp3,1p:tp4,2p1d1epd:tp2"])
def test_groups_of_other_ranks_are_objects_of_their_own(
    topology: str, tmp_path: Path, capsys: Captured
) -> None:
    flags = f"--topology {topology} --image I --scale-by http://p --output {tmp_path}"
    text = rendered(flags, capsys)
    written = [yaml.safe_load(path.read_text()) for path in tmp_path.iterdir()]
    assert text.startswith(f"{len(written)} files written to {tmp_path}: ")
    groups = groups_of(ClusterManifests("epd", topology, "I"))
    assert len(written) == 6 + 3 * len(groups), "a Deployment, a budget and a scale of each"
    deployments = [one for one in written if one["kind"] == "Deployment"]
    selectors = [str(one["spec"]["selector"]) for one in deployments]
    assert len(set(selectors)) == 1 + len(groups), "no pod belongs to two"
    queries = [
        trigger["metadata"]["query"]
        for one in written if one["kind"] == "ScaledObject"
        for trigger in one["spec"]["triggers"]
    ]  # fmt: skip
    patterns = {found for query in queries for found in re.findall(r'instance=~"([^"]+)"', query)}
    names = [one["metadata"]["name"] for one in deployments]
    for name in set(names) - {"epd-gateway"}:
        pod = f"{name}-5d5f8c9b7d-x2x4z"
        assert sum(bool(re.fullmatch(pattern, pod)) for pattern in patterns) == 1, name


def test_nothing_of_a_secret_is_written(capsys: Captured) -> None:
    text = rendered(ALL, capsys)
    assert not any(one["kind"] == "Secret" for one in yaml.safe_load_all(text))
    assert "kubectl create secret generic keys --namespace vision" in text
    assert "&id" not in text, "an alias is for programs"


def test_text_that_kubernetes_would_expand_stays() -> None:
    cluster = ClusterManifests("epd", "1epd", "I", flags=("--model", "$(POD_IP)"))
    gateway = next(one for one in manifests(cluster) if one["kind"] == "Deployment")
    assert "'$$(POD_IP)'" in str(gateway)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--topology 1e1p", "has no decode instance"),
        ("--topology 1epd --api-key secret", "keys come from the Secret"),
        ("--topology 1epd --host 0.0.0.0", "--host is no choice here"),
        ("--topology 1epd --ssl-certfile c.pem", "let TLS end before the Service"),
        ("--topology 1epd --device cuda:0,cuda:1", "a pod has one"),
        ("--topology 1epd --port 0", "a Service needs to know the port"),
        ("--topology 1epd --config x.toml", "a file of this host"),
        ("--topology 1epd --name Epd", "write up to 24 small letters"),
        ("--topology 1epd --max-images 0", "it must be above zero"),
        ("--topology 1epd --kv-nbites 1G", "did you mean --kv-nbytes?"),
        ("--topology 1epd --output /proc/x", "--output /proc/x cannot be written"),
        ("--topology 1e1pd --transport shm", "two pods have no memory in common"),
        ("--topology 2epd --transport cuda,shm --device cuda", "two pods have no memory in common"),
        ("--topology 1e1pd --pod-per-node --nodes 2 --transport shm", "two pods have no memory"),
        ("--topology 1epd --profile-dir /traces", "give --volume CLAIM:/traces"),
        ("--topology 1epd --set profile_dir=/traces", "give --volume CLAIM:/traces"),
        ("--topology 1epd --volume rows", "write CLAIM:/PATH"),
        ("--topology 1epd --node-selector gpu", "write LABEL=VALUE"),
        ("--topology 1epd --cpu many", "write a quantity such as 4 or 500m"),
        ("--topology 1epd --gateways 0", "there is at least one"),
        ("--topology 1epd --enable-lora --lora-runtime-dir .", "a list of adapters of its own"),
        ("--topology 1epd --lws --gateways 2", "in its first pod"),
        ("--topology 1epd --peers http://a", "by the headless Service"),
        ("--topology 1epd --nodes 2", "--nodes is for --pod-per-node and --lws"),
        ("--topology 1epd --lws --scale-by http://p", "drop --lws"),
        ("--topology 1epd --cluster-key k.json", "it comes from the Secret"),
        ("", "render needs --topology and --image"),
    ],
)
def test_what_cannot_be_is_refused(flags: str, said: str, capsys: Captured) -> None:
    assert main(["k8s", "render", "--image", "I", *flags.split()]) == 2
    assert said in capsys.readouterr().err


def test_what_the_manifests_decide_are_settings() -> None:
    assert {*choices.GIVEN, *choices.IN_IMAGE, *choices.DIRECTORIES} <= set(leaves())
    with pytest.raises(ConfigError):
        groups_of(ClusterManifests("epd", "2x", "I"))
