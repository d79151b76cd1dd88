"""Can this model directory be served?  Answered from headers and JSON, without torch.

`epd run` asks before it starts anything, `epd doctor` on its own, and a worker again before
transformers reads config.json; so all give the same sentence.  First come types and ranges, then
numbers together, then names and shapes of tensors: a model built from config.json is never larger
than its files.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from epd.engine.weights import stored as stored_weights
from epd.engine.weights.pieces import StoredPiece, missing, sources_of
from epd.families.registry import family_of
from epd.media_files.video import DEFAULT_SAMPLING, sample_frames, video_geometry, video_settings
from epd.model_files.checkpoint import Checkpoint, ModelError, Settings, is_there
from epd.model_files.config_sizes import Sizes, parameters
from epd.model_files.family import Family, Images
from epd.model_files.geometry import image_geometry
from epd.model_files.model_config import CONFIG, PROCESSOR, fault

logger = logging.getLogger(__name__)
STAGES = ("vision", "language")
_NAMED = 3  # tensors named in an error
_HEAD = "lm_head.weight"
# With their fields.  Others have frequencies that depend on the length of the whole row, which
# would couple the sequences of a step: an answer would depend on its neighbours.
_ROPES = {
    "default": (),
    "mrope": (),
    "linear": ("factor",),
    "dynamic": ("factor",),  # by default up to the length that the model was trained for
    "yarn": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    ),
}
_FLOATS = ("rms_norm_eps", "layer_norm_eps", "initializer_range")
_PROBES = ((64, 64), (4000, 3000), (30, 3000))  # pixels of images that any model takes


def check_config(checkpoint: Checkpoint) -> None:
    """Raises ModelError where config.json does not describe a model of a family that is served."""
    directory, config = checkpoint.directory, checkpoint.config
    path = directory / "config.json"
    family = family_of(directory, config)
    if wrong := fault(family.plain(config), CONFIG) or family.fault(config):
        raise ModelError(f"{path}: {wrong}; restore the file")
    sizes = Sizes(path, config, family)
    _check_supported(directory, family, sizes)
    if not family.vision and "text_config" in config:
        raise ModelError(f"{path}: text_config: a text-only model has none; restore the file")
    for wrong in (*_of_language(sizes), *(_of_tower(family, sizes) if family.vision else ())):
        raise ModelError(f"{path}: {wrong}; restore the file")
    stored_weights.check(checkpoint)


def _check_supported(directory: Path, family: Family, sizes: Sizes) -> None:
    """Refuse what the common code would compute wrongly.  Raises ModelError."""
    kind = sizes.text.get("model_type")
    if family.text_types and kind not in (None, *family.text_types):
        raise ModelError(
            f"{directory} is a {sizes.config['model_type']!r} model with a text_config.model_type "
            f"of {kind!r}, which is not one of {', '.join(family.text_types)}; use another one"
        )
    types = set(sizes.layer_types) - family.layer_types
    if types:
        raise ModelError(
            f"{directory} uses {', '.join(sorted(types))}, which this engine "
            f"lacks for it; use a checkpoint with {' and '.join(sorted(family.layer_types))} only"
        )
    name, rope = sizes.rope
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _ROPES:
        raise ModelError(
            f"{directory} uses {kind!r} rope, which this engine "
            "lacks; use a checkpoint with default, linear, dynamic, yarn or llama3 rope"
        )
    for needed in _ROPES[kind]:
        if rope.get(needed) is None:
            raise ModelError(f"{directory}/config.json names no {name}.{needed}; restore the file")


def _of_language(sizes: Sizes) -> Iterator[str]:
    heads, text = sizes("heads"), sizes.text
    for name in _FLOATS:  # transformers takes no other number for these
        if any(isinstance(source.get(name), int) for source in (text, sizes.vision)):
            yield f"{name}: Expected float, got int"
    sizes("context")
    if len(sizes.layer_types) != sizes("layers"):
        yield f"layer_types: {len(sizes.layer_types)} layers where num_hidden_layers is another"
    if heads % sizes("kv_heads"):
        yield f"num_attention_heads: {heads} are not a multiple of num_key_value_heads"
    latent = text.get("kv_lora_rank") is not None
    head = sizes("rope" if latent else "head")
    if head % 2:
        yield f"head_dim: {head} is odd, and rotary positions turn pairs"
    name, rope = sizes.rope
    section = rope.get("mrope_section")
    if section and sum(section) != head * rope.get("partial_rotary_factor", 1) / 2:
        yield f"{name}.mrope_section: {section} does not share out half of {head} numbers of a head"
    experts = next((text[n] for n in ("num_experts", "n_routed_experts") if text.get(n)), 0)
    if experts and text.get("num_experts_per_tok", 1) > experts:
        yield f"num_experts_per_tok: more than the {experts} experts"
    groups = text.get("n_group") or 1
    if experts % groups or (text.get("topk_group") or 1) > groups:
        yield f"n_group: {experts} experts and topk_group do not go with {groups} groups"
    if text.get("linear_num_key_heads") and sizes("value_heads") % sizes("key_heads"):
        yield "linear_num_value_heads: not a multiple of linear_num_key_heads"


def _of_tower(family: Family, sizes: Sizes) -> Iterator[str]:
    tower, heads, blocks = sizes("tower"), sizes("tower_heads"), sizes("blocks")
    if tower % heads or tower // heads % 2:
        yield f"vision_config: {tower} numbers cannot be shared out to {heads} heads"
    words = {w for shape in family.tensors.values() for w in shape.split()}
    for word, name in {"out": "out_hidden_size", "tower_hidden": "hidden_size"}.items():
        if word in words and sizes(word) != sizes("hidden"):
            yield f"vision_config.{name}: {sizes(word)}, not the hidden_size of the language model"
    if "places" in words and math.isqrt(sizes("places")) ** 2 != sizes("places"):
        yield f"vision_config.num_position_embeddings: {sizes('places')} are no square"
    if "tiles" in words and sizes("image") < sizes("patch"):
        yield "vision_config.image_size: less than patch_size"
    if "scale" in family.sizes and sizes("image") // sizes("patch") % sizes("scale"):
        yield f"scale_factor: {sizes('scale')} does not divide the patches of a tile's side"
    for name in ("deepstack_visual_indexes", "fullatt_block_indexes"):
        levels = sizes.vision.get(name) or ()
        if any(level >= blocks for level in levels) or len(set(levels)) < len(levels):
            yield f"vision_config.{name}: {list(levels)} does not name some of {blocks} blocks"
    if len(sizes.vision.get("deepstack_visual_indexes") or ()) > sizes("layers"):
        yield "vision_config.deepstack_visual_indexes: more than there are layers"


# --- processors -----------------------------------------------------------------------------------


def check_processors(checkpoint: Checkpoint) -> None:
    """What makes patches of images and videos.  Raises ModelError."""
    directory, config, image = checkpoint.directory, checkpoint.config, checkpoint.preprocessor
    family = family_of(directory, config)
    if not family.images:
        return
    if not image:
        raise ModelError(
            f"{directory} has no preprocessor_config.json, and images cannot be prepared without "
            "it: copy it from the published checkpoint"
        )
    sizes = Sizes(directory / "config.json", config, family)
    for name, settings in (("", image), ("video_", checkpoint.video_preprocessor)):
        path = directory / f"{name}preprocessor_config.json"
        if not is_there(path) and is_there(directory / "processor_config.json"):
            path = directory / "processor_config.json"
        try:
            wrong = fault(settings, PROCESSOR) or next(
                _of_processor(family.images, sizes, settings, is_video=bool(name)), ""
            )
            if wrong:
                raise ModelError(f"{path}: {wrong}; restore the file")
            _probe(config, settings, name, sizes("context"))
        except (ArithmeticError, LookupError, TypeError, ValueError, msgspec.MsgspecError) as error:
            raise ModelError(
                f"{path}: no image can be prepared by it ({error}); restore the file"
            ) from error


def _of_processor(
    images: Images, sizes: Sizes, settings: Settings, *, is_video: bool
) -> Iterator[str]:
    if settings.get("do_resize") is False:
        yield "do_resize: images that are not resized are not taken"
    pairs = images.processor(settings)
    if isinstance(pairs, str):
        yield pairs
        return
    if is_video and (video := video_settings(sizes.config, settings)):
        pairs = video.sizes
    for word, size in pairs.items():
        if size != sizes(word):
            yield f"the {word} size is {size} where config.json has {sizes(word)}"


def _probe(config: Settings, settings: Settings, name: str, context: int) -> None:
    """Raises ValueError, or whatever the arithmetic trips over, where no image has a size."""
    for width, height in _PROBES:
        if not name:
            geometry = image_geometry(config, settings, width, height)
        else:
            video = video_settings(config, settings)
            if video is None:
                return
            if video.min_frames > video.max_frames:
                raise ValueError("min_frames is above max_frames")
            sample_frames(video, 100, 24.0, DEFAULT_SAMPLING, 768)
            geometry = video_geometry(video, 1, width, height)
        if not geometry.num_rows > 0:
            raise ValueError(f"{width} x {height} pixels give no rows")
        if (width, height) == _PROBES[0] and geometry.num_rows > context:
            raise ValueError(
                f"{width} x {height} pixels give {geometry.num_rows} rows, more than the context "
                f"of {context}"
            )


# --- tensors --------------------------------------------------------------------------------------


def check_tensors(
    checkpoint: Checkpoint, stages: Collection[str] = STAGES, *, allow_unused: bool = False
) -> None:
    """Raises ModelError where a tensor of these stages lacks, or would load and mean something
    else, and for those that the model has no place for, but for those skipped."""
    directory, family = checkpoint.directory, family_of(checkpoint.directory, checkpoint.config)
    sizes = Sizes(directory / "config.json", checkpoint.config, family)
    held = parameters(family, sizes)
    sources, unused = sources_of(checkpoint.tensors, family, held)
    wanted = {n: s for n, s in held.items() if STAGES[not family.is_vision(n)] in stages}
    if sizes.is_tied and _HEAD in wanted:  # whichever is stored gives its weights to the other
        (embedding,) = (name for name in held if name.endswith(".embed_tokens.weight"))
        spare = [name for name in (_HEAD, embedding) if name not in sources]
        for name in spare[:1]:
            del wanted[name]
    if lacking := missing(sources, wanted):
        raise ModelError(
            f"{directory} lacks {len(lacking)} tensors of {checkpoint.model_type}: {some(lacking)};"
            " the checkpoint is incomplete or its config.json belongs to another model"
        )
    for name, shape in wanted.items():
        for piece in sources[name]:
            _check_shape(checkpoint, family, name, piece, shape)
    _check_unused(checkpoint, family, unused, allowed=allow_unused)


def _check_shape(
    checkpoint: Checkpoint, family: Family, name: str, piece: StoredPiece, shape: tuple[int, ...]
) -> None:
    directory, stored = checkpoint.directory, piece.stored
    if wrong := stored_weights.fault(checkpoint, stored):
        raise ModelError(f"{directory}: tensor {stored} {wrong}")
    found, expected = stored_weights.shape_of(checkpoint, stored), piece.fits(shape)
    if found != expected and not family.is_transposed(name, found, expected):
        raise ModelError(
            f"{directory}: tensor {stored} has shape {list(found)} where config.json needs "
            f"{list(expected)}; config.json and weights belong to different models"
        )


def _check_unused(
    checkpoint: Checkpoint, family: Family, unused: Sequence[str], *, allowed: bool
) -> None:
    unused = [name for name in unused if not stored_weights.is_beside(checkpoint.tensors, name)]
    surplus = [n for n in unused if not any(re.search(p, n) for p in family.skipped)]
    if surplus and not allowed:
        raise ModelError(
            f"{checkpoint.directory} has {len(surplus)} tensors that config.json has no place for: "
            f"{some(surplus)}; config.json is of a smaller or another model: restore it, or leave "
            "them out with --allow-unused-tensors"
        )
    if unused:
        logger.info("%s: %d tensors are not read: %s", checkpoint.directory, len(unused),
                    some(unused))  # fmt: skip


def some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
