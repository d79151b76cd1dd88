"""Types and ranges of config.json's and the processors' fields.

Only fields that this engine, or the transformers class that it builds, computes with are named;
others are left alone.  All may be absent or null: `families` lists the sizes that must be there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_LAYERS = 4096

_Size = Annotated[int, Meta(ge=1, le=1 << 24)]
_SizeOrNone = Annotated[int, Meta(ge=0, le=1 << 24)]
_Side = Annotated[int, Meta(ge=1, le=1 << 10)]  # of a patch, or of patches that are merged
_Count = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
_Index = Annotated[int, Meta(ge=0, lt=MAX_LAYERS)]
_Indices = Annotated[list[_Index], Meta(max_length=MAX_LAYERS)]
_Pixels = Annotated[int, Meta(ge=1, le=1 << 32)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Ends = TokenId | Annotated[list[TokenId], Meta(max_length=64)]
_Number = Annotated[float, Meta(ge=-1e12, le=1e12)]
_Positive = Annotated[float, Meta(gt=0, le=1e12)]
_Act = Literal[
    "gelu", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
    "gelu_pytorch_tanh", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6", "sigmoid",
    "silu", "swish", "tanh",
]  # fmt: skip
_Dtype = Literal["auto", "bfloat16", "float16", "float32", "float64"]
_Names = Annotated[list[str], Meta(max_length=MAX_LAYERS)]
_Pair = Annotated[list[_Size], Meta(min_length=2, max_length=2)]
_Pairs = Annotated[list[_Pair], Meta(min_length=1, max_length=MAX_LAYERS)]
_Section = Annotated[list[_Size], Meta(min_length=3, max_length=3)]
_Means = Annotated[list[_Number], Meta(min_length=3, max_length=3)]
_Spreads = Annotated[list[_Positive], Meta(min_length=3, max_length=3)]
_Kinds = dict[Any, str]  # names of fields by their kind, with spaces between them


def _object(name: str, kinds: _Kinds, **more: Any) -> Any:
    fields: dict[str, Any] = {n: kind for kind, names in kinds.items() for n in names.split()}
    return msgspec.defstruct(name, [(n, kind | None, None) for n, kind in (fields | more).items()])


_ROPE = _object("Rope", {
    str: "rope_type type",
    bool: "mrope_interleaved",
    _Positive: "rope_theta factor low_freq_factor high_freq_factor beta_fast beta_slow "
    "attention_factor",
    _Number: "mscale mscale_all_dim",
    _Size: "original_max_position_embeddings",
    Annotated[float, Meta(gt=0, le=1)]: "partial_rotary_factor",
    _Section: "mrope_section",
})  # fmt: skip
_WEIGHTS = _object("Weights", {str: "type strategy", bool: "symmetric", int: "num_bits group_size"})
_GROUP = _object("Group", {str: "format"}, weights=_WEIGHTS)
_QUANTIZATION = _object(
    "Quantization",
    {str: "quant_method quant_algo format", _Pair: "weight_block_size"},
    config_groups=dict[str, _GROUP],  # type: ignore[valid-type]
)
_TEXT_KINDS: _Kinds = {
    _Size: "vocab_size hidden_size max_position_embeddings num_experts num_local_experts "
    "n_routed_experts num_experts_per_tok n_shared_experts n_group topk_group "
    "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank "
    "qk_rope_head_dim qk_nope_head_dim v_head_dim vocab_size_per_layer_input",
    _SizeOrNone: "intermediate_size sliding_window max_window_layers first_k_dense_replace "
    "hidden_size_per_layer_input num_kv_shared_layers",
    _Count: "num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "global_head_dim num_global_key_value_heads "
    "decoder_sparse_step linear_key_head_dim linear_value_head_dim linear_num_key_heads "
    "linear_num_value_heads linear_conv_kernel_dim",
    _Indices: "mlp_only_layers",
    _Act: "hidden_act",
    _Positive: "rms_norm_eps rope_theta final_logit_softcapping",
    _Number: "initializer_range attention_dropout routed_scaling_factor",
    bool: "attention_bias mlp_bias use_bias tie_word_embeddings use_sliding_window norm_topk_prob "
    "use_cache output_attentions output_hidden_states output_router_logits return_dict "
    "is_encoder_decoder rope_interleave attn_output_gate attention_k_eq_v enable_moe_block "
    "use_double_wide_mlp",
    _ROPE: "rope_scaling rope_parameters",
    _Names: "layer_types architectures",
    list[Literal["dense", "sparse"]]: "mlp_layer_types",
    TokenId: "bos_token_id",
    Annotated[int, Meta(ge=-1, lt=1 << 31)]: "pad_token_id",
    Ends: "eos_token_id",
    _Dtype: "dtype torch_dtype",
    int: "chunk_size_feed_forward",
    _QUANTIZATION: "quantization_config",
    str: "model_type topk_method",
}
_TEXT = _object("Text", _TEXT_KINDS)
_VISION_KINDS: _Kinds = {
    str: "model_type",
    _Count: "depth num_hidden_layers num_heads num_attention_heads pos_emb_height pos_emb_width "
    "pos_emb_time",
    _Size: "embed_dim hidden_size intermediate_size image_size out_hidden_size window_size "
    "num_position_embeddings position_embedding_size head_dim",
    bool: "use_clipped_linears standardize",
    _Side: "patch_size spatial_merge_size temporal_patch_size mlp_ratio",
    Literal[3]: "in_channels num_channels",
    _Act: "hidden_act",
    _Number: "initializer_range",
    _Positive: "tokens_per_second layer_norm_eps",
    _Indices: "fullatt_block_indexes deepstack_visual_indexes",
    Annotated[list[_Side], Meta(min_length=2, max_length=2)]: "merge_kernel_size",
}
_SAM = _object("Sam", _VISION_KINDS | {
    _Size: _VISION_KINDS[_Size] + " output_channels mlp_dim",
    _Pair: "downsample_channels",
    _Side: "patch_size",
    _Positive: _VISION_KINDS[_Positive] + " mlp_ratio",
    _Indices: "global_attn_indexes",
    bool: "qkv_bias use_abs_pos use_rel_pos",
})  # fmt: skip
_VISION = _object("Vision", _VISION_KINDS, sam_config=_SAM, encoder_config=_TEXT)
CONFIG = _object("Config", _TEXT_KINDS | {
    TokenId: "bos_token_id image_token_id image_token_index video_token_id video_token_index "
    "vision_start_token_id vision_end_token_id media_placeholder_token_id",
    _Size: _TEXT_KINDS[_Size] + " projection_hidden_size",
    _Act: "hidden_act projector_hidden_act",
    _Side: "scale_factor",
    _Pairs: "image_grid_pinpoints",
    int: "vision_feature_layer chunk_size_feed_forward",
    bool: _TEXT_KINDS[bool] + " multimodal_projector_bias",
    Literal["full", "default"]: "vision_feature_select_strategy",
    Annotated[str, Meta(pattern=r"^anyres_max_[1-9]\d{0,3}$")]: "vision_aspect_ratio",
}, text_config=_TEXT, vision_config=_VISION)  # fmt: skip
_MEDIA_KINDS: _Kinds = {
    _Side: "patch_size merge_size merge_kernel_size temporal_patch_size",
    _Size: "max_patches in_patch_limit patch_limit_on_one_side num_frames min_frames max_frames",
    _SizeOrNone: "fixed_output_tokens",
    _Means: "image_mean",
    _Spreads: "image_std",
    _Positive: "rescale_factor fps",
    _Pixels: "min_pixels max_pixels",
    bool: "do_resize do_rescale do_normalize do_convert_rgb do_image_splitting",
    Annotated[int, Meta(ge=0, le=5)]: "resample",
    _Pairs: "image_grid_pinpoints",
}
_EDGES = _object("Edges", {
    _Pixels: "shortest_edge longest_edge", _Size: "height width max_height max_width",
})  # fmt: skip
PROCESSOR = _object(
    "Processor", _MEDIA_KINDS | {_EDGES: "size max_image_size"},
    media_proc_cfg=_object("Media", _MEDIA_KINDS),
)  # fmt: skip


def fault(value: object, kind: Any, name: str = "") -> str:
    """What is wrong with a value as read from JSON, in words that name the field; empty: nothing.

    `kind`: `CONFIG`, `PROCESSOR` or another type; `name`: of the value itself.
    """
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        field = (name + path.rstrip("`")).lstrip(".")
        return f"{field}: {what.replace('`', '').replace(' | null', '')}"
    return ""
