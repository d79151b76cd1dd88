"""LLaVA-OneVision."""

ADAPTERS = {
    "llava_onevision": "epd.families.llava_onevision.adapter:LlavaOnevision",
}
