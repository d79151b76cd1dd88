"""Qwen3.5, dense and of experts."""

ADAPTERS = {
    "qwen3_5": "epd.families.qwen3_5.adapter:Qwen3_5",
    "qwen3_5_moe": "epd.families.qwen3_5.adapter:Qwen3_5Moe",
}
CHECKPOINTS = {
    "qwen3_5": "Qwen/Qwen3.5-9B Qwen/Qwen3.5-27B Qwen/Qwen3.6-27B Qwen/Qwen3.8-27B",
    "qwen3_5_moe": "Qwen/Qwen3.5-35B-A3B Qwen/Qwen3.6-35B-A3B",
}
