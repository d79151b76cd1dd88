"""What `--model` names: a directory, or a model of the Hugging Face hub that was downloaded here.

Nothing is downloaded: tens of gigabytes are a decision of their own, and all processes of a host
share the cache.  What is not there is answered with the command that fetches it.
"""

from __future__ import annotations

import re
from pathlib import Path

from epd.model_files.checkpoint import ModelError, weight_files

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def find_model(given: str, *, weights: bool = True) -> Path:
    """The directory that is meant, which may not exist.

    Raises ModelError for a name of the hub that is not in the cache, or not whole (`weights`: with
    these)."""
    if not is_hub_name(given):
        return Path(given).expanduser().absolute()
    from huggingface_hub import constants, snapshot_download

    try:
        directory = Path(snapshot_download(given, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{given} is no directory, and not in the Hugging Face cache {constants.HF_HUB_CACHE}; "
            f"download it: hf download {given}"
        ) from error
    if weights:
        try:
            weight_files(directory)
        except ModelError as error:
            raise ModelError(
                f"{given} is in the Hugging Face cache, but not whole ({error}); finish its "
                f"download: hf download {given}"
            ) from error
    return directory


def is_hub_name(given: str) -> bool:
    """ORG/NAME, where no directory of that name is."""
    return _NAME.fullmatch(given) is not None and not Path(given).exists()
