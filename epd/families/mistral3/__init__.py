"""Mistral 3: Mistral Small 3.1 and 3.2, Ministral 3, Mistral Small 4."""

ADAPTERS = {
    "mistral3": "epd.families.mistral3.adapter:Mistral3",
}
CHECKPOINTS = {
    "mistral3": (
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503 mistralai/Ministral-3-8B-Instruct-2512-BF16"
    ),
}
DECLARED = {
    "mistral3": "mistralai/Mistral-Small-4-119B-2603",
}
REFUSED = {
    "mistral_large4": "its layers choose the latent rows that they see, and share them",
}
