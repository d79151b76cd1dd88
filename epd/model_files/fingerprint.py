"""Who is the same model?  Fingerprints that a process without torch can compute.

Two instances may exchange embeddings and KV only when their weights, configuration and image
processing agree.  Hashing gigabytes at every start is too slow, so the fingerprint covers the
configuration, every tensor's name, dtype, shape and offsets, and a sample of each file's bytes.
Another fine-tune of the same shape has other bytes nearly everywhere.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from epd.model_files.checkpoint import (
    has_weights,
    read_config,
    read_header,
    read_preprocessor,
    read_video_preprocessor,
    weight_files,
)

_SAMPLES = 16
_SAMPLE_NBYTES = 4096


def _update_json(digest: hashlib._Hash, value: object) -> None:
    digest.update(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def _update_sample(digest: hashlib._Hash, path: Path) -> None:
    """Evenly spread pieces of the file, the first and the last among them."""
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(max(0, nbytes - _SAMPLE_NBYTES) * i // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_NBYTES))


def model_fingerprint(model_dir: Path | str, quantization: str = "") -> str:
    """32 hex digits that are equal for copies of one checkpoint, computed with in the same way.
    Raises ModelError.

    A directory without weights counts by its JSON files: all make the same dummy weights of it.
    """
    digest = hashlib.sha256(quantization.encode())
    _update_json(digest, read_config(model_dir))
    _update_json(digest, read_preprocessor(model_dir))
    _update_json(digest, read_video_preprocessor(model_dir))
    for file in weight_files(model_dir) if has_weights(model_dir) else ():
        entries = {
            name: {"dtype": e.dtype, "shape": e.shape, "data_offsets": e.data_offsets}
            for name, e in read_header(file).items()
        }
        _update_json(digest, entries)
        _update_sample(digest, file)
    return digest.hexdigest()[:32]


def processor_fingerprint(model_dir: Path | str) -> str:
    """32 hex digits of all that turns an image into patches; part of every `mm_hash`."""
    return _fingerprint_of(read_preprocessor(model_dir))


def video_processor_fingerprint(model_dir: Path | str) -> str:
    """The same of a video's frames."""
    return _fingerprint_of(read_video_preprocessor(model_dir))


def _fingerprint_of(value: object) -> str:
    digest = hashlib.sha256()
    _update_json(digest, value)
    return digest.hexdigest()[:32]
