"""The numbers of a config.json under short words, and the shapes that follow from them.

As in transformers, as far as shapes depend on it: names of older releases, numbers that may be left
out, and the kind of each layer.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from epd.model_files.checkpoint import ModelError, Settings
from epd.model_files.family import BOTH, Family, Shape

# Word to the fields that say it, of which the first that is there counts.
_TEXT_WORDS = {
    "vocab": "vocab_size", "hidden": "hidden_size", "ffn": "intermediate_size",
    "heads": "num_attention_heads", "experts": "num_experts num_local_experts n_routed_experts",
    "moe": "moe_intermediate_size", "shared": "shared_expert_intermediate_size n_shared_experts",
    "query_rank": "q_lora_rank", "rank": "kv_lora_rank", "value": "v_head_dim",
    "kernel": "linear_conv_kernel_dim", "value_heads": "linear_num_value_heads",
    "value_head": "linear_value_head_dim", "key_heads": "linear_num_key_heads",
    "key_head": "linear_key_head_dim", "nope": "qk_nope_head_dim", "rope": "qk_rope_head_dim",
    "kv_heads": "num_key_value_heads num_attention_heads", "head": "head_dim",
    "layers": "num_hidden_layers", "context": "max_position_embeddings",
    "full_head": "global_head_dim", "full_kv_heads": "num_global_key_value_heads",
    "per_layer": "hidden_size_per_layer_input", "per_layer_vocab": "vocab_size_per_layer_input",
}  # fmt: skip
_VISION_WORDS = {
    "tower": "embed_dim hidden_size", "tower_hidden": "hidden_size",
    "tower_ffn": "intermediate_size", "blocks": "depth num_hidden_layers", "patch": "patch_size",
    "frames": "temporal_patch_size", "merge": "spatial_merge_size", "ratio": "mlp_ratio",
    "out": "out_hidden_size", "places": "num_position_embeddings", "image": "image_size",
    "rows": "pos_emb_height", "columns": "pos_emb_width",
    "tower_heads": "num_heads num_attention_heads", "tower_head": "head_dim",
    "positions_along": "position_embedding_size",
}  # fmt: skip
_TOP_WORDS = {"projected": "projection_hidden_size", "scale": "scale_factor"}
_MADE = {  # of other words
    "q": "heads*head", "kv": "kv_heads*head", "values": "value_heads*value_head",
    "merged": "merge*merge*tower", "full_q": "heads*full_head",
    "full_kv": "full_kv_heads*full_head",
}  # fmt: skip
_SUMS = {
    "query": ("nope", "rope"), "latent": ("rank", "rope"), "key_value": ("nope", "value"),
    "channels": ("2*key_heads*key_head", "values"),
}  # fmt: skip


# Linear layers of a decoder whose weights may have eight bits, each row with a scale.
PRODUCTS = frozenset(
    "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj in_proj_qkv in_proj_z out_proj".split()
)
SCALE_NBYTES = 4
FEW_BITS = {"eight bits (--quantization fp8)": 1.0, "four bits": 0.5625}  # bytes, with scales


class Sizes:
    """The numbers of one config.json, whose types were looked at (`model_config`)."""

    def __init__(self, path: Any, config: Settings, family: Family) -> None:
        self._path, self._family = path, family
        config = family.plain(config)
        is_flat = not family.vision or (family.is_flat and "text_config" not in config)
        self.text: Settings = config if is_flat else config.get("text_config") or {}
        self.vision: Settings = config.get("vision_config") or {}
        self.config = config

    @cached_property
    def _own(self) -> Mapping[str, int | Sequence[int]]:
        return self._family.words(self.config)

    def __call__(self, word: str) -> int:
        """Raises ModelError where config.json lacks it."""
        if "*" in word:
            return math.prod(map(self, word.split("*")))
        if word.isdigit():
            return int(word)
        if isinstance(own := self._own.get(word), int):
            return own
        if word in _MADE:
            return self(_MADE[word])
        if word in _SUMS:
            return sum(map(self, _SUMS[word]))
        if word == "tiles":
            return (self("image") // self("patch")) ** 2
        if word == "tower_head":
            return self("tower") // self("tower_heads")
        if word == "positions":  # and one for the whole
            return self("tiles") + 1
        if found := self.config.get(_TOP_WORDS.get(word, "")):
            return int(found)
        section, words = ("text_config", _TEXT_WORDS)
        if word in _VISION_WORDS:
            section, words = ("vision_config", _VISION_WORDS)
        source = self.vision if section == "vision_config" else self.text
        names = words.get(word, "").split()
        found = next((source[n] for n in names if source.get(n) is not None), None)
        if found is None and word == "merge" and "merge_kernel_size" in self.vision:
            found = self.vision["merge_kernel_size"][0]
        if found is None and word == "head" and word not in self._family.sizes:
            return self("hidden") // self("heads")
        if found is None and (found := self._family.sizes.get(word)) is None:
            where = f"{section}." if source is not self.config else ""
            raise ModelError(f"{self._path} names no {where}{names[0]}; restore the file")
        return int(found)

    def range(self, name: str) -> Sequence[int | str]:
        """The indices that a pattern has in braces; "once": none, and one tensor."""
        if not isinstance(own := self._own.get(name, 0), int):
            return own
        if name in self._family.ranges:
            of, is_so = self._family.ranges[name]
            return self.range(of) if is_so(self.config) else ()
        if name == "once":
            return ("",)
        if name == "blocks":
            return range(self(name))
        if name == "levels":
            return range(len(self.vision.get("deepstack_visual_indexes") or ()))
        layers = range(self("layers"))
        which, _, of = name.partition("_")
        if which in ("own", "reading"):  # keys and values: of theirs, or of a layer before them
            first = len(layers) - int(self.text.get("num_kv_shared_layers") or 0)
            return [i for i in self.range(of) if (int(i) < first) == (which == "own")]
        if name in ("full", "linear", "sliding"):
            kind = f"{name}_attention"
            return [i for i, one in zip(layers, self.layer_types, strict=False) if one == kind]
        if name in ("sparse", "dense"):
            return [i for i in layers if self._is_sparse(i) == (name == "sparse")]
        conditions = {
            "layers": True,
            "biased": bool(self.text.get("attention_bias")),
            "mlp_biased": bool(self.text.get("mlp_bias")),
            "split": self.text.get("q_lora_rank") is not None,
            "whole": self.text.get("q_lora_rank") is None,
        }
        if name == "biased" and self._family.layer_types == BOTH and conditions[name]:
            return self.range("full")
        return layers if conditions[name] else ()

    @property
    def rope(self) -> tuple[str, Settings]:
        """The settings of rotary positions, and the field that has them."""
        for name in ("rope_scaling", "rope_parameters"):
            if self.text.get(name):
                return name, self.text[name]
        return "rope_parameters", {}

    @property
    def layer_types(self) -> list[str]:
        """Of each layer, as transformers finds them."""
        said: list[str] | None = self.text.get("layer_types")
        count = self("layers")
        if said is not None:
            return said
        if self._family.layer_types == BOTH:
            return ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(count)]
        slides = self.text.get("use_sliding_window") and self.text.get("sliding_window") is not None
        first = self.text.get("max_window_layers", count) if slides else count
        return ["full_attention" if i < first else "sliding_attention" for i in range(count)]

    def _is_sparse(self, layer: int) -> bool:
        first = self.text.get("first_k_dense_replace")
        if first is not None:
            return layer >= int(first)
        step = int(self.text.get("decoder_sparse_step") or 1)
        return layer not in (self.text.get("mlp_only_layers") or ()) and not (layer + 1) % step

    @property
    def is_tied(self) -> bool:
        """Whether head and embedding are one; some composite configs have it for the text alone."""
        said = (source.get("tie_word_embeddings") for source in (self.config, self.text))
        given = [one for one in said if one is not None]
        return any(given) if given else self._family.is_tied


def parameters(family: Family, sizes: Sizes) -> dict[str, Shape]:
    """Name to shape of everything that the model of a config.json has.  Raises ModelError."""
    return {
        name: tuple(map(sizes, shape.split()))
        for pattern, shape in family.tensors.items()
        for name in _names(pattern, sizes)
    }


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers, or bytes, of a model's parameters: of the tower, of the language model outside its
    layers, and of all its layers."""

    tower: int
    outside: int
    layers: int
    products: int  # of `layers`: what can have eight bits
    channels: int  # of these: as many have a scale

    @property
    def language(self) -> int:
        return self.outside + self.layers

    def nbytes(self, number_nbytes: int, quantization: str = "") -> Counts:
        """As they are loaded."""
        saved = self.products * (number_nbytes - 1) - self.channels * SCALE_NBYTES
        layers = self.layers * number_nbytes - (saved if quantization else 0)
        outer = self.tower * number_nbytes, self.outside * number_nbytes
        return Counts(*outer, layers, self.products, self.channels)


def counted(family: Family, sizes: Sizes) -> Counts:
    """Of the model of a config.json; a head that is the embedding counts once.  Raises
    ModelError."""
    tower = outside = layers = products = channels = 0
    for name, shape in parameters(family, sizes).items():
        count = math.prod(shape)
        if family.is_vision(name):
            tower += count
        elif ".layers." in name:
            layers += count
            if name.removesuffix(".weight").rpartition(".")[2] in PRODUCTS and len(shape) == 2:
                products += count
                channels += shape[0]
        elif not (sizes.is_tied and name == "lm_head.weight"):
            outside += count
    return Counts(tower, outside, layers, products, channels)


def _names(pattern: str, sizes: Sizes) -> Iterator[str]:
    ranges = re.findall(r"\{(\w+)\}", pattern)
    for numbers in itertools.product(*map(sizes.range, ranges)):
        yield pattern.format(**dict(zip(ranges, numbers, strict=True)))
