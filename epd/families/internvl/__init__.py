"""InternVL 3 and 3.5."""

ADAPTERS = {
    "internvl": "epd.families.internvl.adapter:InternVL",
}
CHECKPOINTS = {
    "internvl": (
        "OpenGVLab/InternVL3-1B-hf OpenGVLab/InternVL3-8B-hf OpenGVLab/InternVL3-78B-hf "
        "OpenGVLab/InternVL3_5-1B-HF OpenGVLab/InternVL3_5-8B-HF "
        "OpenGVLab/InternVL3_5-30B-A3B-HF OpenGVLab/InternVL3_5-241B-A28B-HF"
    ),
}
REFUSED = {
    "interns1": "transformers has no code of it that answers could be compared with",
}
