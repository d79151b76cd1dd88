"""Attention over segments: nobody sees another's patches."""

from __future__ import annotations

import itertools

import torch

from epd.engine.vision.segments import SegmentAttention

BOUNDS = [0, 5, 10, 11, 30]


def test_each_segment_attends_to_itself() -> None:
    qkv = torch.randn(30, 3, 2, 8, generator=torch.Generator().manual_seed(1))
    found = SegmentAttention()(qkv, torch.tensor(BOUNDS), 0.3)
    for start, end in itertools.pairwise(BOUNDS):
        query, key, value = qkv[start:end].double().unbind(1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
        torch.testing.assert_close(found[start:end].double(), expected, atol=1e-5, rtol=0)


def test_what_is_not_finite_stays_in_its_segment() -> None:
    """Fault F13: one bad image among good ones."""
    qkv = torch.randn(30, 3, 2, 8)
    good = SegmentAttention()(qkv, torch.tensor(BOUNDS), 0.3)
    qkv[5:10] = torch.nan
    found = SegmentAttention()(qkv, torch.tensor(BOUNDS), 0.3)
    assert found[5:10].isnan().all()
    assert torch.equal(found[:5], good[:5]) and torch.equal(found[10:], good[10:])
