"""Text alone: Qwen3 and Llama."""

ADAPTERS = {
    "qwen3": "epd.families.text.adapter:Qwen3",
    "llama": "epd.families.text.adapter:Llama",
}
CHECKPOINTS = {
    "qwen3": "Qwen/Qwen3-0.6B Qwen/Qwen3-8B Qwen/Qwen3-32B",
    "llama": (
        "meta-llama/Llama-2-7b-chat-hf meta-llama/Meta-Llama-3-8B-Instruct "
        "meta-llama/Llama-3.2-1B-Instruct meta-llama/Llama-3.3-70B-Instruct"
    ),
}
