"""The durable store: whole values or a miss, whatever happens to its files."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from epd.transport.base import TransportError
from epd.transport.files.store import FileStore
from epd.transport.files.whole_file import MAX_HEADER_NBYTES, head_of, parse_whole
from tests.contract.transfer_kit import pattern

KEY = "0123456789abcdef" * 4


def key(number: int) -> str:
    return f"{number:064x}"


def only_file(store: FileStore) -> Path:
    (path,) = Path(store.directory).glob("*/*")
    return path


def used(store: FileStore) -> int:
    return sum(path.stat().st_size for path in Path(store.directory).glob("*/*"))


def path_of(directory: str | Path, name: str) -> Path:
    return Path(directory, name, "encoder_cache.safetensors")


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(str(tmp_path / "rows"), 1 << 20)


def test_what_was_put_is_there_also_for_the_next_process(store: FileStore) -> None:
    data = pattern(100_001)
    assert store.get(KEY) is None
    assert store.put(KEY, [data[:7], data[7:]], b"77 rows of 3")
    for again in (store, FileStore(store.directory, 1 << 20)):
        found = again.get(KEY)
        assert found is not None
        assert (found[0], bytes(found[1])) == (b"77 rows of 3", data)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65])
def test_any_length(store: FileStore, nbytes: int) -> None:
    assert store.put(KEY, [pattern(nbytes)])
    assert store.get(KEY) == (b"", pattern(nbytes))


@pytest.mark.parametrize("most", [1, 40, 1000])
def test_a_file_is_whole_however_little_is_written_at_a_time(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    def some(fd: int, views: list[memoryview]) -> int:
        return os.write(fd, b"".join(views)[:most])

    monkeypatch.setattr(os, "writev", some)
    assert store.put(KEY, [pattern(700), b"", pattern(7), pattern(2000)], b"note")
    assert store.get(KEY) == (b"note", pattern(700) + pattern(7) + pattern(2000))


def test_what_does_not_fit_on_the_disk_leaves_nothing(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, views: list[memoryview]) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "writev", full)
        assert not store.put(KEY, [pattern(100)])
    assert not list(Path(store.directory).glob(f"{KEY[:2]}*"))
    assert store.put(KEY, [pattern(100)])


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 64, 100, 5000, -1])
def test_a_torn_file_is_a_miss_and_goes(store: FileStore, keep: int) -> None:
    """Fault F32: at whatever byte the crash came."""
    store.put(KEY, [pattern(10_000)])
    path = only_file(store)
    nbytes = path.stat().st_size
    assert 10_000 < nbytes <= 10_256
    os.truncate(path, keep % nbytes)
    assert store.get(KEY) is None
    assert not path.exists()
    assert store.put(KEY, [pattern(10_000)]) and store.get(KEY) is not None


@pytest.mark.parametrize("at", [*range(0, 256, 5), 9000])
def test_a_flipped_bit_is_a_miss(store: FileStore, at: int) -> None:
    store.put(KEY, [pattern(10_000)], b"a note")
    path = only_file(store)
    broken = bytearray(path.read_bytes())
    broken[at] ^= 1
    path.write_bytes(broken)
    assert store.get(KEY) is None


def test_any_reader_of_safetensors_reads_it(store: FileStore) -> None:
    """The format is the field's: other programs may look into a cache."""
    data = pattern(10_001)
    store.put(KEY, [data[:77], data[77:]], b"note \xff")
    with safe_open(only_file(store), framework="numpy") as file:
        assert file.metadata()["note"] == "note \xff"
        assert file.get_tensor("value").tobytes() == data


def test_a_file_of_another_program_is_a_miss(store: FileStore) -> None:
    store.put(KEY, [b"x"])
    save_file({"value": np.zeros(4, np.uint8)}, only_file(store))
    assert store.get(KEY) is None


def test_a_torn_file_is_replaced_by_the_next_put(store: FileStore) -> None:
    store.put(KEY, [pattern(10_000)])
    os.truncate(only_file(store), 5000)
    assert store.put(KEY, [pattern(10_000)])
    assert store.get(KEY) == (b"", pattern(10_000))


@pytest.mark.parametrize(
    "path",
    ["../../etc/passwd", "", "a" * 15, "A" * 64, "/" * 20, "0" * 129, "0" * 63 + "\n", "é" * 20],
)
def test_a_key_is_no_path(store: FileStore, path: str) -> None:
    """Fault F45."""
    with pytest.raises(TransportError, match="hex digits"):
        store.put(path, [b"x"])
    with pytest.raises(TransportError, match="hex digits"):
        store.get(path)
    assert list(Path(store.directory).iterdir()) == []


def test_what_was_not_asked_for_the_longest_goes_first(store: FileStore) -> None:
    for number in range(4):
        assert store.put(key(number), [bytes(200_000)])
        os.utime(path_of(store.directory, key(number)), (number, number))
    assert store.get(key(0)) is not None  # now the youngest
    assert store.put(key(4), [bytes(300_000)])
    assert store.get(key(1)) is None
    assert [name for name in map(store.get, map(key, (0, 2, 3, 4))) if name is None] == []
    assert used(store) <= store.max_nbytes


def test_the_bound_holds(store: FileStore) -> None:
    assert not store.put(key(99), [bytes((1 << 20) + 1)])
    for number in range(30):
        assert store.put(key(number), [bytes(100_000)])
        assert used(store) <= store.max_nbytes
    assert store.keys()[-1] == key(29)


def test_writers_of_one_key_do_not_hurt_each_other(store: FileStore) -> None:
    data = pattern(200_000)
    wrong: list[object] = []

    def work() -> None:
        mine = FileStore(store.directory, 1 << 20)
        for _ in range(10):
            mine.put(KEY, [data])
            found = mine.get(KEY)
            if found is None or found[1] != data:
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert only_file(store).suffix == ".safetensors"


def test_what_dead_writers_left_is_removed_and_what_live_ones_write_is_not(
    store: FileStore,
) -> None:
    place = Path(store.directory, KEY)
    place.mkdir()
    old, new = (place / f"encoder_cache.safetensors.{name}.tmp" for name in ("old", "new"))
    old.touch()
    new.touch()
    os.utime(old, (1, 1))
    store.put(KEY, [b"x"])
    assert not old.exists() and new.exists()


def test_what_is_there_is_listed_when_it_has_changed(store: FileStore) -> None:
    """By whomever: others write to the directory, and other things lie in it."""
    other = FileStore(store.directory, 1 << 20)
    assert store.listing() == []
    assert other.put(KEY, [b"x"])
    Path(store.directory, "epd-e0-1-rows-0.region").mkdir()
    assert store.listing() == [KEY]
    assert store.listing() == [KEY], "so young a time stamp may hide another change"
    os.utime(store.directory, (1, 1))
    assert store.listing() == [KEY]
    assert store.listing() is None
    assert other.put(key(7), [b"y"])
    assert sorted(store.listing() or ()) == sorted([KEY, key(7)])
    path_of(store.directory, KEY).write_bytes(b"rotten")
    assert other.get(KEY) is None
    assert store.listing() == [key(7)]
    assert not Path(store.directory, KEY).exists()


def test_an_unusable_directory_is_one_sentence() -> None:
    with pytest.raises(TransportError, match="may write to"):
        FileStore("/proc/nothing", 1)
    with pytest.raises(TransportError, match="holds nothing"):
        FileStore("/tmp", 0)


def test_a_link_is_not_followed(store: FileStore, tmp_path: Path) -> None:
    FileStore(str(tmp_path / "other"), 1 << 20).put(KEY, [b"secret"])
    target = path_of(tmp_path / "other", KEY)
    Path(store.directory, KEY).mkdir()
    path_of(store.directory, KEY).symlink_to(target)
    assert store.get(KEY) is None
    assert target.exists()


@pytest.mark.parametrize(("note_nbytes", "is_read"), [(1000, True), (MAX_HEADER_NBYTES, False)])
def test_a_header_is_read_up_to_a_bound(note_nbytes: int, is_read: bool) -> None:
    whole = memoryview(head_of(b"n" * note_nbytes, 0, 0))
    assert (parse_whole(whole, verify=True) is not None) is is_read
