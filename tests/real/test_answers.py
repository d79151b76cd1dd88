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
from tests.e2e.server import Server, serving
from tests.e2e.streams import all_have_said, ask_during
from tests.e2e.test_kill import wait_until_replaced
from tests.real import generated
from tests.real.costs import KINDS, cost, perplexity, text_ids
from tests.real.generated import Generated
from tests.real.questions import question

pytestmark = pytest.mark.timeout(1500)
SHORT, LONG = (bool(os.environ.get(name)) for name in ("SHORT", "LONG"))
NUM_QUESTIONS, NUM_TOKENS = (9, 12) if SHORT else (200 if LONG else 60, 24)
ARRANGEMENTS = ("1p1d",) if SHORT else ("1pd", "1p1d", "1p:tp2,1d:tp2")
DRAFTS = '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_min":2,"prompt_lookup_max":4}'
CHUNK = 48
TOGETHER = 20  # questions
# A published model takes a hundred times as long as the bundled one.
PATIENT = {  # clients wait for 300
    f"timing__{name}_timeout_s": 290.0 for name in ("request", "topology", "first_token")
}
# Room for a few answers at once, beside a text of 500 tokens.
TIGHT = {"engine__max_chunk_tokens": CHUNK, "engine__kv_nbytes": "22MiB"}
whole_only = pytest.mark.skipif(SHORT, reason="not with SHORT=1")


@pytest.fixture(scope="session")
def asked(checkpoint: Path) -> list[tuple[Body, Generated]]:
    bodies = [question(number, NUM_TOKENS) for number in range(NUM_QUESTIONS)]
    return [(body, generated.generated(checkpoint, body)) for body in bodies]


@pytest.mark.parametrize("topology", ARRANGEMENTS)
async def test_equals_generate(
    topology: str, checkpoint: Path, asked: list[tuple[Body, Generated]]
) -> None:
    """Twenty at once, and some again; then a text that is scored and not answered."""
    flags = ("--speculative-config", DRAFTS)
    ids = text_ids(checkpoint)
    with serving(topology, *flags, model=checkpoint, **TIGHT, **PATIENT) as server:
        replies = await ask(server, asked)
        again = await ask(server, asked[::4])
        check_all_was_tried(server, replies, again)
        found, expected = await perplexity(server, ids), generated.perplexity(checkpoint, ids)
        print(f"{topology}: perplexity {found:.6f}, of transformers {expected:.6f}")
        assert abs(found - expected) <= 1e-4 and found < 30  # or the weights are not the published


async def ask(server: Server, asked: list[tuple[Body, Generated]]) -> list[Reply]:
    replies: list[Reply] = []
    for at in range(0, len(asked), TOGETHER):
        some = asked[at : at + TOGETHER]
        replies += await post_all(server.base_url, [body for body, _ in some])
    for (body, expected), reply in zip(asked, replies, strict=True):
        assert difference(body, expected, reply) == ""
    return replies


def check_all_was_tried(server: Server, replies: list[Reply], again: list[Reply]) -> None:
    """What the answers are right in spite of did happen."""
    metrics = server.metrics()

    def total(name: str) -> float:
        return sum(v for key, v in metrics.items() if key.startswith(f"epd_{name}_total{{"))

    # Elsewhere an instance of decode may be done with answers before others come to it.
    assert total("preemptions") > 0 or server.topology != "1pd"
    assert total("spec_decode_num_accepted_tokens") > 0
    assert max(reply.body["usage"]["prompt_tokens"] for reply in replies) > 2 * CHUNK
    hits = [reply.body["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in again]
    assert sum(hits) > 0


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
    assert found / plain < (1.01 if kind == "bfloat16" else 1.5)
