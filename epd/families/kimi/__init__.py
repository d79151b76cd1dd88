"""DeepSeek-V3, and Kimi-K2.5, which has its language model."""

ADAPTERS = {
    "deepseek_v3": "epd.families.kimi.adapter:DeepseekV3",
    "kimi_k25": "epd.families.kimi.adapter:KimiK25",
}
CHECKPOINTS = {
    "deepseek_v3": "deepseek-ai/DeepSeek-V3 deepseek-ai/DeepSeek-R1",
    "kimi_k25": "moonshotai/Kimi-K2.5",
}
