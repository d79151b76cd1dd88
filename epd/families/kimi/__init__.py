"""Kimi-K2.5."""

ADAPTERS = {
    "kimi_k25": "epd.families.kimi.adapter:KimiK25",
}
