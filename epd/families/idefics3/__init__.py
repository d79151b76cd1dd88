"""Idefics3 and SmolVLM."""

ADAPTERS = {
    "idefics3": "epd.families.idefics3.adapter:Idefics3",
    "smolvlm": "epd.families.idefics3.adapter:SmolVLM",
}
