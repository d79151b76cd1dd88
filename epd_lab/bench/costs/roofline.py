"""What cards could do of a workload, by arithmetic alone.

Theory of operation
-------------------
A request costs its arithmetic: the tower over its images, the layers over its prompt.  Each token
of its answer costs its keys and values and its share of the weights, which a step reads once for
all users.  Both one after the other, at the highest rates that were seen on the card, are the
bound.  A server that hides one behind the other could pass it; none here has come near that.
Several cards have so many times the rates, and read weights once for all users of all of them.  No
topology has both: replicas read them once each, a decode instance at the rate of one card, and
ranks meet.

Of a mixture a step reads the experts that its tokens chose: the number is that of equally likely
experts, which is the most.

Of linear attention a step reads and writes the matrices of each sequence; what it computes with
them is not counted.

There are bounds of decoders of the common shape, those of dense Qwen3.5, and towers of Qwen3-VL.
There are none of latent rows, shared experts, and experts beside layers of eight bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from epd.model_files.geometry import image_geometry
from epd_lab.bench.workload import Closed, Shape, Stream

NUMBER_NBYTES = 2  # of bf16
STATE_NBYTES = 4  # of a number in a state
UNKNOWN = frozenset({"kv_lora_rank", "shared_expert_intermediate_size"})  # in a text's config


@dataclass(frozen=True, slots=True)
class Card:
    """Rates that were seen: products of random numbers, copies within the memory."""

    flops: float
    fp8_flops: float
    nbytes_per_s: float


CARDS = {"H200": Card(790e12, 1480e12, 4.3e12), "H100": Card(797e12, 1480e12, 3.03e12)}


@dataclass(frozen=True, slots=True)
class Roofline:
    """Of one model directory on cards of a kind; the configs are its JSON files."""

    card: Card
    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any]
    is_fp8: bool = False
    has_fp8_kv: bool = False
    num_cards: int = 1

    def request_s(self, stream: Stream, prompt_tokens: float) -> tuple[float, float] | None:
        """Seconds of arithmetic and of reading, of one card, for one request; None: there is no
        bound."""
        text, vision = self.config.get("text_config"), self.config.get("vision_config", {})
        if text is None or not isinstance(stream.arrival, Closed):
            return None
        shape = stream.shape
        if (shape.images and "depth" not in vision) or (self.is_fp8 and "num_experts" in text):
            return None
        if not UNKNOWN.isdisjoint(text):
            return None
        each = _sizes(text, NUMBER_NBYTES - self.has_fp8_kv)
        read = _sizes(text, 0, stream.arrival.concurrency).layers
        rate = self.card.fp8_flops if self.is_fp8 else self.card.flops
        arithmetic_s = 2 * each.layers * prompt_tokens / rate
        causal = 2 * prompt_tokens**2 * text["num_attention_heads"] * text["head_dim"]
        other = each.num_attending * causal + shape.images * self._tower_flops(shape)
        arithmetic_s += other / self.card.flops
        weights = read * (1 if self.is_fp8 else NUMBER_NBYTES) + each.head * NUMBER_NBYTES
        tokens = prompt_tokens + shape.output_tokens / 2  # of the text, on average
        own = each.kv_nbytes * tokens + 2 * each.state_nbytes
        step_nbytes = own + weights / stream.arrival.concurrency
        return arithmetic_s, shape.output_tokens * step_nbytes / self.card.nbytes_per_s

    def requests_per_s(self, stream: Stream, prompt_tokens: float) -> float | None:
        """The bound, if there is one."""
        seconds = self.request_s(stream, prompt_tokens)
        return None if seconds is None else self.num_cards / sum(seconds)

    def _tower_flops(self, shape: Shape) -> float:
        """Of one image: layers, attention of all patches over each other, and mergers."""
        vision = self.config["vision_config"]
        geometry = image_geometry(self.config, self.preprocessor, *shape.size)
        patches, width = geometry.num_patches, vision["hidden_size"]
        layer = 4 * width**2 + 2 * width * vision["intermediate_size"]
        wide = width * vision["spatial_merge_size"] ** 2
        levels = 1 + len(vision.get("deepstack_visual_indexes", ()))
        merger = levels * (wide**2 + wide * vision["out_hidden_size"])
        attention = 4 * patches**2 * width
        depth = vision["depth"]
        products = 2 * (depth * layer * patches + merger * geometry.num_rows)
        return float(products + depth * attention)


def experts_hit(num_experts: int, top_k: int, num_tokens: int) -> float:
    """By so many tokens, if each chooses without regard to the others, any as likely."""
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


class _Sizes(NamedTuple):
    """Of a language model."""

    layers: float  # weights that so many tokens take
    head: int  # weights
    kv_nbytes: int  # of a token
    state_nbytes: int  # of a sequence
    num_attending: int  # layers


def _sizes(text: Mapping[str, Any], kv_nbytes: int, num_tokens: int = 1) -> _Sizes:
    """`kv_nbytes`: of a number."""
    hidden, head_dim = text["hidden_size"], text["head_dim"]
    query, kv = text["num_attention_heads"] * head_dim, text["num_key_value_heads"] * head_dim
    inner: float = text["intermediate_size"]
    if num_experts := text.get("num_experts"):
        hit = experts_hit(num_experts, text["num_experts_per_tok"], num_tokens)
        inner = hit * text["moe_intermediate_size"] + num_experts / 3  # and the router's rows
    count, linear, matrices = text["num_hidden_layers"], 0.0, 0
    attending = count
    if kinds := text.get("layer_types"):
        attending = list(kinds).count("full_attention")
        heads, key_dim = text["linear_num_value_heads"], text["linear_key_head_dim"]
        values = heads * text["linear_value_head_dim"]
        keys = text["linear_num_key_heads"] * key_dim
        linear = hidden * (2 * keys + 3 * values + 2 * heads)
        matrices = values * key_dim * STATE_NBYTES
        query += query // 2  # its gate is another projection
    layers = attending * 2 * hidden * (query + kv) + (count - attending) * linear
    layers += count * 3 * hidden * inner
    head = hidden * text["vocab_size"]
    states = (count - attending) * matrices
    return _Sizes(layers, head, attending * 2 * kv * kv_nbytes, states, attending)


def card_of(names: list[str]) -> Card | None:
    """Of the GPUs that there are; None: they differ, or nobody has measured their kind."""
    found = [next((c for kind, c in CARDS.items() if kind in name), None) for name in names]
    return found[0] if found and found.count(found[0]) == len(found) else None
