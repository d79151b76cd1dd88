"""Names and shapes of SAM's tensors; `near` and `far` layers see a window, and everything."""

from __future__ import annotations

from epd.model_files.tensors import with_biases


def tower(prefix: str) -> dict[str, str]:
    """The tower and its neck, by words and ranges of its own (`Family.words`)."""
    layer = f"{prefix}layers.{{blocks}}."
    return {
        **with_biases(layer, {"attn.qkv": "3*tower tower", "attn.proj": "tower tower"}),
        **with_biases(layer, {"mlp.lin1": "tower_ffn tower", "mlp.lin2": "tower tower_ffn"}),
        **with_biases(layer, {"layer_norm1": "tower", "layer_norm2": "tower"}),
        **{
            f"{prefix}layers.{{{layers}}}.attn.rel_pos_{axis}": f"{span} tower_head"
            for layers, span in (("near", "window_span"), ("far", "span"))
            for axis in "hw"
        },
        **with_biases(f"{prefix}patch_embed.", {"projection": "tower 3 patch patch"}),
        f"{prefix}pos_embed": "1 side side tower",
        f"{prefix}neck.conv1.weight": "neck tower 1 1",
        f"{prefix}neck.conv2.weight": "neck neck 3 3",
        **with_biases(f"{prefix}neck.", {"layer_norm1": "neck", "layer_norm2": "neck"}),
    }


NAMES = {  # as its makers wrote them, in patterns
    r"blocks\.(\d+)\.norm([12])": r"layers.\1.layer_norm\2",
    r"blocks": "layers",
    r"patch_embed\.proj": "patch_embed.projection",
    r"neck\.0": "neck.conv1",
    r"neck\.1": "neck.layer_norm1",
    r"neck\.2": "neck.conv2",
    r"neck\.3": "neck.layer_norm2",
}
