"""The file of keys: hashes alone, strictly read, replaced as a whole, closed to other users."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from epd.api.http.identity import digest_of
from epd.api.http.key_file import ApiKey, changed, new_key, read_keys
from epd.config import ConfigError, KeyLimits
from tests.key_files import write_keys

HASH = "ab" * 32
LINE = f'{{"name":"ann","sha256":"{HASH}"}}'


def written(path: Path, *lines: str) -> str:
    path.touch(0o600)
    path.write_text("\n".join(lines))
    return str(path)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "keys.jsonl")
    ends = datetime(2027, 1, 1, tzinfo=UTC)
    keys = [
        ApiKey("ann", HASH, "acme", ends, operator=True, limits=KeyLimits(concurrency=3)),
        ApiKey("bob", "cd" * 32),
    ]
    write_keys(path, keys)
    assert [*read_keys(path).items()] == [(bytes.fromhex(key.sha256), key) for key in keys]
    inode = (tmp_path / "keys.jsonl").stat().st_ino
    write_keys(path, keys[:1])
    found = (tmp_path / "keys.jsonl").stat()
    assert found.st_ino != inode, "whoever reads the old file reads all of it"
    assert found.st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["keys.jsonl"], "nothing is left over"


def test_a_key_is_random_and_stands_nowhere(tmp_path: Path) -> None:
    texts = {new_key() for _ in range(100)}
    assert len(texts) == 100 and min(map(len, texts)) >= len("epd-") + 43  # 256 bits
    text = texts.pop()
    path = tmp_path / "keys.jsonl"
    write_keys(str(path), [ApiKey("ann", digest_of(text.encode()).hex())])
    assert text.removeprefix("epd-") not in path.read_text()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "malformed|truncated"),
        ("[]", "Expected `object`"),
        ('{"name":"bob"}', "sha256"),
        (f'{{"name":"bob","sha256":"{HASH[1:]}"}}', r"sha256"),
        (f'{{"name":"b b","sha256":"{HASH}"}}', r"\$.name"),
        (f'{{"name":"bob\\n","sha256":"{HASH}"}}', r"\$.name"),
        (f'{{"name":"bob","sha256":"{HASH}","expires":1}}', "unknown field `expires`"),
        (f'{{"name":"bob","sha256":"{HASH}","expires_at":"2027-01-01T00:00:00"}}', "timezone"),
        (f'{{"name":"bob","sha256":"{HASH}","limits":{{"concurrency":-1}}}}', "concurrency"),
        (f'{{"name":"ann","sha256":"{"cd" * 32}"}}', "on a line before"),
        (f'{{"name":"bob","sha256":"{HASH}"}}', "on a line before"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = written(tmp_path / "keys.jsonl", LINE, "", line)
    with pytest.raises(ConfigError, match=f"keys.jsonl, line 3: .*({words})"):
        read_keys(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o602])
def test_it_is_closed_to_other_users(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "keys.jsonl", LINE)
    Path(path).chmod(mode)
    with pytest.raises(ConfigError, match="open to other users: chmod 600"):
        read_keys(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_keys(path + "x")


def test_several_change_it_one_after_another(tmp_path: Path) -> None:
    path = str(tmp_path / "keys.jsonl")

    def add(first: int) -> None:
        for number in range(first, first + 10):
            with changed(path) as keys:
                keys.append(ApiKey(f"k{number}", f"{number:064x}"))

    threads = [threading.Thread(target=add, args=(first,)) for first in (0, 10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in read_keys(path).values()} == {f"k{n}" for n in range(30)}


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "keys.jsonl"
    link.symlink_to(tmp_path / "there" / "keys.jsonl")
    write_keys(str(link), [ApiKey("ann", HASH)])
    assert link.is_symlink() and len(read_keys(str(link))) == 1


def test_what_fails_midway_changes_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "keys.jsonl")
    write_keys(path, [ApiKey("ann", HASH)])
    with pytest.raises(RuntimeError), changed(path) as keys:
        keys.clear()
        raise RuntimeError
    assert len(read_keys(path)) == 1
