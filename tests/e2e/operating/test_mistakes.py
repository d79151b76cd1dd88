"""Mistakes of whoever starts it: one sentence, a status, and nothing is left behind."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from epd.tiny import CHECKPOINT
from tests.e2e.server import run

pytestmark = pytest.mark.timeout(300)
LONG = pytest.mark.long


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def check_one_sentence(status: int, text: str, wanted: int, *words: str) -> None:
    last = text.strip().splitlines()[-1]
    assert status == wanted, text
    assert last.startswith("epd: "), text
    for word in words:
        assert word in last, last
    assert "Traceback" not in text and "internal error" not in text, text


MISTAKES = [  # one of each kind; tests/cli has them all within a process
    (["run", "--topology", "1e1p1d", "--frobnicate"], 2, ["--frobnicate"]),
    (["run", "--topology", "1epd", "--model", "/no/such/model"], 1, ["/no/such/model"]),
    (["run", "--topology", "1epd", "--device", "cuda"], 2, ["cpu"]),
    (["ask", "hello", "--url", "http://127.0.0.1:9"], 1, ["127.0.0.1:9"]),
]


@pytest.mark.parametrize(("arguments", "wanted", "words"), MISTAKES)
def test_a_mistake_is_one_sentence(arguments: list[str], wanted: int, words: list[str]) -> None:
    if arguments[0] == "run":
        arguments = [*arguments, "--port", "0"]
    status, text = run(*arguments)
    check_one_sentence(status, text, wanted, *words)


@pytest.mark.parametrize(
    "what",
    [("--topology", "1e1p1d"), ("--role", "gateway"), pytest.param(("--role", "all"), marks=LONG)],
)
def test_port_in_use(taken_port: int, what: tuple[str, str]) -> None:
    status, text = run("run", *what, "--port", str(taken_port))
    check_one_sentence(status, text, 2, str(taken_port), "--port")
    assert len(text.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("what", "damage"),
    [
        (("--topology", "1e1p1d"), "missing"),
        pytest.param(("--role", "all"), "missing", marks=LONG),
        pytest.param(("--role", "all"), "shape", marks=LONG),
        pytest.param(("--topology", "1e1p1d"), "truncated", marks=LONG),
        (("--topology", "1e1p1d"), "no tokenizer"),
        (("--topology", "1e1p1d"), "config"),
    ],
)
def test_damaged_model(tmp_path: Path, what: tuple[str, str], damage: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(CHECKPOINT, model)
    word = damage_model(model, damage)
    status, text = run("run", *what, "--model", str(model), "--port", "0", "--threads", "1")
    check_one_sentence(status, text, 1, word)


def damage_model(model: Path, damage: str) -> str:
    """What the message must name."""
    from safetensors.torch import load_file, save_file

    weights = model / "model.safetensors"
    if damage == "no tokenizer":
        (model / "tokenizer.json").unlink()
        return "tokenizer.json"
    if damage == "config":
        (model / "config.json").write_text("{")
        return "config.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:100_000])
        return "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if "language_model" in name and "q_proj" in name)
    if damage == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, weights, metadata={"format": "pt"})
    return name


@pytest.mark.long
def test_full_shared_memory() -> None:
    """A pool larger than /dev/shm: the size, what is free, and the setting are named."""
    free = psutil.disk_usage("/dev/shm").free
    setting = f"prefill.pool_nbytes={free + (1 << 30)}"
    status, text = run("run", "--role", "prefill", "--port", "0", "--set", setting)
    check_one_sentence(status, text, 2, "/dev/shm", "pool_nbytes", "MiB")
