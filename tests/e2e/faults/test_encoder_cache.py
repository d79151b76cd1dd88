"""Rows in files, between real processes: they outlive kill -9, and a broken disk hurts nobody."""

from __future__ import annotations

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

from epd.tiny import SAMPLES
from tests.e2e.client import Body, data_url, in_session, post, post_all, question
from tests.e2e.server import READY_S, SLOW, Server, serving, wait_for

pytestmark = pytest.mark.timeout(300)

CAFE = question("What is the total?", data_url((SAMPLES / "receipt-cafe.png").read_bytes()))
ANSWER = "10.85"
OTHER = question("What is this?", data_url((SAMPLES / "sign.png").read_bytes()), max_tokens=4)
COUNTED_S = 5.0 * SLOW  # metrics travel with heartbeats


async def ask(server: Server, body: Body) -> str:
    (reply,) = await post_all(server.base_url, [body])
    return reply.text


def cache(server: Server, what: str, tier: str = "disk") -> float:
    name = f'epd_encoder_cache_{what}{{instance="epd0",tier="{tier}"}}'
    return server.metrics().get(name, -1.0)


def stored(directory: Path) -> list[Path]:
    return [*directory.glob("*/encoder_cache.safetensors")]


def encodes(server: Server) -> float:
    return server.metrics().get('epd_encodes_total{instance="epd0"}', -1.0)


def shared_storage(directory: Path, role: str) -> tuple[str, str]:
    """The flag as a user of vLLM writes it."""
    extra = {"shared_storage_path": str(directory)}
    names = {"ec_connector": "ECSharedStorageConnector", "ec_role": role}
    return "--ec-transfer-config", json.dumps({**names, "ec_connector_extra_config": extra})


@pytest.mark.long
async def test_a_prefill_decode_instance_alone_answers_from_the_shared_storage(
    tmp_path: Path,
) -> None:
    """Faults F32, F38, F40: rows outlive their encoder; what is not there, or not whole, is one
    clear error where nobody can encode, and never an answer without its image."""
    directory = tmp_path / "rows"
    with serving("1e1pd", *shared_storage(directory, "ec_both")) as server:
        # With a storage it answers, if not all, before its encoder has joined.
        wait_for(lambda: "e0" in server.instances(), READY_S, "its encoder")
        await ask(server, OTHER)
        (file,) = wait_for(lambda: stored(directory), COUNTED_S, "its rows stay")
        assert len(file.parent.name) == 64, "the image's hash"
        assert await ask(server, CAFE) == ANSWER
        wait_for(lambda: len(stored(directory)) == 2, COUNTED_S, "these, too")

    rotten = bytearray(file.read_bytes())
    rotten[-1] ^= 1
    file.write_bytes(rotten)
    with serving("1pd", *shared_storage(directory, "ec_consumer")) as server:
        wait_for(
            lambda: server.instances()["pd0"]["cached_images"] == 2, COUNTED_S, "it is told of"
        )
        assert await ask(server, CAFE) == ANSWER
        asked = partial(post, base_url=server.base_url, body=CAFE, X_EPD_Tenant="another")
        stranger = await in_session(asked)
        assert stranger.status == 503, "another tenant's image is another image"
        (reply,) = await post_all(server.base_url, [OTHER])
        assert reply.status == 503 and reply.lasted_s < COUNTED_S
        message = reply.error["message"]
        assert "no healthy instance has the role encode" in message
        assert "not in the shared storage" in message
        assert not file.exists()


async def test_a_restarted_encoder_knows_its_images_and_survives_its_disk(tmp_path: Path) -> None:
    """Faults F32, F19: the second life answers without encoding; then the disk breaks."""
    directory = tmp_path / "rows"
    with serving("1epd", "--encoder-cache-dir", str(directory)) as server:
        assert await ask(server, CAFE) == ANSWER
        wait_for(lambda: encodes(server) == 1, COUNTED_S, "one encode is counted")
        wait_for(lambda: cache(server, "nbytes") > 0, COUNTED_S, "its rows are in a file")
        (file,) = directory.glob("*/*.safetensors")

        first_life = server.pid("epd0")
        os.kill(first_life, signal.SIGKILL)
        wait_for(
            lambda: server.get("/ready")[0] == 200 and server.pid("epd0") != first_life,
            READY_S,
            "a second life",
        )
        assert await ask(server, CAFE) == ANSWER
        wait_for(lambda: cache(server, "hits_total") == 1, COUNTED_S, "the file was found")
        assert encodes(server) == 0, "the second life has encoded nothing"

        assert file.exists()
        shutil.rmtree(directory)
        directory.write_text("this is no directory")
        assert await ask(server, OTHER)
        wait_for(lambda: cache(server, "failures_total") == 1, COUNTED_S, "it cannot be kept")
        assert encodes(server) == 1
        assert await ask(server, CAFE) == ANSWER, "memory still knows it"
        assert server.text.count("rows cannot be stored") == 1
