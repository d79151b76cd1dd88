"""The Triton kernels of mixtures of experts against their specification, and what pads."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from epd.engine.kernels import kernels_for
from epd.engine.kernels.routing import Routed, Routing
from epd.engine.kernels.torch_experts import ranked
from tests.gpu.kernels.test_kernels import dtypes, relative

SPECIFIED = kernels_for("cpu")

ROUTINGS = {
    "softmax": (Routing(2), 6),
    "not normalised": (Routing(3, normalised=False), 5),
    "all": (Routing(4), 4),
    "factors": (Routing(2, factors=torch.tensor([1.0, 0.5, 2.0, 1.5, 0.1])), 5),
    "sigmoid": (Routing(3, is_sigmoid=True, scaling=2.5), 8),
    "groups": (Routing(3, is_sigmoid=True, scaling=2.5, num_groups=3, kept_groups=2), 12),
}


def pairs(routed: Routed) -> list[list[tuple[int, float]]]:
    """Of each token, in order of the experts."""
    return [
        sorted(zip(experts, weights, strict=True))
        for experts, weights in zip(routed.experts.tolist(), routed.weights.tolist(), strict=True)
    ]


@pytest.mark.parametrize("name", ROUTINGS)
def test_routes_are_those_of_the_specification(name: str, kernel_device: str) -> None:
    routing, num_experts = ROUTINGS[name]
    if routing.is_sigmoid:
        bias = torch.randn(num_experts, device=kernel_device)
        routing = Routing(**{**{f: getattr(routing, f) for f in routing.__slots__}, "bias": bias})
    if routing.factors is not None:
        routing = dataclasses.replace(routing, factors=routing.factors.to(kernel_device))
    for num_tokens, padded in ((1, []), (9, [0, 5, 8])):
        logits = torch.randn(num_tokens, num_experts, device=kernel_device)
        slots = torch.arange(num_tokens, dtype=torch.int32, device=kernel_device)
        slots[padded] = -1
        for given in (slots, None):
            found = kernels_for("cuda").route(logits, routing, given)
            expected = SPECIFIED.route(logits, routing, given)
            assert torch.equal(found.counts, expected.counts)
            for one, other in zip(pairs(found), pairs(expected), strict=True):
                assert [e for e, _ in one] == [e for e, _ in other]
                assert [w for _, w in one] == pytest.approx([w for _, w in other], rel=1e-5)
            ranks = [
                sorted(found.ranks[found.experts == expert].tolist())
                for expert in range(num_experts)
            ]
            assert ranks == [list(range(count)) for count in found.counts.tolist()]
        assert (expected.experts >= 0).all()
        routed = kernels_for("cuda").route(logits, routing, slots)
        assert (routed.experts[padded] == -1).all() and (routed.weights[padded] == 0).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by the interpreter
def test_a_row_without_numbers_goes_somewhere(kernel_device: str) -> None:
    """Indices stay inside, and rows beside it are as they were."""
    logits = torch.randn(3, 6, device=kernel_device)
    expected = SPECIFIED.route(logits, Routing(2))
    logits[1] = torch.nan
    found = kernels_for("cuda").route(logits, Routing(2))
    assert ((found.experts >= 0) & (found.experts < 6)).all()
    kept = [0, 2]
    assert [pairs(found)[i][0][0] for i in kept] == [pairs(expected)[i][0][0] for i in kept]


CASES = {  # tokens, experts, top k, H, I
    "one token": (1, 8, 3, 48, 40),
    "uneven": (21, 6, 2, 72, 24),
    "many rows of an expert": (90, 3, 2, 32, 16),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("choice", ["drawn", "one has all", "one has none", "some pad"])
def test_products(case: str, choice: str, kernel_device: str) -> None:
    num_tokens, num_experts, top_k, hidden, inner = CASES[case]
    for dtype, limit in dtypes(kernel_device):
        torch.manual_seed(len(case))
        logits = torch.randn(num_tokens, num_experts)
        if choice == "one has all":
            logits[:, 1] += 100
        elif choice == "one has none":
            logits[:, num_experts - 1] -= 100
        slots = torch.arange(num_tokens)
        if choice == "some pad":
            slots[num_tokens // 2 :] = -1
        routed = SPECIFIED.route(logits, Routing(min(top_k, num_experts - 1)), slots)
        x = torch.randn(num_tokens, hidden).to(dtype)
        x[slots < 0] = torch.nan
        gate_up = torch.randn(num_experts, 2 * inner, hidden).to(dtype) / 4
        down = torch.randn(num_experts, hidden, inner).to(dtype) / 4
        wide = [t.double() for t in (x, gate_up, down)]
        gelu = choice == "one has all"
        expected = SPECIFIED.multiply_experts(*wide, routed, gelu=gelu)
        there = [t.to(kernel_device) for t in (x, gate_up, down)]
        routed = Routed(*(t.to(kernel_device) for t in routed))
        found = kernels_for("cuda").multiply_experts(*there, routed, gelu=gelu)
        kept = slots >= 0
        assert (found[(~kept).to(found.device)] == 0).all()
        if kept.any():
            assert relative(found[kept.to(found.device)], expected[kept]) < 3 * limit


def test_shapes_of_models(kernel_device: str) -> None:
    """On a GPU, tiles of every height at the sizes of a model with 128 experts."""
    if kernel_device == "cpu":
        pytest.skip("takes minutes")
    hidden, inner, num_experts = 2048, 768, 128
    gate_up = torch.randn(num_experts, 2 * inner, hidden, device="cuda") / hidden**0.5
    down = torch.randn(num_experts, hidden, inner, device="cuda") / inner**0.5
    weights = gate_up.bfloat16(), down.bfloat16()
    for num_tokens in (1, 8, 64, 512, 1000, 4096):
        x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
        logits = torch.randn(num_tokens, num_experts, device="cuda")
        routed = kernels_for("cuda").route(logits, Routing(8))
        found = kernels_for("cuda").multiply_experts(x, *weights, routed)
        expected = SPECIFIED.multiply_experts(x.float(), *(w.float() for w in weights), routed)
        assert relative(found, expected) < 2e-2
        again = kernels_for("cuda").multiply_experts(
            x, *weights, ranked(routed.experts, routed.weights, num_experts)
        )
        assert torch.equal(found, again)  # whatever the order of ranks


def test_shared_rows_are_added(kernel_device: str) -> None:
    for dtype, limit in dtypes(kernel_device):
        out, rows = torch.randn(2, 5, 200, dtype=dtype, device=kernel_device)
        gate = torch.randn(5, 1, dtype=dtype, device=kernel_device)
        expected = out.double()
        SPECIFIED.add_gated(expected, rows.double(), gate.double())
        kernels_for("cuda").add_gated(out, rows, gate)
        assert relative(out, expected) < limit
