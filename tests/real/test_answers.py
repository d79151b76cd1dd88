"""A published model answers as `transformers.generate` does, token for token in fp32, between real
processes: with chunked prompts, prefix hits, preemption and drafts, and where decode is killed.

`make test-real` asks 60 questions, with SHORT=1 a few and in one arrangement, with LONG=1 200.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Body, Reply, post_all
from tests.e2e.server import READY_S, Server, serving, wait_for
from tests.e2e.streams import all_have_said, ask_during, wait_until_replaced
from tests.real import generated
from tests.real.costs import KINDS, cost, perplexity, text_ids
from tests.real.generated import Generated
from tests.real.questions import WAYS, question

pytestmark = pytest.mark.timeout(1500)
SHORT, LONG = (bool(os.environ.get(name)) for name in ("SHORT", "LONG"))
NUM_QUESTIONS, NUM_TOKENS = 9 if SHORT else 200 if LONG else 60, 24
# Room for a few answers at once, beside the text; a rank has two of three key heads.
KV_NBYTES = {"1p1d": "22MiB", "1pd": "22MiB", "1p:tp2,1d:tp2": "15MiB"}
DRAFTS = '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_min":2,"prompt_lookup_max":4}'
CHUNK = 48
TOGETHER = 20  # questions
# A published model takes a hundred times as long as the bundled one.
PATIENT = {  # clients wait for 300
    f"timing__{name}_timeout_s": 290.0 for name in ("request", "topology", "first_token")
}
Asked = list[tuple[Body, Generated]]
whole_only = pytest.mark.skipif(SHORT, reason="not with SHORT=1")


@pytest.fixture(scope="session")
def asked(checkpoint: Path) -> Asked:
    bodies = [question(number, NUM_TOKENS) for number in range(NUM_QUESTIONS)]
    return [(body, generated.generated(checkpoint, body)) for body in bodies]


@pytest.mark.parametrize("topology", list(KV_NBYTES)[: 1 if SHORT else None])
async def test_equals_generate(topology: str, checkpoint: Path, asked: Asked) -> None:
    """Twenty at once, and some again; then a text that is scored and not answered."""
    flags = ("--speculative-config", DRAFTS)
    ids = text_ids(checkpoint)
    tight = {"engine__max_chunk_tokens": CHUNK, "engine__kv_nbytes": KV_NBYTES[topology]}
    with serving(topology, *flags, model=checkpoint, **tight, **PATIENT) as server:
        replies = await ask(server, asked)
        again = await ask(server, asked[::4])
        check_all_was_tried(server.metrics(), replies, again)
        found, expected = await perplexity(server, ids), generated.perplexity(checkpoint, ids)
        print(f"{topology}: perplexity {found:.6f}, of transformers {expected:.6f}")
        assert abs(found - expected) <= 1e-4 and found < 30  # or the weights are not the published


async def ask(server: Server, asked: Asked) -> list[Reply]:
    replies: list[Reply] = []
    for at in range(0, len(asked), TOGETHER):
        some = asked[at : at + TOGETHER]
        bodies = [body for body, _ in some]
        replies += await post_all(server.base_url, bodies, X_EPD_Timeline="1")
    for (body, expected), reply in zip(asked, replies, strict=True):
        assert difference(body, expected, reply) == ""
    return replies


def check_all_was_tried(
    metrics: dict[str, float], replies: list[Reply], again: list[Reply]
) -> None:
    """What the answers are right in spite of did happen."""

    def total(name: str) -> int:
        return int(sum(v for k, v in metrics.items() if k.startswith(f"epd_{name}_total{{")))

    preempted, hits = total("preemptions"), total("prefix_cache_hit_tokens")
    drafted, accepted = (total(f"spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted"))
    print(f"{preempted} preemptions, {hits} tokens found, {accepted} of {drafted} drafts right")
    assert preempted > 0 or SHORT  # a few answers may end ahead of it
    assert 0 < accepted < drafted
    cached = [reply.body["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in again]
    assert 0 < sum(cached) <= hits
    timelines = [reply.body["epd"]["timeline"] for reply in replies]
    chunks = [[e["num_tokens"] for e in entries if "num_tokens" in e] for entries in timelines]
    assert max(map(len, chunks)) > 2 and max(map(max, filter(None, chunks))) == CHUNK


@whole_only
def test_each_way_chooses_tokens_of_its_own(asked: Asked) -> None:
    """Penalties and seeds decide: else an answer would be right without them."""
    for at, way in enumerate(WAYS):
        num_moved = sum(expected.num_moved for _, expected in asked[at :: len(WAYS)])
        assert (num_moved > 0) == (way != {"temperature": 0}), way


def difference(body: Body, expected: Generated, reply: Reply) -> str:
    """Of prompt, answer, log-probabilities; empty: there is none."""
    if reply.status != 200:
        return f"{body}: status {reply.status}: {reply.body}"
    (choice,) = reply.body["choices"]
    read, said = reply.body["prompt_token_ids"], choice["token_ids"]
    if (read, said) != (expected.prompt_ids, expected.token_ids):
        return f"{body}: {said} behind {read}, not {expected}"
    entries: list[Any] = choice["logprobs"]["content"]
    pairs = zip((entry["logprob"] for entry in entries), expected.logprobs, strict=True)
    worst = max(abs(a - b) for a, b in pairs)
    return f"{body}: log-probabilities differ by {worst:.2g}" if worst > 1e-3 else ""


@whole_only
async def test_kill_of_decode(checkpoint: Path) -> None:
    """d0 of two dies in the middle of answers: each goes on with exactly the next token."""
    bodies = [question(number, 2 * NUM_TOKENS, goes_on=True) for number in range(8)]
    expected = [generated.generated(checkpoint, body) for body in bodies]
    with serving("1p2d", model=checkpoint, **PATIENT) as server:
        wait_for(lambda: len(server.instances()) == 3, READY_S, "all have joined")
        entry = server.instances()["d0"]
        replies = await ask_during(
            server, bodies, lambda: os.kill(entry["pid"], signal.SIGKILL), all_have_said
        )
        wait_until_replaced(server, "d0", entry["epoch"])
    for reply, wanted in zip(replies, expected, strict=True):
        reply.check_has_one_end()
        assert reply.is_done and reply.token_ids == wanted.token_ids
    assert any(reply.has_migrated for reply in replies)


@whole_only
@pytest.mark.parametrize("kind", KINDS)
async def test_what_fewer_bits_cost(kind: str, checkpoint: Path) -> None:
    """`python -m tests.real.costs` is the table alone, on a GPU with --device cuda."""
    plain = generated.perplexity(checkpoint, text_ids(checkpoint))
    found = await cost(kind, checkpoint)
    print(f"{kind}: perplexity {found:.4f}, {found / plain - 1:+.2%}")
    assert found / plain < {"float32": 1 + 1e-5, "bfloat16": 1.01}.get(kind, 1.5)
