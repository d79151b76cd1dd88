"""What the gateway reads of a model directory to make prompts, looked at in a process of its own.

A tokenizer is parsed by a library that is not Python's, and a chat template is a program: either
may end its process, or not end at all.  `python -m epd.api.prompts.model_texts DIRECTORY
[TEMPLATE]` prints what is wrong, if anything; `fault_of` reports its death or its delay.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from epd.api.answers.detokenize import Vocabulary
from epd.api.asked.parameters import Spoken
from epd.api.http.errors import ApiError
from epd.api.http.shapes import read_shape
from epd.api.prompts.chat import ChatRenderer
from epd.errors import FAILED, OK, explain
from epd.frontend import JsonObject
from epd.model_files.checkpoint import ModelError, read_config, read_optional

MEMORY_NBYTES = 4 << 30
TIMEOUT_S = 20.0
CPU_S = 1.0  # of templates and small tokenizers, and for each
NBYTES_PER_S = 8 << 20  # of tokenizer.json more
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TOKENS = "max_new_tokens"


class _TooSlow(BaseException):
    """No kind of error that a template's own faults are taken for."""


def sampling_defaults(directory: Path) -> Mapping[str, object]:
    """The publisher's defaults for fields of `Asked`.

    A model that is not meant to be sampled answers greedily, as under generate.  Raises ModelError
    for what a request could not ask for.
    """
    path = directory / "generation_config.json"
    generation = read_optional(path)
    present = {name: generation[name] for name in _NAMES if generation.get(name) is not None}
    found = _read(path, present)
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    elif generation.get("do_sample") not in (None, True):
        raise ModelError(f"{path}: do_sample must be true or false; restore the file")
    if (tokens := generation.get(_TOKENS)) is not None:
        found["default_max_tokens"] = _read(path, {"max_tokens": tokens}, _TOKENS)["max_tokens"]
    return found


def _read(path: Path, present: JsonObject, name: str = "") -> JsonObject:
    try:
        found = read_shape(present, Spoken)
    except ApiError as error:
        said = str(error).replace("max_tokens", name) if name else error
        raise ModelError(f"{path}: {said}; restore the file") from None
    return {name: getattr(found, name) for name in present}


def check(directory: Path, template: str = "") -> None:
    """Raises ModelError where no prompt can be made, or no answer of its own sampling."""
    sampling_defaults(directory)
    renderer = ChatRenderer(directory, template)
    Vocabulary(renderer.tokenizer)
    config = read_config(directory)
    size = (config.get("text_config") or config)["vocab_size"]
    ids = renderer.encode("How many rows?", add_special_tokens=True)
    if not ids or max(ids) >= size:
        raise ModelError(
            f"{directory}/tokenizer.json makes {ids[:8]} of a text, which are no tokens of the "
            f"{size} that config.json has; restore both from one checkpoint"
        )


def fault_of(directory: Path, template: str = "") -> str:
    """What is wrong with what the gateway reads; empty: nothing.  Waits for another process."""
    command = [sys.executable, "-m", __name__, str(directory), template]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{directory}: its tokenizer or chat template {_took(TIMEOUT_S)}"
    if done.returncode == OK:
        return ""
    if done.returncode == FAILED and done.stdout:
        return msgspec.json.decode(done.stdout, type=str)
    return (
        f"{directory}/tokenizer.json or its chat template ends the process that reads them "
        f"(exit status {done.returncode}); restore them from the published checkpoint"
    )


def _took(time_s: float) -> str:
    return f"is not read within {time_s:.0f} s; restore it from the published checkpoint"


def _on_time_up(number: int, frame: object) -> None:
    raise _TooSlow


def main() -> int:
    directory, template = Path(sys.argv[1]), sys.argv[2]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_NBYTES, MEMORY_NBYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    path = directory / "tokenizer.json"
    time_s = CPU_S + (path.stat().st_size if path.is_file() else 0) / NBYTES_PER_S
    signal.signal(signal.SIGVTALRM, _on_time_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, time_s)
    try:
        check(directory, template)
    except _TooSlow:
        sentence = f"{directory}: its chat template {_took(time_s)}"
    except Exception as error:
        sentence = explain(error)[1]
    else:
        return OK
    sys.stdout.buffer.write(msgspec.json.encode(sentence))
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
