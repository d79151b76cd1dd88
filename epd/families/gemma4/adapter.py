"""Gemma 4: layers with a window beside layers that see everything, pictures that fill a budget.

Rows of keys and values differ by the kind of layer.  The last layers of the E models have none:
they read those of the last layer of their kind that has.  Each layer of these models adds an
embedding of its own.  The larger models see a picture, or a frame of a video, both ways, in the
layers with a window.  Sounds are not taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from epd.config import ConfigError
from epd.engine.adapter import ModelAdapter
from epd.engine.base import Patches
from epd.engine.language.products import Foreign
from epd.engine.language.state_kinds import PagedRows
from epd.engine.sharding import WHOLE, Heads, Shard
from epd.engine.vision.image_ops import QwenImageOps
from epd.families.gemma4.decoder import Gemma4Decoder
from epd.families.gemma4.sizes import BUDGET, FULL, Films, films
from epd.layouts import RowKind
from epd.messages import PixelBounds
from epd.model_files.checkpoint import Checkpoint


class CappedHead(nn.Module):
    """Logits that come no nearer to a bound than a tangent does to one."""

    def __init__(self, head: Foreign, cap: float) -> None:
        super().__init__()
        self._head, self._cap = head, cap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self._head(hidden) / self._cap) * self._cap


class FilmOps(QwenImageOps):
    """Of a video, whose frames come resized; numbers of a pixel stand together."""

    def patches(
        self, pixels: torch.Tensor, grid_thw: tuple[int, int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        """uint8 `[frames, height, width, 3]` to `[num_patches, patch_dim]`, on its device."""
        frames = self.scaled(pixels, dtype).unflatten(-1, (grid_thw[2], self._patch))
        split = frames.unflatten(2, (grid_thw[1], self._patch))
        return split.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(0, 2)


class Gemma4(ModelAdapter):
    model_type = "gemma4"
    modelling = "gemma4.modeling_gemma4"
    class_name = "Gemma4ForConditionalGeneration"

    def __init__(self, checkpoint: Checkpoint, attention: str) -> None:
        super().__init__(checkpoint, attention)
        self.config.audio_config = None
        text = self.text_config
        self._num_own = int(text.num_hidden_layers) - int(text.num_kv_shared_layers)

    # --- language ---------------------------------------------------------------------------------

    @property
    def max_uncut(self) -> int:
        if self.text_config.use_bidirectional_attention != "vision":
            return 0
        of_image = int(self.checkpoint.preprocessor.get("max_soft_tokens") or BUDGET)
        video = self._films
        return of_image if video is None else max(of_image, video.max_soft_tokens)

    def paged_rows(self, shard: Shard = WHOLE) -> PagedRows:
        layers: dict[tuple[int, int, int], list[int]] = {}
        text, size = self.text_config, shard.size
        for index, kind in enumerate(text.layer_types[: self._num_own]):
            heads, is_full = self.num_kv_heads(index), kind == FULL
            if heads % size and size % heads:
                raise ConfigError(
                    f"{size} ranks cannot share {heads} key and value heads alike, as blocks of "
                    "several shapes have to be; use another number of ranks"
                )
            window = 0 if is_full else int(text.sliding_window)
            width = int(text.per_layer_config[index].head_dim)
            layers.setdefault((window, heads, width), []).append(index)
        kinds = tuple(
            RowKind(
                layers=tuple(found),
                num_kv_heads=-(-heads // size),
                head_dim=width,
                window=window,
                all_kv_heads=heads,
            )
            for (window, heads, width), found in sorted(layers.items())
        )
        (_, heads, width), first = min(layers), kinds[0]
        own = Heads.of(shard, int(text.num_attention_heads), heads).kv
        return PagedRows(
            self._num_own, first.num_kv_heads, width, first_head=own.start, kinds=kinds
        )

    def num_kv_heads(self, layer: int) -> int:
        return int(self.text_config.per_layer_config[layer].num_key_value_heads)

    def adopt_language(self, model: Foreign) -> None:
        if (cap := self.text_config.final_logit_softcapping) is not None:
            model.lm_head = CappedHead(model.lm_head, float(cap))

    def decoder(self, stack: Foreign, kernels: Foreign) -> Gemma4Decoder:
        config, types = self.config, self.text_config.layer_types
        last = {kind: i for i, kind in enumerate(types[: self._num_own])}
        rows_of = [i if i < self._num_own else last[kind] for i, kind in enumerate(types)]
        places = config.image_token_id, config.video_token_id, config.audio_token_id
        return Gemma4Decoder(stack, kernels, rows_of, [at for at in places if at is not None])

    # --- vision -----------------------------------------------------------------------------------

    def image_processor(self) -> Foreign:
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        return Gemma4ImageProcessorPil(**self.checkpoint.preprocessor)

    @property
    def _films(self) -> Films | None:
        return films(self.checkpoint.config, self.checkpoint.video_preprocessor)

    def video_ops(self) -> FilmOps | None:
        return None if (video := self._films) is None else FilmOps(video)

    def to_patches(
        self, processor: Foreign, image: Foreign, bounds: PixelBounds | None = None
    ) -> tuple[torch.Tensor, tuple[int, int, int]]:
        found = processor(images=[image], return_tensors="pt")
        columns, lines = (found["image_position_ids"][0].amax(0) + 1).tolist()
        return found["pixel_values"][0, : lines * columns], (1, lines, columns)

    def encode(self, model: Foreign, batch: Sequence[Patches], dtype: torch.dtype) -> torch.Tensor:
        seeing, parts = model.model, []
        device = next(seeing.vision_tower.parameters()).device
        for patches in batch:  # transformers would pad them to one size, and compute the padding
            frames, lines, columns = patches.grid_thw
            places = torch.cartesian_prod(torch.arange(lines), torch.arange(columns)).flip(1)
            places = places.to(device).expand(frames, -1, -1)
            pixels = patches.pixels.to(device=device, dtype=dtype).unflatten(0, (frames, -1))
            output = seeing.get_image_features(pixels, places, return_dict=True)
            parts += output.pooler_output
        return torch.cat(parts)

    def tower_layers(self, model: Foreign) -> Sequence[Foreign]:
        return list(model.model.vision_tower.encoder.layers)
