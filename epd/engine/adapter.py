"""What the engine takes from a model family, and nothing more.

A family is a small subclass of `ModelAdapter`.  It has the class of transformers, the modules of
each stage, the renamings of older checkpoints, the computation of its vision part, and positions.
Everything else (loading, batching, attention, sampling) is common.  The modelling file of
transformers is imported when a model is built, never before.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from msgspec import structs
from torch import nn

from epd.engine.base import MediaLayout, Patches, RopePositions
from epd.engine.device.slices import Slices
from epd.engine.language.state_kinds import PagedRows, layout_of
from epd.engine.sharding import WHOLE, Heads, Shard
from epd.families.registry import ADAPTERS, family_of
from epd.later import later
from epd.layouts import blocks_of_runs
from epd.messages import KvLayout, PixelBounds, RowContract, StateTensor
from epd.model_files.checkpoint import Checkpoint, ModelError
from epd.model_files.model_directory import check_config

if TYPE_CHECKING:
    from epd.engine.delta_heads import DeltaHeads
    from epd.engine.kernels.routing import Routing
    from epd.engine.language.decoder import Decoder
    from epd.engine.language.graphs import PartsRecorder
    from epd.engine.language.mixers import Mixer, Norm
    from epd.engine.language.products import Foreign

MOST_RANKS = 8  # of a group from which states are certain to fit


class ModelAdapter:
    """One checkpoint of one family; subclasses fill in the class attributes."""

    model_type: ClassVar[str]
    modelling: ClassVar[str]  # module under transformers.models
    class_name: ClassVar[str]
    language_modules: ClassVar[tuple[str, ...]] = ("model.language_model", "lm_head")

    # How weights are cut for tensor parallelism, where transformers does not say so itself: by
    # name, with * for the index of a layer.
    tp_plan: ClassVar[Mapping[str, str]] = {}
    # Whether each product of the tower has rows of the images in their order, as many of each as
    # its share of the patches: so adapters may change it.
    adapts_tower: ClassVar[bool] = False
    has_drafts = False  # a layer for drafts is part of the language stage
    head: nn.Module | None = None  # that layer, if it is not in the checkpoint

    def __init__(self, checkpoint: Checkpoint, attention: str) -> None:
        """`attention`: name of the attention of the language model (see attention.py)."""
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        self.checkpoint = checkpoint
        self.family = family_of(checkpoint.directory, checkpoint.config)
        package = f"transformers.models.{self.modelling.partition('.')[0]}"
        if importlib.util.find_spec(package) is None:
            raise ModelError(
                f"transformers {transformers.__version__} does not know {self.model_type}; install "
                "a newer one"
            )
        try:
            # As it was looked at: read again, it may name another file of the directory.
            of_family: Any = CONFIG_MAPPING[self.model_type]
            self.config: Any = of_family.from_dict(copy.deepcopy(checkpoint.config))
        except Exception as error:  # whatever a damaged config trips over
            raise ModelError(
                f"{checkpoint.directory}/config.json is not a usable {self.model_type} config "
                f"({error}); restore the file"
            ) from error
        self.config._attn_implementation = "sdpa"
        self.text_config: Any = self.config.get_text_config()
        self.text_config._attn_implementation = attention

    # --- weights ----------------------------------------------------------------------------------

    def build(self) -> Any:
        """The transformers model, attention chosen; the caller decides where parameters live."""
        module = importlib.import_module(f"transformers.models.{self.modelling}")
        model = getattr(module, self.class_name)(self.config)
        if self.has_drafts and self.head is None:
            model.mtp = self.draft_layer(module)
        return model

    def draft_layer(self, modelling: Foreign) -> nn.Module:
        """As `DraftLayer` takes it, of classes of this module of transformers."""
        layer, norm = self.draft_parts(modelling)
        size, module = int(self.text_config.hidden_size), nn.Module()
        module.fc = nn.Linear(2 * size, size, bias=False)
        module.layers = nn.ModuleList([layer])
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            setattr(module, name, norm(size, eps=self.text_config.rms_norm_eps))
        return module

    def draft_parts(self, modelling: Foreign) -> tuple[nn.Module, Foreign]:
        """The decoder layer that drafts, and the class of norms."""
        raise ModelError(f"{self.model_type} has no layer for drafts; use the method ngram")

    @property
    def has_vision(self) -> bool:
        return bool(self.family.vision)

    def other_modules(self, stage: str) -> tuple[str, ...]:
        """Modules to drop in a worker of `stage` ("vision" or "language")."""
        return self.language_modules if stage == "vision" else self.family.vision

    def of_joint(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        """What a parameter is, of its part of a joint tensor."""
        return stored

    # --- shapes -----------------------------------------------------------------------------------

    @property
    def num_deepstack(self) -> int:
        """Levels of vision features that are added to the first language layers."""
        return 0

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together."""
        return int(self.text_config.max_position_embeddings)

    def row_contract(self, dtype: torch.dtype) -> RowContract:
        hidden = int(self.text_config.hidden_size)
        width = hidden * (1 + self.num_deepstack)
        name = str(dtype).removeprefix("torch.")
        return RowContract(
            hidden=hidden,
            row_width=width,
            num_deepstack=self.num_deepstack,
            dtype=name,
            row_nbytes=width * dtype.itemsize,
            max_uncut=self.max_uncut,
        )

    def paged_rows(self, shard: Shard = WHOLE) -> PagedRows:
        """Of the heads that a rank holds: keys and values, in each layer."""
        text = self.text_config
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        heads = Heads.of(shard, int(text.num_attention_heads), int(text.num_key_value_heads)).kv
        num_layers = int(text.num_hidden_layers) + self.has_drafts
        return PagedRows(num_layers, len(heads), int(head_dim), first_head=heads.start)

    def num_kv_heads(self, layer: int) -> int:
        """Of all ranks."""
        return int(self.text_config.num_key_value_heads)

    @property
    def delta_heads(self) -> DeltaHeads | None:
        return None

    def sequence_tensors(self, dtype: torch.dtype, shard: Shard = WHOLE) -> tuple[StateTensor, ...]:
        """What layers keep of a sequence besides, of a rank's heads, computed in `dtype`."""
        return ()

    def kv_layout(
        self,
        dtype: torch.dtype,
        block_size: int,
        max_layer_groups: int = 4,
        shard: Shard = WHOLE,
        compute_dtype: torch.dtype | None = None,
    ) -> KvLayout:
        """`dtype`: of paged rows; `compute_dtype`: of everything else."""
        wide = compute_dtype or dtype

        def of(one: Shard) -> KvLayout:
            rows, tensors = self.paged_rows(one), self.sequence_tensors(wide, one)
            return layout_of(rows, tensors, dtype, block_size, max_layer_groups)

        each = [of(one) for one in shard.group]
        own, delta = each[shard.rank], self.delta_heads
        if shard.size > 1:
            own = self._shared_out(own, shard)
        if delta is None:
            return own
        own = structs.replace(
            own,
            first_state_head=delta.of(shard).queries.start,
            all_tensors=self.sequence_tensors(wide) if shard.size > 1 else (),
        )
        sizes = range(
            1, 1 + min(MOST_RANKS, delta.num_values, self.text_config.num_attention_heads)
        )
        others = [replace(shard, rank=0, size=size) for size in sizes if size != shard.size]
        came = [blocks_of_runs(self._shared_out(own, other), own) for other in others]
        most = max(*came, *(one.num_state_blocks for one in each))
        return structs.replace(own, most_state_blocks=most)

    def _shared_out(self, layout: KvLayout, shard: Shard) -> KvLayout:
        """The layout with the heads of each rank."""
        rows, delta = [self.paged_rows(one) for one in shard.group], self.delta_heads
        values = [] if delta is None else [delta.of(one).queries for one in shard.group]
        return structs.replace(
            layout,
            ranks=tuple((one.first_head, one.num_heads) for one in rows),
            state_ranks=tuple((heads.start, len(heads)) for heads in values),
        )

    @property
    def max_uncut(self) -> int:
        """Rows of an image, at most, where they see each other both ways; 0: where none do."""
        return 0

    # --- language ---------------------------------------------------------------------------------

    def language_model(self, model: Any) -> nn.Module:
        """The decoder stack (embedding to final norm) of a loaded model."""
        return getattr(model.model, "language_model", model.model)  # type: ignore[no-any-return]

    def stacks(self, model: nn.Module) -> list[nn.Module]:
        """Decoder layers: the model's, and those of drafts."""
        own = [self.language_model(model)]
        drafts = [model.get_submodule("mtp")] if hasattr(model, "mtp") else []
        return [part.get_submodule("layers") for part in own + drafts]

    def rope_positions(self, num_tokens: int, items: Sequence[MediaLayout]) -> RopePositions:
        """None: linear positions."""
        return RopePositions(positions=None, delta=0)

    def adopt_language(self, model: Any) -> None:
        """Exchange modules of a loaded decoder stack for the engine's own."""
        rotary = self.language_model(model).rotary_emb
        if getattr(rotary, "rope_type", "") == "dynamic":  # the same up to `max_context`
            rotary.rope_type = "default"

    def adopt_shard(self, model: nn.Module, shard: Shard) -> None:
        """Give modules of a language model on meta, whose weights are a rank's, their sizes."""

    def decoder(self, stack: Foreign, kernels: Foreign) -> Decoder | None:
        """Of a loaded stack, in few kernels; None: it runs through transformers' layers."""
        from epd.engine.language.decoder import FusedDecoder

        return FusedDecoder(stack, kernels, self) if FusedDecoder.fits(stack, self) else None

    @property
    def mixers(self) -> Sequence[type[Mixer]]:
        """That its layers may have; a stack with others runs through transformers' layers."""
        from epd.engine.language.mixers import PagedAttention

        return (PagedAttention,)

    def fused_norm(self, module: Any) -> Norm:
        """Of an RMS norm of the stack."""
        from epd.engine.language.mixers import plain_norm

        return plain_norm(module)

    @property
    def routing(self) -> Callable[[Foreign], Routing] | None:
        """How the router of a mixture chooses; None: the family has no mixtures."""
        return None

    # --- vision -----------------------------------------------------------------------------------

    def image_processor(self) -> Any:
        """Hugging Face's processor (PIL variant: no torchvision) with the directory's settings."""
        raise ModelError(f"{self.model_type} takes no images; give it no encode role")

    def image_ops(self, processor: Any) -> Any:
        """What prepares decoded pixels on the device (`QwenImageOps`); None: `to_patches` must."""
        return None

    def video_ops(self) -> Any:
        """What makes patches of a video's resized frames (`QwenImageOps`); None: it takes none."""
        return None

    def adopt_vision(self, model: Any) -> None:
        """Exchange modules of a loaded vision part for faster ones."""

    def capture_vision(
        self, model: Any, max_patches: int, record: PartsRecorder, slices: Slices
    ) -> None:
        """Capture runs of a loaded tower over up to so many patches, in these slices, if it can
        be."""

    def tower_layers(self, model: Any) -> Sequence[nn.Module]:
        """The layers of a loaded tower, in the order in which a run calls each of them once."""
        return ()

    def to_patches(
        self, processor: Any, image: Any, bounds: PixelBounds | None = None
    ) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """Pixels fp32 and grid_thw of a PIL image; runs on a pool thread.

        `bounds`: only for families that `geometry.takes_bounds`.
        """
        raise NotImplementedError

    def encode(self, model: Any, batch: Sequence[Patches], dtype: torch.dtype) -> torch.Tensor:
        """Rows of all images, `[sum of num_rows, row_width]`, in order."""
        raise NotImplementedError

    def smallest_image(self) -> tuple[int, int]:
        """Width and height of an image that costs little, for the warm-up."""
        return 32, 32


def adapter_for(checkpoint: Checkpoint, attention: str = "sdpa") -> ModelAdapter:
    """The adapter of a checkpoint.  Raises ModelError, before transformers sees config.json."""
    check_config(checkpoint)
    adapter: ModelAdapter = later(ADAPTERS[checkpoint.model_type])(checkpoint, attention)
    return adapter
