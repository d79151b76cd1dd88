"""LLaVA-OneVision."""

ADAPTERS = {
    "llava_onevision": "epd.families.llava_onevision.adapter:LlavaOnevision",
}
CHECKPOINTS = {
    "llava_onevision": (
        "llava-hf/llava-onevision-qwen2-0.5b-ov-hf llava-hf/llava-onevision-qwen2-7b-ov-hf"
    ),
}
