"""A vision-language model of 5.7 M parameters that reads text in images.

Small enough to be committed, real enough that a damaged, swapped or late embedding shows in the
answer: it is what the demo and the end-to-end tests of `epd` serve. README.md has its training and
how well it reads; the code of the training is in the folder `training` of a checkout.
"""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The committed checkpoint directory, in the layout of a published Qwen3-VL."""

SAMPLES = Path(__file__).parent / "samples"
"""The committed sample pictures and `samples.json`."""

RECEIPT = "receipt-cafe.png"
"""The sample that examples name."""
