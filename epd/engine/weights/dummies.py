"""Weights of no checkpoint: random, on the device, in the format that config.json names.

Where a quantization_config is there, linear layers of a decoder get numbers of four or eight bits.
They take the memory and the time that weights of files would.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from epd.engine.base import Taker
from epd.engine.kernels.packed import MIDDLE, Packed
from epd.engine.weights import stored as stored_weights
from epd.engine.weights.open_file import of_rank
from epd.engine.weights.pieces import StoredPiece
from epd.engine.weights.stored_formats import EIGHT_BITS, MXFP4, NVFP4, Bits
from epd.model_files.checkpoint import ModelError, Settings

if TYPE_CHECKING:
    from epd.engine.weights.packed_linear import Keeper
    from epd.groups.device.tensor_parallel import Cut

Takers = Mapping[str, Taker]  # by a parameter's name, of its tensor, as soon as it is there
# By a parameter's name, what makes its memory (as `torch.empty`), where it is not the device's.
Homes = Mapping[str, Callable[..., torch.Tensor]]
SPREAD = 0.02  # the standard deviation of a weight
OF_INTEGERS, OF_E2M1 = 4.6, 2.9  # standard deviations of random numbers of four bits
POWER = 120  # e8m0's 2**-7: about SPREAD / OF_E2M1


def dtype_of(like: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Buffers, which are not on meta, stay in the dtype that the model gives them."""
    return dtype if like.is_floating_point() and like.is_meta else like.dtype


def give(tensor: torch.Tensor, taker: Taker) -> None:
    taker(tensor)
    del tensor
    torch.cuda.empty_cache()  # or what comes next would be put into pieces of it


def check(config: Settings, names: Iterable[str]) -> None:
    """Raises ModelError where experts among these would have another format than config.json names:
    they would show neither its memory nor its time."""
    for name in sorted(names):
        bits = stored_weights.format_of(config, name) if ".experts." in name else None
        if bits is not None:
            raise ModelError(
                f"config.json names {bits.name} for {name}, which cannot be kept so here; take its "
                "quantization_config out, or use --dequantize"
            )


def dummies(
    config: Settings,
    wanted: Mapping[str, torch.Tensor],
    cuts: Mapping[str, Cut],
    takers: Takers,
    keepers: Mapping[str, Keeper],
    homes: Homes,
    dtype: torch.dtype,
    device: str,
) -> dict[str, torch.Tensor]:
    """What is not kept as it is made, is made in one place, so that torch's allocator is left no
    holes.  Raises ModelError."""
    passing = (cuts.keys() | takers.keys() | homes.keys()) - keepers.keys()
    largest = max((like.numel() for n, like in wanted.items() if n in passing), default=0)
    place = torch.empty(largest, dtype=dtype, device=device)
    state: dict[str, torch.Tensor] = {}
    for name, like in wanted.items():
        if name in keepers:
            bits = stored_weights.format_of(config, name)
            assert bits is not None  # or it would have no keeper
            made = packed(name, bits, config, like.shape, device)
            made = of_rank(name, made, cuts[name]) if name in cuts else made
            keepers[name](made, StoredPiece(name))
        elif name in passing:
            whole = _dummy(name, place[: like.numel()].view(like.shape))
            kept = cuts[name].of(whole) if name in cuts else whole
            if name in takers:
                give(kept, takers[name])
            else:
                make = homes.get(name, partial(torch.empty, device=device))
                state[name] = make(kept.shape, dtype=dtype).copy_(kept)
        else:
            own = torch.empty(like.shape, dtype=dtype_of(like, dtype), device=device)
            state[name] = _dummy(name, own)
    return state


def _drawn(name: str, device: torch.device | str) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


def _dummy(name: str, out: torch.Tensor) -> torch.Tensor:
    """Random weights, the same in every process: norms of one, no biases, the rest N(0, 0.02)."""
    if not out.is_floating_point() or out.ndim < 2:
        return out.fill_(1.0 if name.endswith("weight") else 0.0)
    return out.normal_(0.0, SPREAD, generator=_drawn(name, out.device))


def packed(name: str, bits: Bits, config: Settings, shape: torch.Size, device: str) -> Packed:
    """A weight `[..., out, in]` of finite numbers, with scales of one size.  Raises ModelError."""
    *several, rows, columns = shape
    draw = _drawn(name, device)
    block = bits.block_of(config, columns)
    if bits is not EIGHT_BITS and columns % block[1]:
        raise ModelError(
            f"{name} has {columns} columns, which groups of {block[1]} do not divide; change "
            "group_size in config.json"
        )
    of_scales = (*several, -(-rows // block[0]), -(-columns // block[1]))
    if bits is EIGHT_BITS:
        values = torch.empty(shape, dtype=torch.bfloat16, device=device)
        numbers = values.normal_(generator=draw).to(torch.float8_e4m3fn)
        return Packed("fp8", numbers, torch.full(of_scales, SPREAD, device=device), block)
    numbers = torch.randint(
        256, (*several, rows, columns // 2), generator=draw, device=device, dtype=torch.uint8
    )
    if bits is MXFP4:
        powers = torch.full(of_scales, POWER, dtype=torch.uint8, device=device)
        return Packed("fp4", numbers, powers.view(torch.float8_e8m0fnu), block)
    if bits is NVFP4:
        gains = torch.full((*several, rows, 1), SPREAD / OF_E2M1, device=device)
        ones = torch.ones(of_scales, device=device).to(torch.float8_e4m3fn)
        return Packed("fp4", numbers, ones, block, gains=gains)
    scales = torch.full(of_scales, SPREAD / OF_INTEGERS, dtype=torch.bfloat16, device=device)
    zeros = torch.full(of_scales, MIDDLE, dtype=torch.uint8, device=device)
    return Packed("int4", numbers, scales, block, zeros if bits.has_zeros(config) else None)
