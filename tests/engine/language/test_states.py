"""States of sequences: one that is swapped, stale or dropped changes what is said."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch

from epd.engine.base import StepFailure, verify
from epd.engine.kernels import torch_delta
from epd.engine.kernels.torch_delta import DeltaTokens
from epd.engine.language.drafts.replay import num_held
from epd.messages import TokenLogprobs
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


@pytest.mark.parametrize("num_right", [0, 1, 2, 4])
async def test_a_state_is_that_of_the_tokens_that_hold(
    num_right: int, driver: Callable[[str], Driver]
) -> None:
    """After each step, of a sequence whose drafts are wrong from some place on, beside others:
    what lies in its blocks is what plain steps leave there."""
    serving = driver(FAMILY)
    plain = await serving.request("plain", chat("hello"), max_tokens=24, stop_token_ids=())
    states = {}
    while not plain.finished:
        await serving.step([plain], 4096)
        states[plain.computed] = torch.cat(tensors_of(serving, plain))
    serving.release([plain])
    made = [
        await serving.request(name, chat("hello"), max_tokens=24, stop_token_ids=())
        for name in ("one", "other")
    ]
    for request in made:
        request.draft = spoilt(plain.output_ids, num_right)
    bare = await serving.request("bare", chat("a longer question than that"), max_tokens=9)
    while not made[0].finished:
        await serving.step([bare, *made] if not bare.finished else made, 4096)
        for request in made:
            found = torch.cat(tensors_of(serving, request))
            torch.testing.assert_close(found, states[request.computed], atol=1e-4, rtol=1e-3)
    assert made[0].num_steps <= 1 + -(-23 // (1 + num_right))
    assert made[0].output_ids == made[1].output_ids == plain.output_ids
    serving.release([*made, bare])


def tensors_of(serving: Driver, request: Request) -> list[torch.Tensor]:
    layout = serving.language.kv_layout
    table = torch.tensor([request.blocks[: layout.num_state_blocks]])
    kept = zip(serving.language.pool.sequence_tensors(), layout.tensors, strict=True)
    return [
        one.read(layer, table).float().flatten()
        for one, tensor in kept
        for layer in range(tensor.num_layers)
    ]


def spoilt(answer: list[int], num_right: int) -> Callable[[list[int]], list[int]]:
    """Four drafts, of which so many are right."""

    def draft(output: list[int]) -> list[int]:
        right = answer[len(output) : len(output) + 4]
        return [t if at < num_right else t ^ 1 for at, t in enumerate(right)]

    return draft


@pytest.mark.parametrize("rank", [0, 1])
def test_as_many_hold_as_are_said(rank: int) -> None:
    """Found on the device as by `verify`, with rows that failed among them."""
    draws = random.Random(rank)
    for _ in range(200):
        drafts = [[draws.randrange(3) for _ in range(draws.randint(1, 4))] for _ in range(3)]
        tokens, rows = [7] * rank, []
        for one in drafts:
            rows.append((len(tokens), one))
            right = [t if draws.random() < 0.8 else draws.randrange(3) for t in one]
            tokens += [*right, draws.randrange(3)]
        sound = [draws.random() < 0.9 for _ in tokens]
        for first, _ in rows:
            sound[first] = True  # or the whole sequence fails
        held = num_held(torch.tensor(tokens), torch.tensor(sound), rows)
        for (first, one), count in zip(rows, held.tolist(), strict=True):
            said = verify(one, partial(outcome, tokens, sound, first))
            assert isinstance(said, tuple)
            assert count == len(said)


def outcome(
    tokens: list[int], sound: list[bool], first: int, at: int
) -> TokenLogprobs | StepFailure:
    row = first + at
    return TokenLogprobs(tokens[row], 0.0) if sound[row] else StepFailure("not finite")


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
