"""Idefics3 and SmolVLM."""

ADAPTERS = {
    "idefics3": "epd.families.idefics3.adapter:Idefics3",
    "smolvlm": "epd.families.idefics3.adapter:SmolVLM",
}
CHECKPOINTS = {
    "idefics3": "HuggingFaceTB/SmolVLM-256M-Instruct HuggingFaceTB/SmolVLM-500M-Instruct",
    "smolvlm": (
        "HuggingFaceTB/SmolVLM2-256M-Video-Instruct HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
    ),
}
DECLARED = {
    "idefics3": "ibm-granite/granite-docling-258M",
}
