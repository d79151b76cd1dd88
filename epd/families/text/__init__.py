"""Text alone: Qwen3 and Llama."""

ADAPTERS = {
    "qwen3": "epd.families.text.adapter:Qwen3",
    "llama": "epd.families.text.adapter:Llama",
}
