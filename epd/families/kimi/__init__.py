"""Kimi-K2.5."""

ADAPTERS = {
    "kimi_k25": "epd.families.kimi.adapter:KimiK25",
}
CHECKPOINTS = {
    "kimi_k25": "moonshotai/Kimi-K2.5",
}
