"""The model families: how their tensors are called, and which shapes config.json gives them.

Theory of operation
-------------------
A family lists its parameters under the names of the transformers class that computes with them: a
pattern, and a shape in words.  Ranges in braces (`{layers}`) and words are numbers of config.json
(`config_sizes`).  So names and shapes in the headers of a checkpoint can be compared with its
config.json before anything is built, without torch, and a config.json of absurd numbers builds
nothing.

Published checkpoints name their tensors as the class did when they were saved: `renames` are tried
in order, each on what the one before gave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from epd.model_files.checkpoint import ModelError, Settings

Shape = tuple[int, ...]
_ATTENTION = {
    "self_attn.q_proj.weight": "q hidden",
    "self_attn.k_proj.weight": "kv hidden",
    "self_attn.v_proj.weight": "kv hidden",
    "self_attn.o_proj.weight": "hidden q",
}
_GATED = _ATTENTION | {"self_attn.q_proj.weight": "2*q hidden"}
_QKV_BIASES = {f"self_attn.{n}_proj.bias": w for n, w in {"q": "q", "k": "kv", "v": "kv"}.items()}
_NORMS = {"input_layernorm.weight": "hidden", "post_attention_layernorm.weight": "hidden"}
_HEAD_NORMS = {"self_attn.q_norm.weight": "head", "self_attn.k_norm.weight": "head"}
_MLP = {
    "mlp.gate_proj.weight": "ffn hidden",
    "mlp.up_proj.weight": "ffn hidden",
    "mlp.down_proj.weight": "hidden ffn",
}
_EXPERTS = {
    "mlp.gate.weight": "experts hidden",
    "mlp.experts.gate_up_proj": "experts 2*moe hidden",
    "mlp.experts.down_proj": "experts hidden moe",
}
_SHARED = {f"mlp.shared_expert.{n[4:]}": w.replace("ffn", "shared") for n, w in _MLP.items()}
_SHARED |= {"mlp.shared_expert_gate.weight": "1 hidden"}
_DELTA_NET = {
    "linear_attn.in_proj_qkv.weight": "channels hidden",
    "linear_attn.in_proj_z.weight": "values hidden",
    "linear_attn.in_proj_a.weight": "value_heads hidden",
    "linear_attn.in_proj_b.weight": "value_heads hidden",
    "linear_attn.conv1d.weight": "channels 1 kernel",
    "linear_attn.A_log": "value_heads",
    "linear_attn.dt_bias": "value_heads",
    "linear_attn.norm.weight": "value_head",
    "linear_attn.out_proj.weight": "hidden values",
}
_LATENT = {
    "self_attn.kv_a_proj_with_mqa.weight": "latent hidden",
    "self_attn.kv_a_layernorm.weight": "rank",
    "self_attn.kv_b_proj.weight": "heads*key_value rank",
    "self_attn.o_proj.weight": "hidden heads*value",
}
_SPLIT_QUERY = {
    "self_attn.q_a_proj.weight": "query_rank hidden",
    "self_attn.q_a_layernorm.weight": "query_rank",
    "self_attn.q_b_proj.weight": "heads*query query_rank",
}
_ROUTED = _EXPERTS | {"mlp.gate.e_score_correction_bias": "experts"}
_ROUTED |= {f"mlp.shared_experts.{n[4:]}": w.replace("ffn", "shared*moe") for n, w in _MLP.items()}


def _stack(prefix: str, **parts: Mapping[str, str]) -> dict[str, str]:
    """A decoder: the name of a range of its layers, and what each of them has."""
    return {
        f"{prefix}embed_tokens.weight": "vocab hidden",
        f"{prefix}norm.weight": "hidden",
        "lm_head.weight": "vocab hidden",
        **{
            f"{prefix}layers.{{{layers}}}.{name}": shape
            for layers, part in parts.items()
            for name, shape in part.items()
        },
    }


def _with_biases(prefix: str, weights: Mapping[str, str]) -> dict[str, str]:
    """Each of `weights`, and a bias of its first size."""
    found = {f"{prefix}{name}.weight": shape for name, shape in weights.items()}
    return found | {f"{prefix}{n}.bias": w.split()[0] for n, w in weights.items()}


_TEXT, _VISUAL = "model.language_model.", "model.visual."
_BIASED = _QKV_BIASES | {"self_attn.o_proj.bias": "hidden"}
_MLP_BIASES = {n.replace("weight", "bias"): w.split()[0] for n, w in _MLP.items()}
_QWEN_BLOCK = {"attn.qkv": "3*tower tower", "attn.proj": "tower tower"}
_PATCHES = "tower 3 frames patch patch"
_QWEN2_TOWER = {
    **_with_biases(
        f"{_VISUAL}blocks.{{blocks}}.",
        _QWEN_BLOCK
        | {"mlp.fc1": "ratio*tower tower", "mlp.fc2": "tower ratio*tower"}
        | {"norm1": "tower", "norm2": "tower"},
    ),
    **_with_biases(
        f"{_VISUAL}merger.",
        {"ln_q": "tower", "mlp.0": "merged merged", "mlp.2": "tower_hidden merged"},
    ),
    f"{_VISUAL}patch_embed.proj.weight": _PATCHES,
}
_QWEN2_5_TOWER = {
    **_with_biases(
        f"{_VISUAL}blocks.{{blocks}}.",
        _QWEN_BLOCK | {n.removesuffix(".weight"): w.replace("ffn", "tower_ffn")
                       .replace("hidden", "tower") for n, w in _MLP.items()},
    ),
    **{f"{_VISUAL}blocks.{{blocks}}.norm{n}.weight": "tower" for n in (1, 2)},
    **_with_biases(f"{_VISUAL}merger.", {"mlp.0": "merged merged", "mlp.2": "out merged"}),
    f"{_VISUAL}merger.ln_q.weight": "tower",
    f"{_VISUAL}patch_embed.proj.weight": _PATCHES,
}  # fmt: skip
_QWEN3_MERGER = {"linear_fc1": "merged merged", "linear_fc2": "out merged"}
_QWEN3_TOWER = {
    **_with_biases(
        f"{_VISUAL}blocks.{{blocks}}.",
        _QWEN_BLOCK
        | {"mlp.linear_fc1": "tower_ffn tower", "mlp.linear_fc2": "tower tower_ffn"}
        | {"norm1": "tower", "norm2": "tower"},
    ),
    **_with_biases(f"{_VISUAL}merger.", {"norm": "tower"} | _QWEN3_MERGER),
    **_with_biases(f"{_VISUAL}patch_embed.", {"proj": _PATCHES}),
    f"{_VISUAL}pos_embed.weight": "places tower",
}
_DEEPSTACK = _with_biases(
    f"{_VISUAL}deepstack_merger_list.{{levels}}.", {"norm": "merged"} | _QWEN3_MERGER
)


def _siglip(prefix: str) -> dict[str, str]:
    return {
        **_with_biases(
            f"{prefix}encoder.layers.{{blocks}}.",
            {f"self_attn.{name}_proj": "tower tower" for name in ("q", "k", "v", "out")}
            | {"mlp.fc1": "tower_ffn tower", "mlp.fc2": "tower tower_ffn"}
            | {"layer_norm1": "tower", "layer_norm2": "tower"},
        ),
        **_with_biases(
            prefix, {"embeddings.patch_embedding": "tower 3 patch patch", "post_layernorm": "tower"}
        ),
        f"{prefix}embeddings.position_embedding.weight": "tiles tower",
    }


_SIGLIP = {
    **_siglip("model.vision_tower."),
    **_with_biases(
        "model.multi_modal_projector.", {"linear_1": "hidden tower", "linear_2": "hidden hidden"}
    ),
    "model.image_newline": "hidden",
}
_MOONVIT = {
    **_with_biases(
        "model.vision_tower.layers.{blocks}.",
        {f"attn.{name}": "tower tower" for name in ("q_proj", "k_proj", "v_proj", "proj")}
        | {"mlp.fc1": "tower_ffn tower", "mlp.fc2": "tower tower_ffn"}
        | {"norm1": "tower", "norm2": "tower"},
    ),
    **_with_biases("model.vision_tower.", {"final_layernorm": "tower"}),
    **_with_biases("model.vision_tower.", {"patch_embed.proj": "tower 3 patch patch"}),
    "model.vision_tower.patch_embed.pos_emb.position_embeddings": "rows columns tower",
    **_with_biases("model.mm_projector.", {"pre_norm": "projected", "in_proj": "merged merged"}),
    **_with_biases("model.mm_projector.", {"out_proj": "hidden merged"}),
}


@dataclass(frozen=True)
class Family:
    """What is known of one `model_type` without torch."""

    tensors: Mapping[str, str]  # pattern to shape
    vision: tuple[str, ...] = ()  # modules of the vision part, dotted names; empty: text only
    renames: tuple[tuple[str, str], ...] = ()  # (pattern, replacement), applied in order
    # Stored tensors that are several parameters, in equal parts of their rows: a part of the name,
    # and what stands there in the parameters' names.
    joint: tuple[tuple[str, tuple[str, ...]], ...] = ()
    # Published tensors that are not read on purpose: older releases saved what is computed now, and
    # keys and values that are kept in eight bits get their scales when they are written.
    skipped: tuple[str, ...] = (
        r"\brotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.[kv]_scale$"
    )  # fmt: skip
    layer_types: frozenset[str] = frozenset({"full_attention"})  # that it has, at most
    transposed: str = ""  # in names whose tensors may have their last two axes swapped
    sizes: Mapping[str, int] = field(default_factory=dict)  # words that config.json may leave out
    text_types: tuple[str, ...] = ()  # of `text_config`; empty: the family's own
    is_flat: bool = False  # older releases have no `text_config`
    is_tied: bool = False  # head and embedding, where config.json does not say

    def is_transposed(self, name: str, found: Shape, expected: Shape) -> bool:
        """True when published checkpoints store this tensor with its last two axes swapped."""
        swapped = (*expected[:1], *expected[:0:-1])
        marked = bool(self.transposed) and self.transposed in name
        return marked and len(found) == 3 and found == swapped

    def is_vision(self, name: str) -> bool:
        return any(name == part or name.startswith(f"{part}.") for part in self.vision)


_FLAT = (
    (r"^visual\.", "model.visual."),
    (r"^model\.(?!language_model\.|visual\.)", "model.language_model."),
)
_QWEN = {"frames": 2, "merge": 2}
_QWEN2_STACK = _stack(_TEXT, layers=_ATTENTION | _QKV_BIASES | _NORMS | _MLP)
_QWEN3_LAYER = _ATTENTION | _HEAD_NORMS | _NORMS
_QWEN3_5_SIZES = {**_QWEN, "head": 256}
_SEEN = ("model.visual",)
BOTH = frozenset({"full_attention", "linear_attention"})
_DRAFTING = (*Family({}).skipped, r"^mtp\.")
_LLAMA_LAYERS = {
    "layers": _ATTENTION | _NORMS | _MLP, "biased": _BIASED, "mlp_biased": _MLP_BIASES,
}  # fmt: skip
_IDEFICS3 = Family(
    _stack("model.text_model.", **_LLAMA_LAYERS) | _siglip("model.vision_model.")
    | {"model.connector.modality_projection.proj.weight": "hidden scale*scale*tower"},
    ("model.vision_model", "model.connector"),
    sizes={"scale": 2, "layers": 32, "heads": 32, "tower_ffn": 3072, "blocks": 12},
    text_types=("llama",),
)  # fmt: skip
_BLOCK = r"^(vision_tower\.encoder\.blocks\.\d+)\."
FAMILIES = {
    "qwen2_vl": Family(
        _QWEN2_STACK | _QWEN2_TOWER, _SEEN, _FLAT, sizes=_QWEN | {"ratio": 4}, is_flat=True
    ),
    "qwen2_5_vl": Family(_QWEN2_STACK | _QWEN2_5_TOWER, _SEEN, _FLAT, sizes=_QWEN, is_flat=True),
    "qwen3_vl": Family(
        _stack(_TEXT, layers=_QWEN3_LAYER | _MLP, biased=_BIASED) | _QWEN3_TOWER | _DEEPSTACK,
        _SEEN, _FLAT, sizes=_QWEN | {"head": 128},
    ),
    "qwen3_vl_moe": Family(
        _stack(_TEXT, layers=_QWEN3_LAYER, dense=_MLP, sparse=_EXPERTS, biased=_BIASED)
        | _QWEN3_TOWER | _DEEPSTACK,
        _SEEN, _FLAT, transposed=".mlp.experts.", sizes=_QWEN | {"head": 128}, is_tied=True,
    ),
    "qwen3_5": Family(
        _stack(_TEXT, layers=_NORMS | _MLP, full=_GATED | _HEAD_NORMS, linear=_DELTA_NET,
               biased=_BIASED | {"self_attn.q_proj.bias": "2*q"}) | _QWEN3_TOWER,
        _SEEN, _FLAT, skipped=_DRAFTING, layer_types=BOTH, sizes=_QWEN3_5_SIZES,
    ),
    "qwen3_5_moe": Family(
        _stack(_TEXT, layers=_NORMS | _EXPERTS | _SHARED, full=_GATED | _HEAD_NORMS,
               linear=_DELTA_NET, biased=_BIASED | {"self_attn.q_proj.bias": "2*q"}) | _QWEN3_TOWER,
        _SEEN, _FLAT, skipped=_DRAFTING, layer_types=BOTH, sizes=_QWEN3_5_SIZES,
    ),
    "llava_onevision": Family(
        _QWEN2_STACK | _SIGLIP,
        ("model.vision_tower", "model.multi_modal_projector", "model.image_newline"),
        (
            (r"^language_model\.lm_head", "lm_head"),
            (r"^language_model\.(model\.)?", "model.language_model."),
            (r"^(vision_tower|multi_modal_projector|image_newline)", r"model.\1"),
            (r"^model\.vision_tower\.vision_model\.", "model.vision_tower."),
        ),
        text_types=("qwen2",),
    ),
    "kimi_k25": Family(
        _stack(_TEXT, layers=_LATENT | _NORMS, split=_SPLIT_QUERY, dense=_MLP, sparse=_ROUTED,
               whole={"self_attn.q_proj.weight": "heads*query hidden"},
               biased={"self_attn.kv_a_proj_with_mqa.bias": "latent",
                       "self_attn.o_proj.bias": "hidden"}) | _MOONVIT,
        ("model.vision_tower", "model.mm_projector"),
        (
            (_BLOCK + "norm1", r"\1.norm2"),
            (_BLOCK + "norm0", r"\1.norm1"),
            (_BLOCK + r"mlp\.fc1", r"\1.mlp.fc2"),
            (_BLOCK + r"mlp\.fc0", r"\1.mlp.fc1"),
            (_BLOCK + "wo", r"\1.attn.proj"),
            (r"^language_model\.(lm_head|model)", r"\1"),
            (r"^model\.(?!language_model|vision_tower|mm_projector)", "model.language_model."),
            (r"^(vision_tower|mm_projector)\.", r"model.\1."),
            (r"\.vision_tower\.encoder\.", ".vision_tower."),
            (r"\.blocks\.", ".layers."),
            (r"\.pos_emb\.weight$", ".pos_emb.position_embeddings"),
            (r"\.mm_projector\.proj\.0\.", ".mm_projector.in_proj."),
            (r"\.mm_projector\.proj\.2\.", ".mm_projector.out_proj."),
        ),
        ((".wqkv.", (".attn.q_proj.", ".attn.k_proj.", ".attn.v_proj.")),),
        sizes={"rows": 64, "columns": 64, "projected": 1152, "merge": 2},
        text_types=("deepseek_v3", "kimi_k2"), is_tied=True,
    ),
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "llama": Family(_stack("model.", **_LLAMA_LAYERS)),
    "qwen3": Family(
        _stack("model.", layers=_QWEN3_LAYER | _MLP, biased=_BIASED), sizes={"head": 128}
    ),
}  # fmt: skip


def family_of(directory: Any, config: Settings) -> Family:
    """Raises ModelError where the family is not supported."""
    model_type = str(config["model_type"])
    if model_type not in FAMILIES:
        raise ModelError(
            f"{directory} is a {model_type!r} model; supported are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
