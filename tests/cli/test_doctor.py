"""The doctor: each check sees what it is for, and nothing that is broken breaks the doctor."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from epd.cli.configure.model_check import check_model
from epd.cli.look import doctor
from epd.cli.look.doctor import Check
from epd.cli.main import main
from epd.cli.start import leftovers
from epd.cli.start.rundir import cluster_dir, make_private
from epd.config import ConfigError
from epd.model_files.checkpoint import ModelError
from epd.transport.backends import BACKENDS
from epd.transport.shm.segment import Segment
from tests.cli.test_plan import broken
from tests.engine.tiny_models import cached_model

NAMES = [
    "python", "packages", "torch", "machine", "open-files", "shared-memory", "port", "tls",
    "run-dir", "running", "pairs", "leftovers", "tiny-model", "transports", "model",
]  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return make_private(cluster_dir(8000, tmp_path)).parent


@pytest.fixture
def dead_socket(run_dir: Path) -> Path:
    """The file of a socket whose process has ended."""
    path = run_dir / "8000" / "e0.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    return path


@pytest.fixture
def live_socket(run_dir: Path) -> Iterator[Path]:
    path = run_dir / "8000" / "gateway.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield path


def test_json_is_one_object_of_the_promised_shape(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "check_torch", lambda: Check("torch", ok=True, detail="not asked"))
    status = main(["doctor", "--json", "--run-dir", str(tmp_path), "--model", str(tmp_path)])
    report = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in report["checks"]] == NAMES
    assert all(set(check) == {"name", "ok", "detail", "remedy"} for check in report["checks"])
    assert report["ok"] is False
    assert status == 1
    model = report["checks"][-1]
    assert not model["ok"]
    assert "has no config.json" in model["detail"]


def test_what_a_model_s_directory_holds_is_listed() -> None:
    detail = doctor.check_checkpoint("model", "").detail
    assert detail == "bundled, qwen3_vl, takes text, images, videos, 139 tensors, 0.0114 GB"
    for family, takes in (("llama", "text,"), ("internvl", "text, images,")):
        directory = cached_model(family)
        detail = doctor.check_checkpoint("model", str(directory)).detail
        assert detail.startswith(f"{directory}, {family}, takes {takes} ")


@pytest.mark.parametrize(
    ("text", "changes", "said"),
    [
        (None, {"model_type": "unheard_of"}, "is a 'unheard_of' model; supported are"),
        (None, {"model_type": "interns1"}, "'interns1' model, which .*: transformers has no code"),
        (None, {"model_type": "mistral_large4"}, "'mistral_large4' model, .*: its layers choose"),
        ("deepseek_v3", {"model_type": "mistral3"}, "'mistral3' .* 'deepseek_v3', which is not"),
    ],
)
def test_what_is_not_served_is_refused_before_its_weights_are_there(
    tmp_path: Path, text: str | None, changes: dict[str, str], said: str
) -> None:
    copy = broken(tmp_path, remove="model.safetensors", **changes)
    path = copy / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["model_type"] = text
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=said):
        check_model(str(copy))


def test_weights_of_other_kinds_are_named(tmp_path: Path) -> None:
    copy = broken(tmp_path, remove="model.safetensors")
    names = [f"pytorch_model-{n}.bin" for n in range(4)]
    for name in (*names, "README.md"):
        (copy / name).write_text("")
    said = f"only safetensors are read, and it holds {', '.join(names[:3])} and 1 more$"
    with pytest.raises(ModelError, match=said):
        check_model(str(copy))


def test_torch_is_looked_at_from_outside() -> None:
    check = doctor.check_torch()
    assert check.ok
    assert "2." in check.detail


def test_a_torch_that_cannot_be_imported_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ASK_TORCH", "raise ImportError('libcudart.so.13: not found')")
    check = doctor.check_torch()
    assert not check.ok
    assert "libcudart.so.13" in check.detail
    assert check.remedy


def test_a_missing_package_fails_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("msgspec", "no-such-package"))
    check = doctor.check_packages()
    assert not check.ok
    assert "no-such-package" in check.detail
    assert "pip install" in check.remedy


def test_another_version_than_the_tested_one_is_said_but_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "pins", lambda _: {"msgspec": "0.0.1"})
    check = doctor.check_packages()
    assert check.ok
    assert "tested with 0.0.1" in check.detail


def test_every_package_that_is_checked_is_pinned() -> None:
    pinned = doctor.pins((doctor.ROOT / "constraints.txt").read_text())
    assert set(doctor.PACKAGES) <= set(pinned)
    assert pinned["torch"] == "2.13.0"


def test_a_port_in_use_fails_and_names_a_free_one(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        check = doctor.check_port("127.0.0.1", taken.getsockname()[1], tmp_path, list)
    assert not check.ok
    assert "--port" in check.remedy


def test_a_port_that_our_own_gateway_serves_is_well(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket(socket.AF_UNIX) as gateway:
        port = taken.getsockname()[1]
        gateway.bind(str(make_private(cluster_dir(port, tmp_path)) / "gateway.sock"))
        gateway.listen()
        check = doctor.check_port("127.0.0.1", port, tmp_path, list)
    assert check.ok
    assert "own gateway" in check.detail


def test_an_address_of_another_host_fails() -> None:
    check = doctor.check_port("203.0.113.7", 8000, Path("/none"), list)
    assert "no address of this host" in check.detail


def test_a_directory_that_others_can_enter_fails(run_dir: Path) -> None:
    assert doctor.check_run_dir(run_dir).ok
    run_dir.chmod(0o755)
    check = doctor.check_run_dir(run_dir)
    assert not check.ok
    assert check.remedy == f"chmod 700 {run_dir}"


def test_running_instances_are_listed_by_cluster(run_dir: Path, live_socket: Path) -> None:
    assert doctor.check_running(run_dir, 8000, list).detail == "8000: gateway"


def test_a_server_without_sockets_is_known_by_its_answer(tmp_path: Path) -> None:
    """`--role all` has none between its stages."""

    def one() -> list[dict[str, Any]]:
        return [{"instance": "all", "transports": {}}]

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check = doctor.check_port("127.0.0.1", port, tmp_path, one)
    assert check.ok and "own gateway" in check.detail
    assert doctor.check_running(tmp_path, port, one).detail == f"{port}: gateway, all"
    assert doctor.check_pairs("127.0.0.1", port, one).detail == "no two instances exchange"


def test_a_pair_that_fell_back_has_its_reason() -> None:
    e0 = {"instance": "e0", "transports": {"p0": "shm"}, "fallbacks": {"p0": "not cuda: no"}}
    p0 = {"instance": "p0", "transports": {"e0": "shm"}, "fallbacks": {"e0": "not cuda: no"}}
    found = doctor.check_pairs("127.0.0.1", 8000, lambda: [e0, p0])
    assert found.detail == "e0-p0 shm (not cuda: no)"


def test_who_answers_otherwise_is_not_epd() -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.handle_request).start()
        assert doctor._instances("127.0.0.1", server.server_port) == []
    assert doctor._instances("127.0.0.1", 9) == []


@pytest.fixture
def no_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(doctor, "SHM", shm)
    return shm


@pytest.mark.usefixtures("no_segments", "live_socket")
def test_sockets_of_the_dead_are_found_and_removed(run_dir: Path, dead_socket: Path) -> None:
    found = doctor.check_leftovers(run_dir, fix=False)
    assert not found.ok
    assert "e0.sock" in found.detail
    assert "--fix" in found.remedy
    assert doctor.check_leftovers(run_dir, fix=True).ok
    assert not dead_socket.exists()
    assert (run_dir / "8000" / "gateway.sock").exists()
    assert doctor.check_leftovers(run_dir, fix=False).detail == "none"


def test_memory_is_left_over_only_when_nobody_holds_it(run_dir: Path, no_segments: Path) -> None:
    held = Segment.create("epd-e0-1", 4096, str(no_segments))
    assert doctor.check_leftovers(run_dir, fix=False).ok
    held.close()  # the lock is gone, the file is not: what kill -9 leaves
    assert leftovers.segments(no_segments) == (Path(held.path),)
    assert not doctor.check_leftovers(run_dir, fix=False).ok
    assert doctor.check_leftovers(run_dir, fix=True).ok
    assert not Path(held.path).exists()


def test_a_check_that_raises_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode() -> Check:
        raise ConfigError("do this")

    monkeypatch.setattr(doctor, "check_python", explode)
    monkeypatch.setattr(doctor, "check_torch", lambda: Check("torch", ok=True, detail=""))
    first = doctor.examine("", "127.0.0.1", 0, "")[0]
    assert first == Check("python", ok=False, detail="do this")


def test_transports_are_asked_in_a_process_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.check_transports()
    assert found.ok and {"shm", "tcp", "file"} <= set(found.detail.partition(" (")[0].split(", "))
    assert found.remedy == "; ".join(filter(None, (one.lacks() for one in BACKENDS.values())))
    monkeypatch.setattr(doctor, "_ASK_TRANSPORTS", "raise ImportError('torn')")
    broken = doctor.check_transports()
    assert not broken.ok and "torn" in broken.detail
