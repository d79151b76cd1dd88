"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

ADAPTERS = {
    "qwen2_vl": "epd.families.qwen_vl.adapter:Qwen2VL",
    "qwen2_5_vl": "epd.families.qwen_vl.adapter:Qwen2_5VL",
    "qwen3_vl": "epd.families.qwen_vl.adapter:Qwen3VL",
    "qwen3_vl_moe": "epd.families.qwen_vl.adapter:Qwen3VLMoe",
}
