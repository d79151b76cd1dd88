"""What loading a model will import, imported ahead of time.

For a process that will fork workers (runtime/zygote.py): no weights are read and no device is
touched.  No thread is started, because threads do not survive a fork.  A worker would wait without
end for those that torch starts for a large tensor, such as a router of 128 experts.
"""

from __future__ import annotations

import os

# Where flash-attn is installed, transformers asks at its import whether there is a GPU.  With this
# torch answers by NVML; had CUDA answered, no process that is forked later could begin it.
NVML_ANSWERS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def preload(model_dir: str) -> None:
    """Import the modelling file and the image processor of this model.  Raises ModelError.

    torch has one thread from here on; a worker sets its own number (`build_executor`).
    """
    os.environ.update(NVML_ANSWERS)
    import torch

    from epd.engine import factory  # noqa: F401  (what a worker imports)
    from epd.engine.adapter import adapter_for
    from epd.engine.language import attention
    from epd.engine.weights.loading import parameters_on_meta
    from epd.model_files.checkpoint import read_checkpoint

    torch.set_num_threads(1)
    adapter = adapter_for(read_checkpoint(model_dir, weights=False), attention.NAME)
    attention.register()
    with parameters_on_meta():
        adapter.build()
    if adapter.has_vision:
        adapter.image_processor()
