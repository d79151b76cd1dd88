"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

ADAPTERS = {
    "qwen2_vl": "epd.families.qwen_vl.adapter:Qwen2VL",
    "qwen2_5_vl": "epd.families.qwen_vl.adapter:Qwen2_5VL",
    "qwen3_vl": "epd.families.qwen_vl.adapter:Qwen3VL",
    "qwen3_vl_moe": "epd.families.qwen_vl.adapter:Qwen3VLMoe",
}
CHECKPOINTS = {
    "qwen2_vl": "Qwen/Qwen2-VL-2B-Instruct Qwen/Qwen2-VL-7B-Instruct Qwen/Qwen2-VL-72B-Instruct",
    "qwen2_5_vl": (
        "Qwen/Qwen2.5-VL-3B-Instruct Qwen/Qwen2.5-VL-7B-Instruct "
        "Qwen/Qwen2.5-VL-32B-Instruct Qwen/Qwen2.5-VL-72B-Instruct"
    ),
    "qwen3_vl": (
        "Qwen/Qwen3-VL-2B-Instruct Qwen/Qwen3-VL-4B-Instruct Qwen/Qwen3-VL-8B-Instruct "
        "Qwen/Qwen3-VL-32B-Instruct"
    ),
    "qwen3_vl_moe": "Qwen/Qwen3-VL-30B-A3B-Instruct Qwen/Qwen3-VL-235B-A22B-Instruct",
}
DECLARED = {
    "qwen2_vl": "allenai/olmOCR-7B-0225-preview",
    "qwen2_5_vl": "nanonets/Nanonets-OCR-s",
}
