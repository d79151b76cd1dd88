"""Stages that a proxy drives one by one: equal answers, and nothing lost between them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from epd.cli.start.ports import any_free
from epd.tiny import SAMPLES
from tests.e2e.client import Body, Reply, data_url, in_session, png, post, question
from tests.e2e.server import SLOW, Server, serving, wait_for
from tests.engine.conftest import drawn_image

pytestmark = pytest.mark.timeout(300)

PROXY = Path(__file__).parents[3] / "examples" / "staged_proxy.py"
RECEIPT = data_url((SAMPLES / "receipt-cafe.png").read_bytes())
IMAGES = [png(drawn_image(9000 + side, side, side - 20)) for side in (150, 210)]  # nobody else's
LEASE_S = 2.0
SMALL = {"max_pixels": 64 * 64}
LOGPROBS = {"logprobs": True, "top_logprobs": 0}
ASKED: list[Body] = [
    question("What is the total?", IMAGES[0], max_tokens=24, **LOGPROBS),
    question("Which of the two is cheaper?", *IMAGES, max_tokens=24, **LOGPROBS),
    question("Tell me about receipts. " * 8, max_tokens=24, **LOGPROBS),
    question("Read it.", IMAGES[1], max_tokens=24, **LOGPROBS) | {"temperature": 0.9, "seed": 7},
    question("Read it.", IMAGES[1], max_tokens=24, **LOGPROBS, mm_processor_kwargs=SMALL),
]


@contextmanager
def proxy_of(server: Server) -> Iterator[str]:
    port, url = any_free("127.0.0.1"), server.base_url
    command = [sys.executable, str(PROXY), "--port", str(port), "--encode", f"{url}/encode"]
    process = subprocess.Popen(
        [*command, "--prefill", url, "--decode", url], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"port": port}
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def tokens_of(reply: Reply) -> list[str]:
    assert reply.status == 200, reply.body
    return [entry["token"] for entry in reply.body["choices"][0]["logprobs"]["content"]]


async def ask(url: str, body: Body, **more: Any) -> Reply:
    return await in_session(lambda session: post(session, url, body, **more))


def held(server: Server) -> float:
    return server.in_use().get('epd_in_use{instance="p0",kind="held_prompts"}', 0.0)


def encodes(server: Server) -> float:
    return server.metrics().get('epd_encodes_total{instance="e0"}', 0.0)


async def test_a_proxys_answers_are_those_of_the_direct_way(apart: Server) -> None:
    server, before = apart, encodes(apart)
    with proxy_of(server) as proxy:
        for body in ASKED:
            driven = await ask(proxy, body)
            cached = driven.body["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > 0.8 * driven.body["usage"]["prompt_tokens"] - 16, "what was held"
            assert tokens_of(driven) == tokens_of(await ask(server.base_url, body))
        wait_for(lambda: not held(server), 5.0 * SLOW, "each was let go by who came for it")
        made = before + len(IMAGES) + 1
        wait_for(lambda: encodes(server) >= made, 5.0 * SLOW, "each once, one again made small")
        assert encodes(server) == made
        streamed = await ask(proxy, ASKED[0] | {"stream": True})
        assert streamed.status == 200 and "data: [DONE]" in streamed.body


@pytest.mark.long  # the drill of that name shows it in the simulator
async def test_a_proxy_that_dies_between_stages_loses_nothing() -> None:
    """F43: and another tenant finds nothing of what it left."""
    prompt = question("What is the total?", RECEIPT, max_tokens=1)
    with serving("1e1p1d", timing__kv_lease_s=LEASE_S) as server:
        encoded = await ask(server.base_url, prompt, path="/encode/v1/chat/completions")
        (mm_hash,) = encoded.body["ec_transfer_params"]
        body = prompt | {"kv_transfer_params": {"do_remote_decode": True}}
        answer = await ask(server.base_url, body)
        params = answer.body["kv_transfer_params"]
        assert (params["remote_engine_id"], params["lease_s"]) == ("p0", LEASE_S)
        wait_for(lambda: held(server) == 1, 5.0 * SLOW, "the prompt is held")

        claim = prompt | {"max_tokens": 8, "kv_transfer_params": params}
        stranger = await ask(server.base_url, claim, X_EPD_Tenant="another")
        assert stranger.status == 200
        assert stranger.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        theirs = claim | {"ec_transfer_params": encoded.body["ec_transfer_params"]}
        refused = await ask(server.base_url, theirs, X_EPD_Tenant="another")
        assert refused.status == 400 and mm_hash[:16] in refused.error["message"]

        wait_for(lambda: not held(server), LEASE_S + 5.0 * SLOW, "its lease has ended")
        late = await ask(server.base_url, claim)
        assert late.text == (await ask(server.base_url, prompt | {"max_tokens": 8})).text
