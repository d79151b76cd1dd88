"""epd: Encode, Prefill and Decode of multimodal language models as separate, supervised roles."""

__version__ = "0.1.0"
