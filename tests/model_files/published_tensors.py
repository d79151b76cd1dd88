"""Names and shapes of the tensors of a published checkpoint, by its layout and config.json."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.model_files.published_checkpoints import Published

Shape = tuple[int, ...]


def tensors_of(published: Published, config: Mapping[str, Any]) -> dict[str, Shape]:
    """Every name and shape that is stored with this config.json."""
    if published.layout.shapes is not None:
        return published.layout.shapes(config)
    text = config.get("text_config", config)
    sizes = _sizes(text, config.get("vision_config", {}))
    patterns = {**published.layout.tensors, **published.extra}
    if not text.get("tie_word_embeddings", config.get("tie_word_embeddings")):
        patterns[published.layout.head] = "vocab hidden"
    return {
        name: tuple(_product(word, sizes) for word in shape.split())
        for pattern, shape in patterns.items()
        for name in _names(pattern, sizes)
        if _is_there(name, text.get("layer_types"))
    }


def _is_there(name: str, layer_types: Sequence[str] | None) -> bool:
    """Each layer of a hybrid has one kind of attention."""
    found = re.search(r"language_model\.layers\.(\d+)\.(linear|self)_attn", name)
    if found is None or layer_types is None:
        return True
    return layer_types[int(found[1])].startswith("linear") == (found[2] == "linear")


def _sizes(text: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, int]:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    head = text.get("head_dim") or hidden // heads
    patch, image = (_side(vision.get(name)) for name in ("patch_size", "image_size"))
    keys = text.get("linear_num_key_heads", 0) * text.get("linear_key_head_dim", 0)
    value_heads, value_head = (
        text.get(name, 0) for name in ("linear_num_value_heads", "linear_value_head_dim")
    )
    places = (image // patch) ** 2 if image else 0
    return {
        "vocab": text["vocab_size"],
        "hidden": hidden,
        "ffn": text["intermediate_size"],
        "layers": text.get("num_hidden_layers", 32),
        "head": head,
        "half_head": head // 2,
        "q": heads * head,
        "kv": text["num_key_value_heads"] * head,
        "experts": text.get("num_experts") or text.get("n_routed_experts", 0),
        "dense": text.get("first_k_dense_replace", 0),
        "sparse": text.get("num_hidden_layers", 32),
        "behind": text.get("num_hidden_layers", 32) + text.get("num_nextn_predict_layers", 0),
        **_latent_sizes(text),
        "value_heads": value_heads,
        "value_head": value_head,
        "values": value_heads * value_head,
        "channels": 2 * keys + value_heads * value_head,
        "kernel": text.get("linear_conv_kernel_dim", 0),
        "shared": text.get("shared_expert_intermediate_size", 0),
        "moe": text.get("moe_intermediate_size", 0),
        "tower": vision.get("embed_dim") or vision.get("hidden_size", 0),
        "out": vision.get("out_hidden_size", 0),
        "tower_head": vision.get("hidden_size", 0) // vision.get("num_heads", 1),
        "tower_ffn": vision.get("intermediate_size", 3072),
        "blocks": vision.get("depth") or vision.get("num_hidden_layers", 12),
        "levels": len(vision.get("deepstack_visual_indexes", ())),
        "patch": patch,
        "places": vision.get("num_position_embeddings") or places,
        "places_and_one": places + 1,
    }


def _side(size: int | list[int] | None) -> int:
    """Of a square."""
    return size[0] if isinstance(size, list) else size or 0


def _latent_sizes(text: Mapping[str, Any]) -> dict[str, int]:
    nope, rope, value = (
        text.get(name, 0) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    return {
        "heads": text["num_attention_heads"],
        "query_rank": text.get("q_lora_rank", 0),
        "rank": text.get("kv_lora_rank", 0),
        "query": nope + rope,
        "latent": text.get("kv_lora_rank", 0) + rope,
        "key_value": nope + value,
        "value": value,
    }


def _product(word: str, sizes: Mapping[str, int]) -> int:
    return math.prod(int(part) if part.isdigit() else sizes[part] for part in word.split("*"))


def _names(pattern: str, sizes: Mapping[str, int]) -> Iterator[str]:
    ranges = re.findall(r"\{(\w+)\}", pattern)
    first = {"sparse": sizes["dense"], "behind": sizes["layers"]}  # layers, behind others
    for numbers in itertools.product(*(range(first.get(n, 0), sizes[n]) for n in ranges)):
        yield pattern.format(**dict(zip(ranges, numbers, strict=True)))
