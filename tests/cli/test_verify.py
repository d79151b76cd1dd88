"""`epd verify`: both sides agree on each family; what is wrong on purpose is named by its row."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from epd.cli.boundary import CommandFailed
from epd.cli.main import main
from epd.cli.verify import questions
from epd.cli.verify.findings import Apart, Finding, Result, parting
from epd.cli.verify.fitting import Need, check_fits, need_of
from epd.cli.verify.model_rows import text
from epd.cli.verify.ours import Ours
from epd.cli.verify.report import run_rows
from epd.cli.verify.rows import ROWS
from epd.cli.verify.sides import Sides
from epd.config import EngineConfig, Settings
from epd.model_files.checkpoint import ModelError, read_checkpoint
from epd.model_files.first_layers import cut
from epd.tiny import CHECKPOINT
from tests.engine.tiny_models import FAMILIES, SECOND_SIZES, cached_model

NAMES = [row.name for row in ROWS[:-1]]
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kind of question the first ones."""
    fewer = {"NUM_PROMPTS": 4, "NUM_ANSWERS": 2, "NUM_NEW_TOKENS": 8, "SIZES": questions.SIZES[:2]}
    for name, value in fewer.items():
        monkeypatch.setattr(questions, name, value)


def of(directory: Path, against: Path | None = None, dtype: str = "float32") -> Sides:
    engine = EngineConfig(threads=1, kv_nbytes=4 << 20, dtype=dtype)
    whole = read_checkpoint(directory)
    return Sides(whole, directory, against or directory, Settings(engine=engine))


def found(both: Sides, last: str = NAMES[-1]) -> dict[str, Finding]:
    """Rows until this one."""
    findings = run_rows(both, ROWS[: 1 + NAMES.index(last)])
    both.unload()
    return findings


def first_wrong(findings: dict[str, Finding]) -> tuple[str, str]:
    return next(
        ((n, f.detail) for n, f in findings.items() if f.result is Result.DIFFERS), ("", "")
    )


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3_vl", "float32"), ("llama", "float32"), ("qwen3_vl", "bfloat16")]
)
@pytest.mark.usefixtures("few")
def test_all_rows_are_the_same(family: str, dtype: str) -> None:
    both = of(cached_model(family), dtype=dtype)
    findings = found(both)
    assert {f.result for f in findings.values()} == {Result.SAME}
    assert len(findings) == len(NAMES) if both.sees else len(NAMES) - 4


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_another_expert_for_a_token_is_named_in_16_bits(family: str) -> None:
    findings = found(of(cached_model(family), dtype="bfloat16"))
    assert {f.result for f in findings.values()} == {Result.SAME}
    far = any("another expert" in finding.detail for finding in findings.values())
    assert far == (family == "qwen3_vl_moe")


WHOLE = """
import sys
from pathlib import Path
from epd.cli.main import main
from epd.cli.verify.theirs import Theirs
from tests.engine.reference import reference_processor
directory, report, family = sys.argv[1:]
if family == "kimi_k25":  # which transformers reads with torchvision alone
    Theirs.image_processor = reference_processor(Path(directory))
sys.exit(main(["verify", directory, "--json", report]))
"""


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", [*FAMILIES, *SECOND_SIZES, "smolvlm", "embedded"])
def test_each_family_is_proved_through_processes(family: str, tmp_path: Path) -> None:
    """As a command."""
    directory = CHECKPOINT if family == "embedded" else cached_model(family)
    report = tmp_path / "report.json"
    command = [sys.executable, "-c", WHOLE, str(directory), str(report), family]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(report.read_text())
    assert told["ok"] and [row["result"] for row in told["rows"]] == ["same"] * len(told["rows"])


# --- wrong on purpose, in the files ---------------------------------------------------------------


def damaged(directory: Path, change: Callable[[Tensors], object]) -> None:
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def _drop_norm(directory: Path) -> None:
    name = "model.language_model.layers.1.input_layernorm.weight"
    damaged(directory, lambda tensors: tensors[name].fill_(1.0))


def _scale_tower(directory: Path) -> None:
    name = "model.visual.blocks.1.mlp.linear_fc1.weight"
    damaged(directory, lambda tensors: tensors[name].mul_(1.01))


def _rename(directory: Path) -> None:
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    damaged(directory, lambda tensors: tensors.update({f"{name}s": tensors.pop(name)}))


def _change_base(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["rope_parameters"]["rope_theta"] = 20000.0
    (directory / "config.json").write_text(json.dumps(config))


def _edit_template(directory: Path) -> None:
    path = directory / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|im_end|>", " <|im_end|>", 1))


@pytest.mark.parametrize(
    ("change", "row", "named"),
    [
        (_drop_norm, "weights", "model.language_model.layers.1.input_layernorm.weight differs"),
        (_scale_tower, "weights", "model.visual.blocks.1.mlp.linear_fc1.weight differs"),
        (_rename, "tensors", "layers.0.mlp.up_proj.weight"),
        (_change_base, "config", "rope_theta: 20000.0 here, 10000.0 there"),
        (_edit_template, "template", "here, "),
    ],
)
@pytest.mark.usefixtures("few")
def test_what_is_wrong_in_files_is_named(
    change: Callable[[Path], None], row: str, named: str, tmp_path: Path
) -> None:
    """`--against` the directory before."""
    right = cached_model("qwen3_vl")
    wrong = tmp_path / "wrong"
    shutil.copytree(right, wrong)
    change(wrong)
    name, detail = first_wrong(found(of(wrong, right), row))
    assert name == row and named in detail


def test_a_template_that_refuses_all_proves_nothing(tmp_path: Path) -> None:
    directory = shutil.copytree(cached_model("llama"), tmp_path / "copy")
    (directory / "chat_template.jinja").write_text("{{ raise_exception('not so') }}")
    assert found(of(directory), "template")["template"].result is Result.LEFT_OUT


# --- wrong on purpose, in the engine --------------------------------------------------------------


def _scaled_tower(ours: Ours) -> None:
    ours.vision.model.model.visual.blocks[1].mlp.linear_fc1.weight.mul_(1.01)


def _other_base(ours: Ours) -> None:
    ours.adapter.language_model(ours.language.model).rotary_emb.inv_freq[1:] *= 0.98


def _no_norm(ours: Ours) -> None:
    stack: Any = ours.adapter.language_model(ours.language.model)
    stack.layers[1].post_attention_layernorm.weight.fill_(1.0)


@pytest.mark.parametrize(
    ("change", "row", "dtype"),
    [
        (_scaled_tower, "tower", "float32"),
        (_other_base, "positions", "float32"),
        (_no_norm, "text", "float32"),
        (_no_norm, "text", "bfloat16"),
    ],
)
@pytest.mark.usefixtures("few")
def test_what_is_wrong_in_the_engine_is_named(
    change: Callable[[Ours], None], row: str, dtype: str
) -> None:
    both = of(cached_model("qwen3_vl"), dtype=dtype)
    change(both.ours)
    assert first_wrong(found(both, row))[0] == row


@pytest.mark.parametrize(
    ("wrong", "most", "result"),
    [(-9.0, 0.5, Result.SAME), (-9.0, 0.25, Result.DIFFERS), (math.nan, 0.5, Result.DIFFERS)],
    ids=["another expert", "too often", "no number"],
)
def test_a_few_may_have_another_expert(wrong: float, most: float, result: Result) -> None:
    right, one = torch.arange(4.0), torch.tensor([0.0, 1.0, 2.0, wrong])
    ours = SimpleNamespace(run=lambda found: found, numbers=lambda n: one if n == 2 else right)
    fake: Any = SimpleNamespace(
        ours=ours, most_jumps=most, asked=lambda row: range(4),
        right={"text": ([right] * 4, Apart(0.1, 0.1, 0.1))},
    )  # fmt: skip
    assert text(fake).result is result


# --- what fits, and the command -------------------------------------------------------------------


def test_memory_is_estimated_and_the_remedy_names_layers() -> None:
    need = need_of(read_checkpoint(cached_model("qwen3_vl")), "float32")
    assert need.num_layers == 3 and need.layer_nbytes > 0
    with pytest.raises(CommandFailed, match=r"--layers 2$"):
        check_fits(Need(100, 10, 8), 8, 129, "this host")
    check_fits(Need(100, 10, 8), 2, 129, "this host")
    with pytest.raises(CommandFailed, match="--dtype bfloat16"):
        check_fits(Need(100, 10, 8), 1, 100, "this host")


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
@pytest.mark.usefixtures("few")
def test_the_first_layers_are_compared_alone(family: str, tmp_path: Path) -> None:
    whole = read_checkpoint(cached_model(family))
    directory = cut(whole.directory, 2, tmp_path / "two")
    loose = Settings(engine=EngineConfig(threads=1, kv_nbytes=4 << 20, allow_unused_tensors=True))
    findings = found(Sides(whole, directory, directory, loose), "images")
    assert {f.result for f in findings.values()} == {Result.SAME}
    if family == "qwen3_5":
        with pytest.raises(ModelError, match="give at least 2"):
            cut(whole.directory, 1, tmp_path / "few")


def test_a_report_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    assert main(["verify", "anything", "--json", str(tmp_path / "no" / "report.json")]) == 2


def test_answers_part_where_they_differ() -> None:
    assert parting([1, 2], [1, 2]) is None
    assert parting([1, 1], [1, 2]) == 1 and parting([1], [1, 2]) == 1 and parting([1], []) == 0


def test_ctrl_c_leaves_no_directory_behind(tmp_path: Path) -> None:
    code = """
import os, signal
from epd.cli.scratch import scratch
signal.signal(signal.SIGINT, lambda number, frame: os._exit(9))  # as the command's entry does
with scratch("epd-") as place:
    (place / "config.json").touch()
    signal.raise_signal(signal.SIGINT)
"""
    env = os.environ | {"TMPDIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 130
    assert not list(tmp_path.iterdir())
