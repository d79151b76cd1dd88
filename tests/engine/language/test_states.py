"""States of sequences: one that is swapped, stale or dropped changes what is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from epd.engine.kernels import torch_delta
from epd.engine.kernels.torch_delta import DeltaTokens
from tests.engine.conftest import chat
from tests.engine.driver import Driver, Request

FAMILY = "qwen3_5"


def blocks_of(serving: Driver, request: Request) -> list[memoryview]:
    """The bytes of its state, a view for each block."""
    first = serving.language.kv_layout.num_state_blocks
    return serving.language.pool.views(request.blocks[:first])


def logits(serving: Driver, request: Request) -> torch.Tensor:
    """Behind its next token, with its state as it was before."""
    kept = [bytes(view) for view in blocks_of(serving, request)]
    found = serving.language.logits([request.next_step(1)])
    for view, content in zip(blocks_of(serving, request), kept, strict=True):
        view[:] = content
    return found


@pytest.mark.parametrize("damage", ["swapped", "stale", "dropped"])
async def test_each_block_of_a_state_is_noticed(
    damage: str, driver: Callable[[str], Driver]
) -> None:
    serving = driver(FAMILY)
    texts = ("a text that fills more than one block", "another text, also of some length")
    one, other = [await serving.request(text[:1], chat(text)) for text in texts]
    while not (one.output and other.output):
        stale = [bytes(view) for view in blocks_of(serving, one)]
        await serving.step([one, other], 16)
    clean = logits(serving, one)
    for index, view in enumerate(blocks_of(serving, one)):
        kept = bytes(view)
        wrong = {
            "swapped": bytes(blocks_of(serving, other)[index]),
            "stale": stale[index],
            "dropped": bytes(len(kept)),
        }
        view[:] = wrong[damage]
        assert (clean - logits(serving, one)).abs().max() > 1e-3, f"block {index}"
        view[:] = kept
    assert torch.equal(clean, logits(serving, one))
    serving.release([one, other])


async def test_a_used_block_is_as_good_as_a_new_one(driver: Callable[[str], Driver]) -> None:
    """Who begins reads nothing, not even a NaN that another has left."""
    serving = driver(FAMILY)
    request = await serving.request("r", chat("hello"))
    clean = serving.language.logits([request.next_step(4096)])
    for view in blocks_of(serving, request):
        view[:] = b"\xff" * len(view)
    assert torch.equal(clean, serving.language.logits([request.next_step(4096)]))
    serving.release([request])


async def test_draft_tokens_fail_alone(driver: Callable[[str], Driver]) -> None:
    serving = driver(FAMILY)
    request = await serving.request("r", chat("hello"))
    await serving.step([request], 4096)
    sequence = request.next_step(1)
    sequence.token_ids, sequence.num_drafts = [*sequence.token_ids, 5], 1
    result = await serving.language.step([sequence])
    assert "draft tokens" in str(result.outcomes[0])
    serving.release([request])


def test_spans_equal_the_recurrence() -> None:
    """However many tokens at once, over the edge of a span, from a state that is not zero."""
    torch.manual_seed(0)
    count, heads, key_dim, value_dim = 150, 3, 8, 5
    tokens = DeltaTokens(
        torch.randn(count, heads, key_dim),
        torch.randn(count, heads, key_dim),
        torch.randn(count, heads, value_dim),
        -torch.rand(count, heads) * 3,
        torch.rand(count, heads),
    )
    first = torch.randn(heads, key_dim, value_dim)
    state, each = first[None], []
    for at in range(count):
        said, state = torch_delta.step(tokens.at(slice(at, at + 1)), state)
        each.append(said[0])
    for cut in (1, 64, 65, count):
        said, after = torch_delta.chunk(tokens.at(slice(0, cut)), first)
        rest, after = (
            torch_delta.chunk(tokens.at(slice(cut, count)), after)
            if cut < count
            else (said[:0], after)
        )
        torch.testing.assert_close(torch.cat([said, rest]), torch.stack(each), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(after, state[0], atol=1e-5, rtol=1e-4)
