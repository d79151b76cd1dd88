"""`epd keys` changes its file, and nothing else is printed than the new key."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from epd.api.http.identity import digest_of
from epd.api.http.key_file import read_keys
from epd.cli.main import main
from epd.config import KeyLimits


def test_a_key_is_made_listed_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "keys.jsonl")
    more = ["--tenant", "acme", "--expires", "90d", "--concurrency", "8", "--operator"]
    assert main(["keys", "make", "ann", "--key-file", path, *more]) == 0
    out, err = capsys.readouterr()
    assert "shown this once" in err
    ((digest, key),) = read_keys(path).items()
    assert digest == digest_of(out.strip().encode()) and key.operator
    assert (key.name, key.tenant, key.limits) == ("ann", "acme", KeyLimits(concurrency=8))
    assert key.expires_at is not None
    assert abs((key.expires_at - datetime.now(UTC)).total_seconds() - 90 * 86400) < 600
    assert main(["keys", "make", "bob", "--key-file", path]) == 0
    capsys.readouterr()
    assert main(["keys", "list", "--key-file", path]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[:2] for line in listed.splitlines()] == [
        ["NAME", "TENANT"],
        ["ann", "acme"],
        ["bob"],
    ]
    assert key.sha256 not in listed
    assert main(["keys", "remove", "ann", "--key-file", path]) == 0
    assert [one.name for one in read_keys(path).values()] == ["bob"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["make", "bob"], 1, "has a key bob"),
        (["remove", "ann"], 1, "has no key ann"),
        (["make", "a/b"], 2, "letters, digits"),
        (["make", "ann", "--concurrency", "-1"], 2, "concurrency"),
        (["make"], 2, "epd keys make NAME --key-file FILE"),
        (["list", "bob"], 2, "epd keys make NAME --key-file FILE"),
        (["revoke", "bob"], 2, "not one of make, list, remove, reload"),
    ],
)
def test_what_is_wrong_is_a_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    words: str,
) -> None:
    path = str(tmp_path / "keys.jsonl")
    main(["keys", "make", "bob", "--key-file", path])
    before = Path(path).read_text()
    assert main(["keys", *arguments, "--key-file", path]) == status
    assert words in capsys.readouterr().err
    assert Path(path).read_text() == before
