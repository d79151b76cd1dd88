"""Attention of prompts and towers by FlashAttention 4, where it is installed (`epd[fast]`).

Its kernels multiply what is masked by zero, so a number that is not finite would spread to
neighbours (fault F13).  What they read is made finite first: `prompts` reads no row behind a
sequence's last, `segments` clears the rows behind a segment's.  Heads of sizes that it lacks or
that were not tested go through Triton.
"""

from __future__ import annotations

import importlib.metadata
import logging
import warnings

import torch

logger = logging.getLogger(__name__)

PACKAGE = "flash-attn-4"
ARCHITECTURES = (9, 10)  # major numbers: Hopper, and Blackwell of data centres
ANY_LENGTH = 1 << 20  # of the longest sequence: one kernel is compiled for all lengths


def library() -> str:
    """Name and version; "" if it is not installed or the device cannot run it."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""
    if not torch.cuda.is_available():
        return ""
    if torch.cuda.get_device_capability()[0] not in ARCHITECTURES:
        return ""
    # Its compiler gives one for each kernel, of an argument that is absent here.
    warnings.filterwarnings("ignore", "Argument aux_data ", UserWarning)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that its own packages have given up
            import flash_attn.cute  # noqa: F401
    except Exception:  # a library of compilers has many ways to fail
        logger.warning("%s %s is installed and does not import", PACKAGE, version, exc_info=True)
        return ""
    return f"{PACKAGE} {version}"
