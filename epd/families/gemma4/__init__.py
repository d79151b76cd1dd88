"""Gemma 4: E2B, E4B, 26B-A4B, 31B."""

ADAPTERS = {
    "gemma4": "epd.families.gemma4.adapter:Gemma4",
}
CHECKPOINTS = {
    "gemma4": "google/gemma-4-E2B-it google/gemma-4-26B-A4B-it",
}
DECLARED = {
    "gemma4": "google/gemma-4-E4B-it google/gemma-4-31B-it",
}
