"""Hostile variants of a model directory: one seed, one directory.

Each kind is a rule: a place in a JSON file or header, chosen by chance, and what is put there; a
file that is cut, filled, exchanged for something else; a name that leads elsewhere.  `KINDS` names
the rules, and a seed takes one of them, some of them twice.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIG, GENERATION = "config.json", "generation_config.json"
PROCESSOR, VIDEO = "preprocessor_config.json", "video_preprocessor_config.json"
TOKENIZER, TOKENS = "tokenizer.json", "tokenizer_config.json"
TEMPLATE, WEIGHTS = "chat_template.jinja", "model.safetensors"
INDEX = "model.safetensors.index.json"
JSON_FILES = (CONFIG, GENERATION, PROCESSOR, VIDEO, TOKENIZER, TOKENS)
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 10**6, 10**12, 2**62, 10**20, -(2**63), 0.5, 20.0, -0.1,
    1e300, float("inf"), float("nan"), "", "x", "0.7", "../x", "\ud800", "\0", "x" * 5000, [], {},
    [None], ["x", -1, 10**20], [[[]]], {"x": 1}, [0] * 100, {"content": 5},
)  # fmt: skip
HOSTILE_TEMPLATES = (
    "{{", "{% for x in %}", "{% if %}", "{{ messages[0].content.nothing.at_all }}", "{{ 1/0 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ raise_exception('no') }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "(" * 5000, "{{" + "(" * 3000,
    "{% include '../../etc/passwd' %}", "{% extends messages %}", "{{ 'x' * 10 }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ undefined_function() }}", "{% set x = namespace() %}{{ x.y.z }}", "",
)  # fmt: skip


def _load(path: Path) -> Any:
    return json.loads(path.read_text())


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every member and item, at most a hundred of one container."""
    found = []
    if isinstance(value, dict | list):
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        for key, inner in items[:100]:
            found += [(*at, key), *_places(inner, (*at, key))]
    return found


def _edit(rng: random.Random, path: Path, change: Callable[[Any, Any], None]) -> None:
    value = _load(path)
    places = _places(value)
    *way, key = places[rng.randrange(len(places))]
    inner = value
    for step in way:
        inner = inner[step]
    change(inner, key)
    path.write_text(json.dumps(value))


def _put(value: Any) -> Callable[[Any, Any], None]:
    def change(inner: Any, key: Any) -> None:
        inner[key] = value

    return change


def _drop(inner: Any, key: Any) -> None:
    del inner[key]


def _scaled(rng: random.Random) -> Callable[[Any, Any], None]:
    factor = rng.choice((0, -1, 2, 3, 10**4, 10**12, 0.5))

    def change(inner: Any, key: Any) -> None:
        number = isinstance(inner[key], int | float)
        inner[key] = inner[key] * factor if number else [inner[key]]

    return change


# --- headers --------------------------------------------------------------------------------------


def read_weights(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (nbytes,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + nbytes]), data[8 + nbytes :]


def write_weights(path: Path, header: Any, data: bytes, claimed: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if claimed is None else claimed) + text + data)


def _header(rng: random.Random, path: Path) -> None:
    """A member of one tensor is odd, lacks, or is another's."""
    header, data = read_weights(path)
    names = [name for name in header if name != "__metadata__"]
    name, other = rng.choice(names), rng.choice(names)
    member = rng.choice(("dtype", "shape", "data_offsets"))
    way = rng.randrange(6)
    if way == 0:
        header[name][member] = rng.choice(ODD)
    elif way == 1:
        del header[name][member]
    elif way == 2:
        header[name][member] = header[other][member]
    elif way == 3:
        header[name] = rng.choice(ODD)
    elif way == 4:
        header[rng.choice(("../x", "\0", "x" * 9999, "model.", name + ".extra"))] = header.pop(name)
    else:
        header[name]["shape"] = [*header[name]["shape"], rng.choice((1, 0, 2**62, -1))]
    write_weights(path, header, data)


def _frame(rng: random.Random, path: Path) -> None:
    """The frame of a header: its length, its depth, what is behind it."""
    header, data = read_weights(path)
    text = json.dumps(header).encode()
    twice = text[:-1] + b", " + text[1:]
    deep = rng.choice((b"[", b'{"a":')) * 200_000
    choices: list[tuple[bytes, bytes, int | None]] = [
        (text, data, 2**62), (text, data, 2**64 - 1), (text, data, 0), (text, data, 10**8),
        (text, data, len(text) - 1), (text, data, len(text) + 8), (deep, data, None),
        (twice, data, None), (b"\xff" + text, data, None), (text.replace(b"B", b"\0"), data, None),
        (b"[]", data, None), (b"{}", b"", None), (b"null", data, None), (text, data[:-1], None),
        (text, data + b"x", None), (text, b"", None), (b"", b"", None), (b"\x80\x04.", b"", None),
    ]  # fmt: skip
    write_weights(path, *rng.choice(choices))


# --- files ----------------------------------------------------------------------------------------


def _filled(rng: random.Random, path: Path) -> None:
    """Another content, of any file."""
    content = path.read_bytes()
    cut = rng.randrange(len(content))
    path.write_bytes(
        rng.choice((
            b"", b"\0" * 100, b"[" * 200_000, b'{"a":' * 200_000, b"\xff\xfe", content[:cut],
            content[:cut] + b"\xff" + content[cut:], b"null", b"[]", b"7", b'"text"', b"{}",
            b"\x80\x04\x95pickle.", b'{"a": ' + b"9" * 5000 + b"}",
        ))
    )  # fmt: skip


def _exchanged(rng: random.Random, path: Path) -> None:
    """Something else of that name."""
    path.unlink()
    way = rng.randrange(5)
    if way == 0:
        path.mkdir()
    elif way == 1:
        os.mkfifo(path)
    elif way == 2:
        path.symlink_to("nowhere/at/all")
    elif way == 3:
        path.symlink_to(path.name)
    else:
        with path.open("wb") as file:  # a hole as long as a disk
            file.write(b"{")
            file.truncate(1 << 40)


def _index(rng: random.Random, directory: Path) -> None:
    """An index that names files elsewhere, or none."""
    outside = directory.parent / "outside.safetensors"
    shutil.copyfile(directory / WEIGHTS, outside)
    name: Any = rng.choice((
        "../outside.safetensors", str(outside), "./model.safetensors", "x/../model.safetensors",
        "..", ".", "", "model.safetensors\0", "none.safetensors", "config.json", 7, None, [],
        "a" * 999, "..\\outside.safetensors", "sub/model.safetensors",
    ))  # fmt: skip
    header, _ = read_weights(directory / WEIGHTS)
    weight_map = dict.fromkeys(header, WEIGHTS)
    weight_map[rng.choice(list(header))] = name
    value = {"weight_map": weight_map if rng.random() < 0.8 else rng.choice(ODD)}
    (directory / INDEX).write_text(json.dumps(value))


def _known(rng: random.Random, directory: Path) -> None:
    """A field by which sizes or programs are chosen, with a value that fits nothing."""
    file, place, values = rng.choice((
        (CONFIG, "text_config.num_hidden_layers", (10**12, 5, 3, 0, -1, "4", 4.0)),
        (CONFIG, "vision_config.depth", (10**12, 5, 7, 0)),
        (CONFIG, "text_config.vocab_size", (10**12, 100, 273, 0)),
        (CONFIG, "text_config.hidden_size", (257, 10**9, 1)),
        (CONFIG, "text_config.num_attention_heads", (3, 10**9, 8)),
        (CONFIG, "text_config.num_key_value_heads", (3, 4, 1)),
        (CONFIG, "text_config.hidden_act", ("os.system", "gelu2", 5)),
        (CONFIG, "text_config.max_position_embeddings", (0, 10**15, "x")),
        (CONFIG, "text_config.layer_types", (["sliding_attention"] * 4, ["full_attention"], ["x"])),
        (CONFIG, "text_config.rope_scaling", ({"rope_type": "dynamic"}, {"type": "no"}, [], "x")),
        (CONFIG, "text_config.eos_token_id", (["x", -1, 10**20], 272, -1, "x", 1.5)),
        (CONFIG, "vision_config.patch_size", (0, -8, 10**9, 16, "8", [8, 8])),
        (CONFIG, "vision_config.deepstack_visual_indexes", ([0], [1, 99], [1, 1], 7)),
        (CONFIG, "quantization_config", ({"quant_method": "gptq"}, {"quant_method": "fp8"}, [], 4)),
        (CONFIG, "model_type", ("gpt2", "../x", None, ["qwen3_vl"], "llama")),
        (CONFIG, "image_token_id", (10**20, -1, "x", 5)),
        (CONFIG, "auto_map", ({"AutoConfig": "evil.Evil"},)),
        (CONFIG, "configuration_files", (["config.1.0.0.json"], ["../config.1.0.0.json"])),
        (GENERATION, "eos_token_id", (["x", -1, 10**20], 272, -1, "x", 1.5, [[]], True)),
        (GENERATION, "temperature", ("0.7", -1, 5, [], True)),
        (GENERATION, "top_k", (20.5, -2, "20", 2**40)),
        (GENERATION, "top_p", (0, 1.5, "1", [0.5])),
        (GENERATION, "min_p", (-0.5, 2, {})),
        (GENERATION, "repetition_penalty", (0, -1, 99, "x")),
        (GENERATION, "max_new_tokens", (0, -1, 1.5, "x", [])),
        (GENERATION, "do_sample", ("no", 0, [])),
        (PROCESSOR, "patch_size", (0, 16, -1, "8", 10**9)),
        (PROCESSOR, "size", ([], 5, {"shortest_edge": 10**15}, {"longest_edge": 0})),
        (PROCESSOR, "image_mean", ([0.5], "x", [0.5, None, 0.5])),
        (PROCESSOR, "image_std", ([0, 0, 0], [0.5])),
        (VIDEO, "temporal_patch_size", (0, 3, "2")),
        (VIDEO, "fps", (0, -1, "x", 1e300)),
        (TOKENS, "added_tokens_decoder", ({"x": {}}, {"-1": {"content": 5}}, [], {"1": None})),
        (TOKENS, "chat_template", (5, [5], [{"name": []}], {"x": 1})),
        (TOKENS, "eos_token", ({"content": 5}, {}, 7, [])),
        (TOKENIZER, "model.vocab", ({}, [], {"a": -1}, {"a": 10**9}, {"a": "b"})),
        (TOKENIZER, "normalizer", ({"type": "Replace"}, {"type": "no"}, [], 5)),
        (TOKENIZER, "pre_tokenizer", ({"type": "Split", "pattern": {"Regex": "("}}, 5)),
    ))  # fmt: skip
    value = _load(directory / file)
    *way, key = place.split(".")
    inner = value
    for step in way:
        inner = inner[step]
    inner[key] = rng.choice(values)
    (directory / file).write_text(json.dumps(value))


def _template(rng: random.Random, directory: Path) -> None:
    (directory / TEMPLATE).write_text(rng.choice(HOSTILE_TEMPLATES))


def _pickles(rng: random.Random, directory: Path) -> None:
    """Programs that whoever reads them runs; they leave a file behind."""
    left = f"open({str(directory.parent / 'code-ran')!r}, 'w')"
    pickled = b"cbuiltins\nexec\n(S" + repr(left).encode() + b"\ntR."
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "optimizer.pkl"):
        (directory / name).write_bytes(pickled)
    names = ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "setup.py")
    for name in names:
        (directory / name).write_text(f"{left}\nclass Evil: pass\n")
    for file in (CONFIG, TOKENS, PROCESSOR):
        value = _load(directory / file)
        value["auto_map"] = dict.fromkeys(("AutoConfig", "AutoModel"), "modeling_evil.Evil")
        value["trust_remote_code"] = True
        (directory / file).write_text(json.dumps(value))
    if rng.random() < 0.5:
        (directory / WEIGHTS).write_bytes(pickled)


def _any_json(rng: random.Random, directory: Path) -> Path:
    return directory / rng.choice((CONFIG, *JSON_FILES))


KINDS: dict[str, Callable[[random.Random, Path], None]] = {
    "odd value": lambda rng, d: _edit(rng, _any_json(rng, d), _put(rng.choice(ODD))),
    "lacks a member": lambda rng, d: _edit(rng, _any_json(rng, d), _drop),
    "scaled": lambda rng, d: _edit(rng, _any_json(rng, d), _scaled(rng)),
    "known": _known,
    "header": lambda rng, d: _header(rng, d / WEIGHTS),
    "frame": lambda rng, d: _frame(rng, d / WEIGHTS),
    "filled": lambda rng, d: _filled(rng, d / rng.choice((*JSON_FILES, TEMPLATE, WEIGHTS))),
    "exchanged": lambda rng, d: _exchanged(rng, d / rng.choice((*JSON_FILES, TEMPLATE, WEIGHTS))),
    "index": _index,
    "template": _template,
    "pickles": _pickles,
}


def write(seed: int, source: Path, target: Path) -> str:
    """A hostile copy of `source` at `target`, which is made; returns the kind."""
    rng = random.Random(seed)
    target.mkdir(parents=True)
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)
    kind = list(KINDS)[seed % len(KINDS)]
    KINDS[kind](rng, target)
    return kind
