"""Text-only families: same seam, no vision stage, linear positions."""

from __future__ import annotations

from epd.engine.adapter import ModelAdapter


class Llama(ModelAdapter):
    model_type = "llama"
    modelling = "llama.modeling_llama"
    class_name = "LlamaForCausalLM"


class Qwen3(Llama):
    model_type = "qwen3"
    modelling = "qwen3.modeling_qwen3"
    class_name = "Qwen3ForCausalLM"
