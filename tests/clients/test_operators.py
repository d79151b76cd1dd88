"""What operators of Kubernetes take, as packages of npm know it."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from epd.cli.main import main

PACKAGES = ("@kubernetes-models/prometheus-operator@6.0.0", "@kubernetes-models/keda@2.0.0")
INSTALL_S = 240
pytestmark = pytest.mark.timeout(600)
PROGRAM = """
import { readFileSync } from "fs";
import { PodMonitor } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";
import { ScaledObject } from "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject";
const kinds = { PodMonitor, ScaledObject };
const said = JSON.parse(readFileSync("objects.json")).map((object) => {
  try { new kinds[object.kind](object).validate(); } catch (error) { return error.message; }
  return "";
});
console.log(JSON.stringify(said));
"""


def test_operators_take_what_is_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And they notice a slip in each."""
    if not shutil.which("npm") or not shutil.which("node"):
        pytest.skip("npm and node are not installed")
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *PACKAGES]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    if done.returncode:
        pytest.skip(f"the packages cannot be installed here: {done.stderr.strip()[-200:]}")
    flags = (
        "--topology 2e1p1d --image I --namespace n --pod-monitor --scale-by http://prometheus:9090"
    )
    assert main(["k8s", "render", *flags.split()]) == 0
    rendered = list(yaml.safe_load_all(capsys.readouterr().out))
    objects = [one for one in rendered if one["kind"] in {"PodMonitor", "ScaledObject"}]
    assert len(objects) == 4
    assert said_of(objects, tmp_path) == [""] * 4
    for one in objects:
        wrong = copy.deepcopy(one)
        del wrong["spec"]["selector" if one["kind"] == "PodMonitor" else "scaleTargetRef"]
        assert all(said_of([wrong], tmp_path))


def said_of(objects: list[Any], directory: Path) -> list[str]:
    """Per object what is wrong with it; empty: nothing."""
    (directory / "objects.json").write_text(json.dumps(objects))
    (directory / "check.mjs").write_text(PROGRAM)
    node = ["node", "check.mjs"]
    done = subprocess.run(
        node, cwd=directory, capture_output=True, text=True, timeout=60, check=True
    )
    found: list[str] = json.loads(done.stdout)
    return found
