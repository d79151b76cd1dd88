"""Text-only families: same seam, no vision stage, linear positions."""

from __future__ import annotations

from typing import Any

from torch import nn

from epd.engine.adapter import ModelAdapter


class Llama(ModelAdapter):
    model_type = "llama"
    modelling = "llama.modeling_llama"
    class_name = "LlamaForCausalLM"
    language_modules = ("model", "lm_head")

    def language_model(self, model: Any) -> nn.Module:
        return model.model  # type: ignore[no-any-return]


class Qwen3(Llama):
    model_type = "qwen3"
    modelling = "qwen3.modeling_qwen3"
    class_name = "Qwen3ForCausalLM"
