"""Qwen3.5, dense and of experts."""

ADAPTERS = {
    "qwen3_5": "epd.families.qwen3_5.adapter:Qwen3_5",
    "qwen3_5_moe": "epd.families.qwen3_5.adapter:Qwen3_5Moe",
}
