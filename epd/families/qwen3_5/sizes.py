"""Qwen3.5: names and shapes; images and videos are those of Qwen3-VL."""

from __future__ import annotations

from epd.families.qwen_vl.sizes import QWEN3_TOWER, SEEN3
from epd.model_files import tensors
from epd.model_files.family import BOTH, Family

_GATED = tensors.ATTENTION | {"self_attn.q_proj.weight": "2*q hidden"}
_SHARED = {f"mlp.shared_expert.{n[4:]}": w.replace("ffn", "shared") for n, w in tensors.MLP.items()}
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
_LAYERS = {
    "full": _GATED | tensors.HEAD_NORMS,
    "linear": _DELTA_NET,
    "biased": tensors.BIASED | {"self_attn.q_proj.bias": "2*q"},
}
FAMILIES = {
    name: Family(
        tensors.stack(layers=tensors.NORMS | mlp, **_LAYERS) | QWEN3_TOWER,
        *SEEN3,
        skipped=(*Family({}).skipped, r"^mtp\."),
        layer_types=BOTH,
        sizes={"frames": 2, "merge": 2, "head": 256},
    )
    for name, mlp in (("qwen3_5", tensors.MLP), ("qwen3_5_moe", tensors.EXPERTS | _SHARED))
}
