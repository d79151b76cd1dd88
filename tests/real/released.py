"""SmolLM2 in few bits as released tools write it, and what the same tools make of it.

    python -m tests.real.released KIND SOURCE TARGET

runs in a process of its own, with the packages of tools.txt on its path.  TARGET gets a checkpoint
and `read.safetensors`: log-probabilities of the text's tokens, by the weights that the tool reads
back, in float32 and in bfloat16.  Weights are rounded to the nearest number, without calibration;
inputs stay as they are.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from importlib import import_module, util
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

GROUP = 64  # 128 does not divide a row of 576
PRESETS = {  # of compressed-tensors
    "fp8 channels": "FP8_DYNAMIC",
    "fp8 blocks": "FP8_BLOCK",
    "int4": "W4A16",
    "int4 with zeros": "W4A16_ASYM",
    "nvfp4": "NVFP4A16",
    "mxfp4": "MXFP4A16",
}
KINDS = (*PRESETS, "awq", "gptq")
READ = "read.safetensors"
Tensors = dict[str, torch.Tensor]


def logprobs(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Of a text's tokens, from the second on."""
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        found = model(ids).logits[0, :-1].float().log_softmax(-1)
    return found.gather(-1, ids[0, 1:, None])[:, 0]


def main(kind: str, source: Path, target: Path) -> None:
    from tests.real.costs import text_ids

    ids = text_ids(source)
    compress = _compressed if kind in PRESETS else _transposed
    model = compress(kind, source, target)
    found = {"float32": logprobs(model, ids), "bfloat16": logprobs(model.bfloat16(), ids)}
    save_file(found, target / READ)


def _plain(source: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()


def _projections(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            yield name, module


# --- compressed-tensors ---------------------------------------------------------------------------


def _compressed(kind: str, source: Path, target: Path) -> Any:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    scheme = preset_name_to_scheme(PRESETS[kind], ["Linear"])
    if scheme.weights.group_size == 128:
        scheme.weights.group_size = GROUP
    model = _plain(source)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for _, module in _projections(model):
        _calibrate(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(target)
    compressor.update_config(str(target))
    # It would round numbers of e2m1 times their scales to bfloat16, whatever is asked for.
    unpack_fp4_from_uint8.__defaults__ = (torch.float32,)
    wide = CompressedTensorsConfig(dequantize=True)
    options = {"quantization_config": wide, "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(target, **options).eval()


def _calibrate(module: Any) -> None:
    """Scales and zeros by the least and the largest number of what shares them."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args, weight = module.quantization_scheme.weights, module.weight.data
    if args.strategy == "block":
        rows, columns = args.block_structure
        padding = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
        blocks = nn.functional.pad(weight, padding).unflatten(0, (-1, rows))
        shared = blocks.unflatten(2, (-1, columns)).transpose(1, 2).flatten(2)
    else:
        shared = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
    whole = {}
    if args.strategy == "tensor_group":
        whole["global_scale"] = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.data.copy_(whole["global_scale"])
    scales, zeros = calculate_qparams(shared.amin(-1), shared.amax(-1), args, **whole)
    module.weight_scale.data.copy_(scales)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zeros)


# --- AutoAWQ, AutoGPTQ ----------------------------------------------------------------------------


def _alone(name: str) -> Any:
    """A module of a package whose other modules need another transformers."""
    parents = name.split(".")[:-1]
    for count in range(1, len(parents) + 1):
        parent = ".".join(parents[:count])
        if parent not in sys.modules:
            spec = util.find_spec(parent)
            assert spec is not None
            module = types.ModuleType(parent)
            module.__path__ = list(spec.submodule_search_locations or ())
            sys.modules[parent] = module
    return import_module(name)


def _transposed(kind: str, source: Path, target: Path) -> Any:
    store = {"awq": _awq, "gptq": _gptq}[kind]
    model = _plain(source)
    found: Tensors = {}
    for name, module in _projections(model):
        tensors, meaning = store(name, module)
        found |= {f"{name}.{key}": tensor.contiguous() for key, tensor in tensors.items()}
        module.weight.data.copy_(meaning)
    model.config.save_pretrained(target)
    written = {f"{name}.weight" for name, _ in _projections(model)} | {"lm_head.weight"}
    rest = {k: v for k, v in model.state_dict().items() if k not in written}
    save_file(found | rest, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    settings = {"quant_method": kind, "bits": 4, "group_size": GROUP}
    settings |= {"version": "gemm", "zero_point": True} if kind == "awq" else {"desc_act": True}
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return model


def _rounding(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros `[out, groups]` of integers of four bits, as both tools find them."""
    shared = weight.unflatten(1, (-1, GROUP))
    least, largest = shared.amin(-1).clamp(max=0), shared.amax(-1).clamp(min=0)
    scales = ((largest - least).clamp(min=1e-5) / 15).half().float()
    return scales, (-least / scales).round().clamp(0, 15)


def _awq(name: str, module: nn.Linear) -> tuple[Tensors, torch.Tensor]:
    tool = _alone("awq.modules.linear.gemm")
    scales, zeros = _rounding(module.weight.data)
    zeros = zeros.t().contiguous()
    made = tool.WQLinear_GEMM.from_linear(module, 4, GROUP, False, scales.t().contiguous(), zeros)
    tensors = {key: getattr(made, key) for key in ("qweight", "qzeros", "scales")}
    meaning = tool.dequantize_gemm(made.qweight, made.qzeros, made.scales.float(), 4, GROUP)
    return tensors, meaning.t()


def _gptq(name: str, module: nn.Linear) -> tuple[Tensors, torch.Tensor]:
    """With the groups of columns in an order that the most important input decides."""
    tool = _alone("auto_gptq.nn_modules.qlinear.qlinear_cuda")
    columns, rows = module.in_features, module.out_features
    order = module.weight.data.square().sum(0).argsort(descending=True)
    scales, zeros = _rounding(module.weight.data[:, order])
    groups = torch.empty(columns, dtype=torch.int32)
    groups[order] = torch.arange(columns, dtype=torch.int32) // GROUP
    made = tool.QuantLinear(4, GROUP, columns, rows, False, weight_dtype=torch.float32)
    made.pack(module, scales, zeros.clamp(min=1), groups)
    meaning = made(torch.eye(columns)).t()
    tensors = {key: getattr(made, key) for key in ("qweight", "qzeros", "g_idx")}
    return tensors | {"scales": made.scales.half()}, meaning


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
