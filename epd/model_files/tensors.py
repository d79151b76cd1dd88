"""Names and shapes of tensors that several families have: see `family`."""

from __future__ import annotations

from collections.abc import Mapping

ATTENTION = {
    "self_attn.q_proj.weight": "q hidden",
    "self_attn.k_proj.weight": "kv hidden",
    "self_attn.v_proj.weight": "kv hidden",
    "self_attn.o_proj.weight": "hidden q",
}
QKV_BIASES = {f"self_attn.{n}_proj.bias": w for n, w in {"q": "q", "k": "kv", "v": "kv"}.items()}
NORMS = {"input_layernorm.weight": "hidden", "post_attention_layernorm.weight": "hidden"}
LAYER = ATTENTION | NORMS
HEAD_NORMS = {"self_attn.q_norm.weight": "head", "self_attn.k_norm.weight": "head"}
QWEN3_LAYER = LAYER | HEAD_NORMS
MLP = {
    "mlp.gate_proj.weight": "ffn hidden",
    "mlp.up_proj.weight": "ffn hidden",
    "mlp.down_proj.weight": "hidden ffn",
}
EXPERTS = {
    "mlp.gate.weight": "experts hidden",
    "mlp.experts.gate_up_proj": "experts 2*moe hidden",
    "mlp.experts.down_proj": "experts hidden moe",
}
SHARED_EXPERTS = {
    f"mlp.shared_experts.{n[4:]}": w.replace("ffn", "shared*moe") for n, w in MLP.items()
}
BIASED = QKV_BIASES | {"self_attn.o_proj.bias": "hidden"}
LLAMA_LAYERS = {
    "layers": LAYER | MLP,
    "biased": BIASED,
    "mlp_biased": {n.replace("weight", "bias"): w.split()[0] for n, w in MLP.items()},
}


LLAVA_NAMES = (  # as saved before the parts of LLaVA, and of models made like it, had one module
    (r"^language_model\.lm_head", "lm_head"),
    (r"^language_model\.(model\.)?", "model.language_model."),
    (r"^(vision_tower|multi_modal_projector)", r"model.\1"),
)


def stack(prefix: str = "model.language_model.", /, **parts: Mapping[str, str]) -> dict[str, str]:
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


def with_biases(prefix: str, weights: Mapping[str, str]) -> dict[str, str]:
    """Each of `weights`, and a bias of its first size."""
    found = {f"{prefix}{name}.weight": shape for name, shape in weights.items()}
    return found | {f"{prefix}{n}.bias": w.split()[0] for n, w in weights.items()}


def siglip(prefix: str) -> dict[str, str]:
    return {
        **with_biases(
            f"{prefix}encoder.layers.{{blocks}}.",
            {f"self_attn.{name}_proj": "tower tower" for name in ("q", "k", "v", "out")}
            | {"mlp.fc1": "tower_ffn tower", "mlp.fc2": "tower tower_ffn"}
            | {"layer_norm1": "tower", "layer_norm2": "tower"},
        ),
        **with_biases(
            prefix, {"embeddings.patch_embedding": "tower 3 patch patch", "post_layernorm": "tower"}
        ),
        f"{prefix}embeddings.position_embedding.weight": "tiles tower",
    }
