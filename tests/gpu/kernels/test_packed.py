"""Products with weights in four and eight bits against their specification."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from epd.engine.kernels import kernels_for
from epd.engine.kernels.packed import Packed
from epd.engine.kernels.packed.torch_packed import multiply_packed_experts, packed_product
from epd.engine.kernels.packed.triton_packed import widened
from epd.engine.kernels.routing import Routed, Routing
from epd.engine.kernels.torch_experts import ranked
from tests.gpu.kernels.test_kernels import SPECIFIED, dtypes, relative

pytestmark = pytest.mark.gpu
FORMATS = (
    "blocks", "blocks of 32", "channels", "int4 in groups", "int4 of channels", "int4 with zeros",
    "int4 in order", "nvfp4", "mxfp4", "int4 in groups of 64", "int4 in groups of 128",
    "int4 with zeros of 128",
)  # fmt: skip


def made(name: str, size: int, depth: int, device: str, seed: int = 0) -> Packed:
    """A weight of a format, of any numbers."""
    draw = torch.Generator().manual_seed(len(name) + size + seed)

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=draw) * 0.05 + 0.01

    def codes(count: int) -> torch.Tensor:
        return torch.randint(256, (size, count), generator=draw, dtype=torch.uint8)

    across = next((n for n in (64, 128) if name.endswith(str(n)) and depth % n == 0), 32)
    groups = depth // across
    if name.startswith(("blocks", "channels")):
        values = torch.randn(size, depth, generator=draw).to(torch.float8_e4m3fn)
        if name == "channels":
            weight = Packed("fp8", values, scales(size, 1), (1, depth))
        else:
            side = 32 if name.endswith("32") else 128
            blocks = scales(-(-size // side), -(-depth // side))
            weight = Packed("fp8", values, blocks, (side, side))
    elif name == "nvfp4":
        gains = scales(size, 1)
        weight = Packed(
            "fp4", codes(depth // 2), scales(size, depth // 16).to(torch.float8_e4m3fn), (1, 16),
            gains=gains,
        )  # fmt: skip
    elif name == "mxfp4":
        powers = torch.randint(120, 130, (size, groups), generator=draw, dtype=torch.uint8)
        weight = Packed("fp4", codes(depth // 2), powers.view(torch.float8_e8m0fnu), (1, 32))
    elif name == "int4 of channels":
        weight = Packed("int4", codes(depth // 2), scales(size, 1).bfloat16(), (1, depth))
    else:
        weight = Packed("int4", codes(depth // 2), scales(size, groups).half(), (1, across))
        if "zeros" in name:
            zeros = torch.randint(17, (size, groups), generator=draw, dtype=torch.uint8)
            weight = replace(weight, zeros=zeros)
        if name == "int4 in order":
            weight = replace(weight, order=torch.randperm(depth, generator=draw).int())
    weight = weight.laid_out()
    return to(weight, device)


def to(weight: Packed, device: str) -> Packed:
    return replace(weight, **{n: t.to(device) for n, t in weight.tensors().items()})


def test_tiles_are_what_they_were_made_of(kernel_device: str) -> None:
    for name in FORMATS:
        size, depth = (128, 256) if kernel_device == "cpu" else (256, 1152)
        weight = made(name, size, depth, kernel_device)
        assert weight.tiled == (weight.kind != "fp8")
        wide = widened(weight, torch.float32)
        if weight.order is not None:
            wide = torch.empty_like(wide).index_copy_(-1, weight.order.long(), wide)
        assert relative(wide, weight.widened()) < 1e-6, name


@pytest.mark.parametrize("rows", [1, 7, 64, 65])
@pytest.mark.parametrize("name", FORMATS)
def test_packed_products(name: str, rows: int, kernel_device: str) -> None:
    """Few rows and many, in parts and whole, sizes that fill no tile; the same bits every time."""
    ops = kernels_for("cuda")
    small = kernel_device == "cpu"
    sizes = [(48, 96), (192, 640)] if small else [(48, 96), (320, 1152), (9728, 2560)]
    for dtype, limit in dtypes(kernel_device):
        for size, depth in sizes:
            x = torch.randn(rows, depth, dtype=dtype, device=kernel_device)
            weight = made(name, size, depth, kernel_device)
            bias = torch.randn(size, dtype=dtype, device=kernel_device) if rows > 1 else None
            wide = None if bias is None else bias.double()
            expected = packed_product(x.double(), weight, wide)
            out = ops.packed_product(x, weight, bias)
            assert out.dtype == dtype and relative(out, expected) < limit, (size, depth)
            for _ in range(1 if small else 12):  # what runs on too long is seen now and then
                assert torch.equal(out, ops.packed_product(x, weight, bias)), (size, depth)


def experts(name: str, count: int, size: int, depth: int, device: str) -> Packed:
    each = [made(name, size, depth, "cpu", at) for at in range(count)]
    all_of = each[0].room(count, 1)
    for at, weight in enumerate(each):
        all_of.put(at, 0, weight)
    return to(all_of, device)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # in rows of no pair
@pytest.mark.parametrize("name", [name for name in FORMATS if "order" not in name])
def test_packed_experts(name: str, kernel_device: str) -> None:
    """One token, and more than a tile has rows; an expert without any; rows that only pad."""
    hidden, inner, count = (128, 128, 3) if kernel_device == "cpu" else (512, 384, 6)
    gate_up = experts(name, count, 2 * inner, hidden, kernel_device)
    down = experts(name, count, hidden, inner, kernel_device)
    size = float(gate_up.widened().norm(dim=-1).mean())
    for num_tokens in (1, 70):
        logits = torch.randn(num_tokens, count, device=kernel_device)
        logits[:, 1] -= 100
        slots = torch.arange(num_tokens, device=kernel_device)
        slots[5:9] = -1
        routed = SPECIFIED.route(logits, Routing(2), slots)
        for dtype, limit in dtypes(kernel_device):
            if dtype == torch.float32:
                continue
            x = torch.randn(num_tokens, hidden, dtype=dtype, device=kernel_device) / size
            found = kernels_for("cuda").multiply_packed_experts(x, gate_up, down, routed)
            expected = multiply_packed_experts(x.double(), gate_up, down, routed)
            assert found.dtype == dtype and relative(found, expected) < 3 * limit
            again = kernels_for("cuda").multiply_packed_experts(x, gate_up, down, routed)
            assert torch.equal(found, again)
            own = Routed(*(tensor[:1] for tensor in routed[:3]), routed.counts)
            own = ranked(own.experts, own.weights, count)
            alone = kernels_for("cuda").multiply_packed_experts(x[:1], gate_up, down, own)
            assert relative(alone, expected[:1]) < 3 * limit
