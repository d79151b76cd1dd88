"""Text-only families: names and shapes."""

from __future__ import annotations

from epd.model_files import tensors
from epd.model_files.family import Family

FAMILIES = {
    "llama": Family(tensors.stack("model.", **tensors.LLAMA_LAYERS)),
    "qwen3": Family(
        tensors.stack("model.", layers=tensors.QWEN3_LAYER | tensors.MLP, biased=tensors.BIASED),
        sizes={"head": 128},
    ),
}
