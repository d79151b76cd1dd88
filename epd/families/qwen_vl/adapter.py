"""The Qwen vision families: multimodal rope, native resolution, deepstack from Qwen3-VL on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from epd.engine.adapter import ModelAdapter
from epd.engine.base import MediaLayout, Patches, RopePositions
from epd.engine.device.slices import Slices
from epd.engine.vision.image_ops import QwenImageOps
from epd.engine.vision.tower import adopt, run, tower_inputs
from epd.families.qwen_vl.rope import mrope_positions
from epd.media_files.video import video_settings
from epd.messages import PixelBounds

if TYPE_CHECKING:
    from epd.engine.kernels.routing import Routing
    from epd.engine.language.graphs import PartsRecorder
    from epd.engine.language.products import Foreign
    from epd.families.qwen_vl.tower_graphs import TowerGraphs

LAYERS = {
    f"model.language_model.layers.*.{name}": how
    for how, names in (
        ("colwise", "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj"),
        ("rowwise", "self_attn.o_proj mlp.down_proj"),
    )
    for name in names.split()
}


class Qwen2VL(ModelAdapter):
    model_type = "qwen2_vl"
    modelling = "qwen2_vl.modeling_qwen2_vl"
    class_name = "Qwen2VLForConditionalGeneration"
    adapts_tower = True

    def rope_positions(self, num_tokens: int, items: Sequence[MediaLayout]) -> RopePositions:
        return mrope_positions(num_tokens, items, self.config.vision_config.spatial_merge_size)

    def image_processor(self) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        return Qwen2VLImageProcessorPil(**self.checkpoint.preprocessor)

    def image_ops(self, processor: Any) -> Any:
        return QwenImageOps(processor) if QwenImageOps.fits(processor) else None

    def video_ops(self) -> QwenImageOps | None:
        checkpoint = self.checkpoint
        settings = video_settings(checkpoint.config, checkpoint.video_preprocessor)
        return None if settings is None else QwenImageOps(settings)

    def adopt_vision(self, model: Any) -> None:
        adopt(model.model.visual)

    def capture_vision(
        self, model: Any, max_patches: int, record: PartsRecorder, slices: Slices
    ) -> None:
        from epd.families.qwen_vl.tower_graphs import TowerGraphs

        visual = model.model.visual
        weight, attention = visual.patch_embed.proj.weight, visual.blocks[0].attn
        pixels = weight.new_zeros(int(visual.spatial_merge_size) ** 2, weight[0].numel())
        has_windows = hasattr(visual, "window_size")  # which need tiles of their own
        row = weight.new_empty(1, attention.qkv.out_features)
        if not has_windows and attention.attend.is_tiled(row):
            visual.graphs = TowerGraphs(visual, pixels, max_patches, record, slices)

    def tower_layers(self, model: Any) -> Sequence[Any]:
        return list(model.model.visual.blocks)

    def to_patches(
        self, processor: Any, image: Any, bounds: PixelBounds | None = None
    ) -> tuple[torch.Tensor, tuple[int, int, int]]:
        asked: dict[str, Any] = {}
        if bounds is not None:
            least, most = processor.size["shortest_edge"], processor.size["longest_edge"]
            asked["size"] = {
                "shortest_edge": bounds.min_pixels or least,
                "longest_edge": bounds.max_pixels or most,
            }
        features = processor(images=[image], return_tensors="pt", **asked)
        frames, rows, columns = features["image_grid_thw"][0].tolist()
        return features["pixel_values"], (frames, rows, columns)

    def encode(self, model: Any, batch: Sequence[Patches], dtype: torch.dtype) -> torch.Tensor:
        visual = model.model.visual
        device = next(visual.parameters()).device
        pixels = torch.cat([patches.pixels for patches in batch]).to(device=device, dtype=dtype)
        grids = [patches.grid_thw for patches in batch]
        graphs: TowerGraphs | None = getattr(visual, "graphs", None)
        rows = graphs(pixels, grids) if graphs is not None else None
        if rows is None:
            rows = run(visual, pixels, grids, tower_inputs(visual, grids, device))
        return rows


class Qwen2_5VL(Qwen2VL):
    model_type = "qwen2_5_vl"
    modelling = "qwen2_5_vl.modeling_qwen2_5_vl"
    class_name = "Qwen2_5_VLForConditionalGeneration"

    def rope_positions(self, num_tokens: int, items: Sequence[MediaLayout]) -> RopePositions:
        vision = self.config.vision_config
        merge, per_second = vision.spatial_merge_size, vision.tokens_per_second
        return mrope_positions(num_tokens, items, merge, per_second)


class Qwen3VL(Qwen2VL):
    model_type = "qwen3_vl"
    modelling = "qwen3_vl.modeling_qwen3_vl"
    class_name = "Qwen3VLForConditionalGeneration"
    tp_plan = LAYERS

    @property
    def num_deepstack(self) -> int:
        return len(self.config.vision_config.deepstack_visual_indexes)


class Qwen3VLMoe(Qwen3VL):
    model_type = "qwen3_vl_moe"
    modelling = "qwen3_vl_moe.modeling_qwen3_vl_moe"
    class_name = "Qwen3VLMoeForConditionalGeneration"

    @property
    def routing(self) -> Callable[[Foreign], Routing]:
        from epd.engine.language.experts import by_softmax

        return by_softmax
