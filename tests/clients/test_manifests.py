"""What validators of Kubernetes' users find in the manifests: nothing that is not listed here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.cli.manifests_of_kinds import FORMS, rendered_as
from tests.clients.test_sdks import environment

pytestmark = pytest.mark.timeout(600)
PACKAGES = ("kubernetes-validate==1.37.0", "checkov==3.3.30")
VERSIONS = ("1.31", "1.34", "1.37")
SETS = {"LeaderWorkerSet", "DisaggregatedSet"}
ACCEPTED = {  # findings of checkov, and why they stay
    "CKV_K8S_15": "images are pulled where they are absent; --pull-policy Always for moving tags",
    "CKV_K8S_25": "IPC_LOCK, which RDMA needs, where --rdma-resource asks for it",
    "CKV_K8S_35": "epd reads keys of its API from the environment",
    "CKV_K8S_40": "the user of the image that the Containerfile makes",
    "CKV_K8S_43": "--image may have a digest",
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("checkers") / "env", *PACKAGES)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_found_that_is_not_accepted(
    form: str, python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = rendered_as(form, capsys, "--namespace", "serving")
    core, every = tmp_path / "core.yaml", tmp_path / "all.yaml"
    core.write_text(yaml.safe_dump_all(o for o in objects if o["kind"] not in SETS))
    every.write_text(yaml.safe_dump_all(objects))
    for version in VERSIONS:
        done = called(python, "kubernetes-validate", "--strict", "-k", version, str(core))
        assert done.returncode == 0, done.stdout
    flags = ("--skip-download", "--quiet", "-o", "json")
    found = json.loads(called(python, "checkov", "-f", str(every), *flags).stdout)
    failed = found["results"]["failed_checks"]
    assert {check["check_id"] for check in failed} <= ACCEPTED.keys(), failed
    assert found["summary"]["passed"] > 0


def called(python: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(python.with_name(name)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
