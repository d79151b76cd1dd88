"""Made EAGLE-3 heads in the published layout, and what the published forward drafts with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, linear, rms_norm, scaled_dot_product_attention, silu

from tests.engine.reference import reference_model

Tensors = dict[str, torch.Tensor]
EPS, NUM_STEPS, LAYERS = 1e-5, 60, [0, 1]  # behind which it reads
ATTENTION, MLP = "midlayer.self_attn.{}_proj.weight", "midlayer.mlp.{}_proj.weight"
NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")


def make_head(directory: Path, model_dir: Path, texts: Sequence[Any] = (), **told: Any) -> Path:
    """Random, or with `texts` by heart; `told`: what its config.json has besides.  Its vocabulary
    has the higher tokens of the model's, and those of `texts`."""
    model = reference_model(model_dir)
    text = model.config.get_text_config()
    size, heads = int(text.hidden_size), int(text.num_attention_heads)
    width = getattr(text, "head_dim", None) or size // heads
    vocabulary, num_kv = int(text.vocab_size), int(text.num_key_value_heads)
    words = {token for ids in texts for token in ids} | set(range(90, vocabulary))
    is_whole = "draft_vocab_size" in told
    tokens = torch.arange(vocabulary) if is_whole else torch.tensor(sorted(words))
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": size,
        "intermediate_size": size, "num_hidden_layers": 1, "num_attention_heads": heads,
        "num_key_value_heads": num_kv, "head_dim": width, "vocab_size": vocabulary,
        "rms_norm_eps": EPS, "rope_theta": 5000.0, "draft_vocab_size": len(tokens),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}, "hidden_act": "silu",
    } | told  # fmt: skip
    shapes = {
        "fc.weight": (size, len(LAYERS) * size),
        "norm.weight": (size,),
        "lm_head.weight": (len(tokens), size),
        **{f"midlayer.{name}.weight": (size,) for name in NORMS},
        ATTENTION.format("q"): (heads * width, 2 * size),
        **{ATTENTION.format(name): (num_kv * width, 2 * size) for name in "kv"},
        ATTENTION.format("o"): (size, heads * width),
        **{MLP.format(name): (size, size) for name in ("gate", "up", "down")},
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        tensors = {n: torch.randn(s) * (s[-1] ** -0.5) + (len(s) < 2) for n, s in shapes.items()}
    _train(config, tensors, model, texts, tokens)
    if not is_whole:
        tensors["d2t"] = tokens - torch.arange(len(tokens))
        tensors["t2d"] = torch.isin(torch.arange(vocabulary), tokens)
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def forward(config: Any, t: Tensors, embeds: torch.Tensor, known: torch.Tensor) -> tuple[Any, Any]:
    """Hidden states and logits `[T, ...]`, as in the published code."""
    count, width = len(embeds), config["head_dim"]
    angles = config["rope_theta"] ** (-torch.arange(0, width, 2) / width)
    angles = (torch.arange(count)[:, None] * angles).repeat(1, 2)

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], t[f"{name}.weight"], EPS)

    def turned(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-high, low], -1) * angles.sin()

    pair = normed(embeds, "midlayer.input_layernorm"), normed(known, "midlayer.hidden_norm")
    x = torch.cat(pair, -1)
    q, k, v = (linear(x, t[ATTENTION.format(n)]).view(count, -1, width) for n in "qkv")
    rows = turned(q.transpose(0, 1)), turned(k.transpose(0, 1)), v.transpose(0, 1)
    attended = scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
    hidden = known + linear(attended.transpose(0, 1).flatten(1), t[ATTENTION.format("o")])
    x = normed(hidden, "midlayer.post_attention_layernorm")
    gate, up = (linear(x, t[MLP.format(name)]) for name in ("gate", "up"))
    hidden = hidden + linear(silu(gate) * up, t[MLP.format("down")])
    return hidden, linear(normed(hidden, "norm"), t["lm_head.weight"])


@torch.no_grad()
def _known(model: Any, ids: Sequence[int]) -> torch.Tensor:
    found = model(input_ids=torch.tensor([list(ids)]), output_hidden_states=True)
    return torch.cat([found.hidden_states[1 + layer][0] for layer in LAYERS], -1)


def _train(config: Any, tensors: Tensors, model: Any, texts: Sequence[Any], tokens: Any) -> None:
    optimiser = torch.optim.AdamW([one.requires_grad_() for one in tensors.values()], 2e-3)
    for ids in list(texts) * NUM_STEPS:
        row = torch.tensor(list(ids))
        embeds = model.get_input_embeddings()(row[1:-1]).detach()
        known = linear(_known(model, ids[:-2]), tensors["fc.weight"])
        hidden, logits = forward(config, tensors, embeds, known)
        again = forward(config, tensors, embeds[1:], hidden[:-1])[1]  # from its own states
        wanted = torch.searchsorted(tokens, row[2:])
        loss = cross_entropy(logits, wanted) + cross_entropy(again, wanted[1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for one in tensors.values():
        one.requires_grad_(False)


@torch.no_grad()
def head_drafts(head_dir: Path, model_dir: Path, ids: Sequence[int], count: int) -> list[int]:
    """Of a text without images, of which all but the last token are computed."""
    config = json.loads((head_dir / "config.json").read_text())
    tensors, model = load_file(head_dir / "model.safetensors"), reference_model(model_dir)
    known = linear(_known(model, ids[:-1]), tensors["fc.weight"])
    said = list(ids)
    for _ in range(count):
        embeds = model.get_input_embeddings()(torch.tensor(said[1:]))
        hidden, logits = forward(config, tensors, embeds, known)
        best = int(logits[-1].argmax())
        said.append(best + int(tensors["d2t"][best]) if "d2t" in tensors else best)
        known = torch.cat([known, hidden[-1:]])
    return said[len(ids) :]
