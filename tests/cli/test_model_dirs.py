"""A model directory from anybody: one sentence that names a file, or one that really loads.

`epd run` and `epd doctor` give the same verdict, within 2 s, without torch; no code of a directory
runs and no pickle is read.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epd.api.prompts import model_texts
from epd.cli.configure.model_check import check_model
from epd.cli.look.doctor import _look, check_checkpoint
from epd.cli.start.plan import LogOptions, Placing, plan_topology
from epd.cli.start.preflight import check_shared_memory
from epd.config import ConfigError, EngineConfig, GatewayConfig, InstanceConfig, Settings
from epd.model_files.checkpoint import ModelError, read_checkpoint
from epd.tiny import CHECKPOINT
from tests.hostile import model_dirs
from tests.model_files.published_checkpoints import PUBLISHED, config_of
from tests.model_files.published_files import write_headers
from tests.model_files.published_tensors import tensors_of

LIMIT_S = 2.0
GROWTH_KIB = 256 << 10
EDITED = "config.json"


def fault_here(directory: Path, template: str) -> str:
    """As `model_texts.fault_of`, in this process: hundreds of interpreters take minutes."""
    before = signal.signal(signal.SIGVTALRM, model_texts._on_time_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, model_texts.CPU_S)
    try:
        model_texts.check(directory, template)
    except model_texts._TooSlow:
        return f"{directory}: slow"
    except ModelError as error:
        return str(error)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    return ""


def verdicts(directory: Path, run_dir: Path) -> tuple[str, str]:
    """Of run and of doctor; empty: accepted."""
    settings = Settings(model_dir=str(directory))
    try:
        plan_topology("1e1pd", settings, Placing(run_dir=str(run_dir)), LogOptions())
        run = ""
    except ModelError as error:
        run = str(error)
    look = _look("model", lambda: check_checkpoint("model", str(directory)))
    return run, "" if look.ok else look.detail


def look_at(seed: int, root: Path) -> tuple[Path, str]:
    """The directory of a seed, and what is said of it, which is as it must be."""
    directory = root / "model"
    kind = model_dirs.write(seed, CHECKPOINT, directory)
    began_s = time.process_time()
    run, doctor = verdicts(directory, root)
    assert time.process_time() - began_s < 2 * LIMIT_S, (seed, kind)
    assert run == doctor, (seed, kind)
    assert not run or (str(directory) in run and "\n" not in run and len(run) < 1100), (seed, run)
    assert "internal error" not in run, (seed, kind, run)
    assert not (root / "code-ran").exists(), (seed, kind)
    return directory, run


def seeds(root: Path, found: range, load: Callable[[Path], object] | None = None) -> list[str]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = []
    for seed in found:
        directory, verdict = look_at(seed, root / str(seed))
        said.append(verdict)
        if load is not None and not verdict:
            load(directory)
        shutil.rmtree(root / str(seed))
    if load is None:
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH_KIB
    return said


def test_run_and_doctor_agree_about_hostile_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_texts, "fault_of", fault_here)
    said = seeds(tmp_path, range(66))
    assert 30 < sum(map(bool, said)) < 60


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_is_accepted_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from epd.api.prompts.prepare import Preparer
    from epd.engine.factory import build_executor, build_language, build_vision

    monkeypatch.setattr(model_texts, "fault_of", fault_here)
    config = EngineConfig(threads=1, kv_nbytes=4 << 20)
    executor = build_executor(config)

    def load(directory: Path) -> None:
        build_vision(directory, config, executor)
        build_language(directory, config, executor)
        Preparer(GatewayConfig(model_dir=str(directory)))

    said = seeds(tmp_path, range(1000, 1500), load)
    assert 250 < sum(map(bool, said)) < 450


# --- inputs that were seen ------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return shutil.copytree(CHECKPOINT, tmp_path / "model")


def edit(directory: Path, file: str, place: str, value: Any) -> None:
    """`place`: the names on the way to a member, with dots."""
    found = json.loads((directory / file).read_text())
    *way, name = place.split(".")
    inner = found
    for step in way:
        inner = inner[step]
    inner[name] = value
    (directory / file).write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("file", "place", "value", "words"),
    [
        ("config.json", "text_config.num_hidden_layers", 10**12, "num_hidden_layers"),
        ("config.json", "text_config.num_hidden_layers", 4000, "lacks 43956 tensors"),
        ("config.json", "vision_config.num_heads", 0, "vision_config.num_heads"),
        ("config.json", "text_config.eos_token_id", ["x", -1, 10**20], "eos_token_id"),
        ("generation_config.json", "eos_token_id", ["x", -1, 10**20], "eos_token_id[0]"),
        ("generation_config.json", "eos_token_id", 272, "272 is no token of a vocabulary of 272"),
        ("generation_config.json", "eos_token_id", [258, True], "eos_token_id[1]"),
        ("generation_config.json", "temperature", "0.7", "temperature must be a number"),
        ("generation_config.json", "top_k", 20.5, "top_k must be an integer"),
        ("generation_config.json", "top_p", -1, "top_p must be above 0"),
        ("generation_config.json", "max_new_tokens", 0, "max_new_tokens must be at least 1"),
        ("preprocessor_config.json", "patch_size", 0, "patch_size"),
        ("preprocessor_config.json", "patch_size", 16, "patch size is 16 where config.json has 8"),
        ("preprocessor_config.json", "size", {"shortest_edge": 10**9}, "longest_edge"),
        ("preprocessor_config.json", "min_pixels", 2**32, "more than the context"),
        ("tokenizer_config.json", "added_tokens_decoder", {"1": {}}, "a token has no content"),
        ("tokenizer.json", "model.vocab", {"a": 10**9}, "tokenizer.json"),
    ],
)
def test_a_field_is_named_with_its_file(
    copy: Path, file: str, place: str, value: Any, words: str
) -> None:
    edit(copy, file, place, value)
    if file == "config.json" and words == "eos_token_id":
        (copy / "generation_config.json").unlink()
    with pytest.raises(ModelError) as caught:
        check_model(str(copy), fault_of_texts=fault_here)
    said = str(caught.value)
    named = str(copy) if words.startswith("lacks") else f"{copy}/{file}"
    assert named in said and words in said, said


@pytest.mark.parametrize("name", ["../outside.safetensors", "{root}/outside.safetensors", "a/b"])
def test_an_index_names_files_beside_it(copy: Path, name: str) -> None:
    shutil.copyfile(copy / "model.safetensors", copy.parent / "outside.safetensors")
    weight_map = {"lm_head.weight": name.format(root=copy.parent)}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"index\.json: weight_map\.lm_head\.weight: .* beside it"):
        check_model(str(copy), fault_of_texts=fault_here)


def test_a_pipe_and_a_file_as_long_as_a_disk_are_not_read(copy: Path) -> None:
    path = copy / "generation_config.json"
    os.truncate(path, 1 << 40)
    with pytest.raises(ModelError, match=rf"{path} .* 1099511627776 bytes, and at most"):
        check_model(str(copy), fault_of_texts=fault_here)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelError, match=rf"{path} cannot be read \(it is no regular file"):
        check_model(str(copy), fault_of_texts=fault_here)


TENSOR = "model.visual.merger.norm.bias"


@pytest.mark.parametrize(
    ("member", "value", "words"),
    [
        ("data_offsets", [0, 256], "behind"),
        ("data_offsets", [2**62, 2**62 + 256], "data_offsets"),
        ("dtype", "Q4", "unknown dtype Q4"),
        ("dtype", "F32", "of 512 bytes"),
        ("shape", None, f"tensor {TENSOR}: .*shape"),
        ("shape", [128] * 9, "shape"),
        ("", 2**62, "header of 4611686018427387904 bytes"),
        ("", b'{"a":' * 200_000, "nested too deeply"),
        ("", b"x", "bytes of tensors where"),
    ],
)
def test_a_header_is_as_safetensors_has_it(copy: Path, member: str, value: Any, words: str) -> None:
    path = copy / "model.safetensors"
    header, data = model_dirs.read_weights(path)
    if member:
        header[TENSOR][member] = value
        model_dirs.write_weights(path, header, data)
    elif isinstance(value, int):
        model_dirs.write_weights(path, header, data, claimed=value)
    else:
        deep = value if len(value) > 1 else json.dumps(header).encode()
        model_dirs.write_weights(path, deep, data + b"more")
    with pytest.raises(ModelError, match=f"{path} is not a whole safetensors file .*{words}"):
        check_model(str(copy), fault_of_texts=fault_here)


def test_links_of_a_hubs_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    shutil.copytree(CHECKPOINT, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert len(check_model(str(snapshot), fault_of_texts=fault_here).tensors) == 139


def test_a_file_that_config_json_names_is_not_read(copy: Path) -> None:
    """transformers would take it in place of config.json, which alone was looked at."""
    from epd.engine.adapter import adapter_for

    other = json.loads((copy / EDITED).read_text())
    other["text_config"]["num_hidden_layers"] = 10**12
    (copy.parent / "config.4.0.0.json").write_text(json.dumps(other))
    edit(copy, EDITED, "configuration_files", ["../config.4.0.0.json", "config.4.0.0.json"])
    (copy / "config.4.0.0.json").write_text(json.dumps(other))
    assert adapter_for(read_checkpoint(copy)).text_config.num_hidden_layers == 4


# --- a process of its own -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "not re",
        ),
        ("{{ 'x' * 100000000000 }}", "renders no message of a user"),
    ],
)
def test_a_template_without_an_end_is_told_in_time(copy: Path, template: str, words: str) -> None:
    (copy / "chat_template.jinja").write_text(template)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = model_texts.fault_of(copy)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert str(copy) in said and words in said, said
    assert after.ru_utime - before.ru_utime < LIMIT_S


def test_the_death_of_that_process_is_a_sentence(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model_texts.fault_of(copy) == ""
    dying = tmp_path / "dying"
    dying.write_text("#!/bin/sh\nkill -SEGV $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    with pytest.raises(ModelError, match=rf"{copy}/tokenizer\.json .* \(exit status -11\)"):
        check_model(str(copy))


@pytest.mark.long
def test_headers_of_a_trillion_numbers_take_two_seconds(tmp_path: Path) -> None:
    """70,310 tensors of Kimi-K2.5: what the check takes of CPU, without torch."""
    published = PUBLISHED["moonshotai/Kimi-K2.5"]
    config = config_of(published)
    write_headers(tmp_path, tensors_of(published, config), num_files=64)
    (tmp_path / "config.json").write_text(json.dumps(config))
    processor = published.layout.files["preprocessor_config.json"]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    code = (
        "import sys, time; from epd.cli.configure.model_check import check_model\n"
        "check_model(sys.argv[1], with_gateway=False)\n"
        "assert 'torch' not in sys.modules; print(time.process_time())"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout) < LIMIT_S


# --- shared memory --------------------------------------------------------------------------------


def test_too_little_shared_memory_is_told_before_torch_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = EngineConfig(kv_nbytes=64 << 20)

    def of(name: str, *roles: str) -> InstanceConfig:
        return InstanceConfig(
            instance_id=name, roles=roles, model_dir=str(CHECKPOINT), engine=engine,
            endpoint="ipc:///tmp/x.sock",
        )  # fmt: skip

    instances = [of("e0", "encode"), of("p0", "prefill"), of("d0", "decode")]
    rows_mib, kv_mib = 8192 * 3 * 256 * 4 >> 20, 60
    free = [rows_mib + 2 * kv_mib]

    class Host:
        f_frsize = 1 << 20

        @property
        def f_bavail(self) -> int:
            return free[0]

    monkeypatch.setattr("epd.cli.start.preflight.os.statvfs", lambda path: Host())
    check_shared_memory(instances)
    free[0] -= 1
    words = rf"143 MiB free, .* 144 MiB of it \(p0 {rows_mib + kv_mib}, d0 {kv_mib}\).*--shm-size"
    with pytest.raises(ConfigError, match=words):
        check_shared_memory(instances)
