"""A model family as read without torch: how its tensors are called, and their shapes.

Theory of operation
-------------------
A family lists its parameters under the names of the transformers class that computes with them: a
pattern, and a shape in words.  Ranges in braces (`{layers}`) and words are numbers of config.json
(`config_sizes`).  So names and shapes in the headers of a checkpoint can be compared with its
config.json before anything is built, without torch, and a config.json of absurd numbers builds
nothing.  `families/*/sizes.py` have the lists, `tensors` the parts that several share.

Published checkpoints name their tensors as the class did when they were saved: `renames` are tried
in order, each on what the one before gave.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from epd.model_files.checkpoint import Settings

Shape = tuple[int, ...]
BOTH = frozenset({"full_attention", "linear_attention"})
_DRAFTING = (  # DeepSeek-V3's names of what the others have in `mtp.*`
    ("enorm", "pre_fc_norm_embedding"),
    ("hnorm", "pre_fc_norm_hidden"),
    ("eh_proj", "fc"),
    (r"shared_head\.norm", "norm"),
    ("", "layers.0."),
)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What an image of a given size becomes.

    `grid_thw`: patches (frames, height, width); (1, height, width) in pixels for LLaVA.
    `num_rows`: embedding rows, which is also the number of placeholders in the prompt.
    `num_patches`: patches that the vision tower sees, the cost measure of a batch.
    `tiles`: lines and columns of tiles whose rows stand apart in the prompt, ahead of the whole's.
    """

    grid_thw: tuple[int, int, int]
    num_rows: int
    num_patches: int
    tiles: tuple[int, int] = (0, 0)

    @property
    def num_runs(self) -> int:
        """Placeholders that share the rows, as many for each."""
        return self.tiles[0] * self.tiles[1] + 1


@dataclass(frozen=True)
class Images:
    """What images and videos become, by the two configs as read from JSON."""

    # Of config.json, the processor's settings, width and height in pixels.
    geometry: Callable[[Settings, Settings, int, int], Geometry]
    # Words of config.json that the processor's settings have, too, or what is wrong with them.
    processor: Callable[[Settings], dict[str, int] | str]
    takes_bounds: bool = False  # images are resized between two areas, which a request may change
    # In a prompt, for an image of so many tiles: the name of each of them, and a placeholder.
    tile_text: Callable[[tuple[int, int], str], str] | None = None
    # `VideoSettings` of config.json and the processor's settings; None: no videos are taken.
    video: Callable[[Settings, Settings], Any] | None = None
    video_place: str = ""  # a video's placeholder, where config.json names none


@dataclass(frozen=True)
class Family:
    """What is read of one `model_type` without torch."""

    tensors: Mapping[str, str]  # pattern to shape
    vision: tuple[str, ...] = ()  # modules of the vision part, dotted names; empty: text only
    images: Images | None = None  # where there is a vision part
    renames: tuple[tuple[str, str], ...] = ()  # (pattern, replacement), applied in order
    # Stored tensors that are several parameters, in equal parts of their rows: a part of the name,
    # and what stands there in the parameters' names.
    joint: tuple[tuple[str, tuple[str, ...]], ...] = ()
    # Published tensors that are not read on purpose: older releases saved what is computed now, and
    # keys and values that are kept in eight bits get their scales when they are written.
    skipped: tuple[str, ...] = (
        r"\brotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.[kv]_scale$"
    )  # fmt: skip
    drafts_behind: bool = False  # layers that draft may lie behind the stack's, in its names
    layer_types: frozenset[str] = frozenset({"full_attention"})  # that it has, at most
    transposed: str = ""  # in names whose tensors may have their last two axes swapped
    sizes: Mapping[str, int] = field(default_factory=dict)  # words that config.json may leave out
    text_types: tuple[str, ...] = ()  # of `text_config`; empty: the family's own
    is_flat: bool = False  # older releases have no `text_config`
    is_tied: bool = False  # head and embedding, where config.json does not say
    # config.json with what this family says in a way of its own under the common names, and what is
    # wrong with fields that it alone has; empty: nothing.
    plain: Callable[[Settings], Settings] = lambda config: config
    fault: Callable[[Settings], str] = lambda config: ""
    # Numbers and ranges that no other family has, by config.json with the common names.
    words: Callable[[Settings], Mapping[str, int | Sequence[int]]] = lambda config: {}
    # Ranges of its own: the range that each is, where config.json is so, and else nothing.
    ranges: Mapping[str, tuple[str, Callable[[Settings], bool]]] = field(default_factory=dict)

    # The module with a row for every layer, of each token, where a model has one.
    per_layer_embeddings: str = ""

    def __post_init__(self) -> None:
        if bool(self.vision) != bool(self.images):
            raise ValueError("a vision part and what images become go together")

    def is_transposed(self, name: str, found: Shape, expected: Shape) -> bool:
        """True when published checkpoints store this tensor with its last two axes swapped."""
        swapped = (*expected[:1], *expected[:0:-1])
        marked = bool(self.transposed) and self.transposed in name
        return marked and len(found) == 3 and found == swapped

    def candidates(self, stored: str) -> Iterator[str]:
        """What a parameter with this name in a checkpoint may be called now."""
        yield stored
        name = stored
        for pattern, replacement in self.renames:
            before, name = name, re.sub(pattern, replacement, name)
            if name != before:
                yield name

    def told(self, config: Settings) -> Family:
        """With the names of the layer that drafts behind the stack, where config.json counts one;
        where none drafts, it is skipped.  Embedding and head are the model's, in copies."""
        text: Any = config.get("text_config") or config
        said = self.drafts_behind and isinstance(text, Mapping)
        if not (said and text.get("num_nextn_predict_layers")):
            return self
        number = re.escape(str(text.get("num_hidden_layers")))
        layer = rf"^(language_model\.)?model\.(language_model\.)?layers\.{number}\."
        names = ((layer + theirs, f"mtp.{ours}") for theirs, ours in _DRAFTING)
        return replace(self, renames=(*self.renames, *names), skipped=(*self.skipped, layer))

    def is_vision(self, name: str) -> bool:
        return any(name == part or name.startswith(f"{part}.") for part in self.vision)
