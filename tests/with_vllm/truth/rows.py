"""Rows for servers behind a front, which only a column with vLLM has."""

from __future__ import annotations

import random
from typing import Any

from aiohttp import ClientResponse

from epd_lab.bench.truth.client import Json, Peer, Reply, TruthCell, picture
from epd_lab.bench.truth.cluster import Skipped
from epd_lab.bench.truth.rows import METER, SAYS, counted, painted, sample, then
from epd_lab.bench.truth.table import REFUSED, ROWS, NamedRow
from tests.with_vllm.truth.columns import FrontCluster, VllmCluster
from tests.with_vllm.truth.files import changed


def of(peer: Peer) -> FrontCluster | VllmCluster:
    """Raises Skipped for a column without vLLM."""
    if isinstance(peer.cluster, FrontCluster | VllmCluster):
        return peer.cluster
    raise Skipped("it has no other port than the gateway's")


async def asked_of_an_encoder(peer: Peer) -> TruthCell:
    reply = peer.ask(METER[1], [picture(sample(METER[0]))], url=of(peer).encoder_url())
    return await then(peer, await counted((reply, None)))


async def grid_at_the_engine(peer: Peer) -> TruthCell:
    """Of a picture that the server rendered itself all but the pixels is sent to it."""
    url, found = of(peer).engine_url(), list[Any]()

    async def keep(answer: ClientResponse) -> Reply:
        found.append(await answer.json())
        return Reply(200, "")

    part = picture(painted(1, random.randrange(1 << 30))[0][1], "truth-nowhere")
    body: Json = peer.body(SAYS, [part]) | {"max_tokens": 4}
    rendered = await peer.send(f"{url}/v1/chat/completions/render", body, keep)
    if not found:
        raise Skipped(f"it renders nothing: {rendered.text}")
    request = found[0]
    request["features"]["kwargs_data"] = {"image": [None]}
    request["ec_transfer_params"] = {"any": {}}
    asked = peer.send(f"{url}/inference/v1/generate", request, keep)
    return await then(peer, await counted((asked, None)))


ENCODER = NamedRow("an answer asked of an encoder", REFUSED, "smg 1852", asked_of_an_encoder)
ENGINE = NamedRow(
    "the same, asked of the engine", "an error, then right", "vllm 56432", grid_at_the_engine
)


OWN = "its own answer, then right"
FILES = [
    NamedRow("a file of rows is gone", OWN, "vllm 25233", changed("removed")),
    NamedRow("it has another picture's rows", OWN, "vllm 41567", changed("swapped")),
    NamedRow("it has another checkpoint's rows", OWN, "vllm 44910", changed("stale")),
    NamedRow("it is cut off", OWN, "vllm 25233", changed("cut")),
]


def all_rows() -> list[NamedRow]:
    """Each behind the one of the table that it is like."""
    found = []
    for row in ROWS:
        found.append(row)
        behind = {"another picture's uuid": [ENCODER], "20 clients leave": FILES}
        found += (behind | {"a grid without rows": [ENGINE]}).get(row.name, [])
    return found
