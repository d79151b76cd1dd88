"""Who is the same image, for whom (fault F38)."""

from __future__ import annotations

import random
from pathlib import Path

import aiohttp
import pytest

from epd.api.http.identity import mm_hash, scope_of, tenant_of
from epd.api.prompts.prepare import Preparer
from epd.config import GatewayConfig
from epd.frontend import NO_ADAPTER, Adapter
from epd.tiny import CHECKPOINT
from tests.api.fakes import serving
from tests.api.prompts.test_prepare import part, png, user
from tests.api.prompts.test_video import frames_part, prompt_of
from tests.api.prompts.test_video import part as video_part
from tests.media_files.videos import film

ALICE = {b"authorization": b"Bearer alice"}
BOB = {b"authorization": b"Bearer bob"}


def test_content_and_all_that_shapes_its_rows_is_the_identity() -> None:
    parts = ("scope", b"image", "processor", "model")
    others = [
        ("scop", b"eimage", "processor", "model"),
        ("scope", b"image", "processorm", "odel"),
        ("scope", b"image2", "processor", "model"),
        ("other", b"image", "processor", "model"),
    ]
    assert len({mm_hash(*given) for given in [parts, *others]}) == 5
    assert mm_hash(*parts) == mm_hash(*parts)


def test_every_byte_of_the_content_counts() -> None:
    """F81: first, last, at the edges of pieces, one more or less; and no two of many collide."""
    content = random.Random(1).randbytes(300_000)
    edges = (0, 1 << 12, 1 << 16, 1 << 17, 1 << 18, len(content))
    places = {at + by for at in edges for by in (-1, 0, 1) if 0 <= at + by < len(content)}
    others = [content, content[:-1], content + b"\0"]
    others += [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in places]
    others += [str(n).encode() for n in range(2000)]
    hashes = {mm_hash("scope", other, "processor", "model") for other in others}
    assert len(hashes) == len(others) and {len(found) for found in hashes} == {64}


async def test_what_differs_behind_its_first_64_kib_is_another() -> None:
    """Images, films and frames, as they come."""
    tails = [random.Random(1).randbytes(100_000) + end for end in (b"one", b"two")]
    preparer = Preparer(GatewayConfig(model_dir=str(Path(CHECKPOINT))))
    free = (8 + len(tails[0])).to_bytes(4, "big") + b"free"  # a box that films may end with
    for same in (
        [part(png(64, 64) + tail) for tail in tails],
        [video_part(film(1) + free + tail) for tail in tails],
        [frames_part(png(64, 64), png(64, 64) + tail) for tail in tails],
    ):
        prompts = [await prompt_of(preparer, one, "?") for one in same]
        names = {prompt.items[0].mm_hash for prompt in prompts}
        assert len(names) == 2, "another content is another image"
    await preparer.close()


def test_a_tenant_is_its_key_and_its_name_together() -> None:
    named = {b"x-epd-tenant": b"alice"}
    tenants = [tenant_of(h) for h in ({}, ALICE, BOB, named, ALICE | named, BOB | named)]
    assert len(set(tenants)) == 6 and tenants[0] == ""
    assert all("alice" not in tenant for tenant in tenants)
    assert tenant_of({b"x-api-key": b"alice"}) == tenant_of(ALICE), "however a client sends it"
    assert tenant_of({b"authorization": b"bEARER alice"}) == tenant_of(ALICE), "or spells it"
    swapped = {b"authorization": b"", b"x-epd-tenant": b"Bearer alice"}
    assert tenant_of(swapped) != tenant_of(ALICE)


def test_a_salt_parts_what_one_tenant_asks_under_either_setting() -> None:
    tenants = [tenant_of(h, salt) for h in ({}, ALICE, BOB) for salt in ("", "one", "other")]
    assert len(set(tenants)) == 9 and not any("one" in tenant for tenant in tenants)
    assert len({scope_of("tenant", "cluster", tenant) for tenant in tenants}) == 9
    assert len({scope_of("global", "cluster", tenant) for tenant in tenants}) == 3


def test_the_scope_follows_the_setting() -> None:
    assert scope_of("tenant", "cluster", "") == scope_of("global", "cluster", "x") == "cluster"
    assert scope_of("tenant", "cluster", "x") not in {"cluster", scope_of("tenant", "other", "x")}


@pytest.mark.parametrize(("cache_scope", "shared"), [("tenant", False), ("global", True)])
async def test_tenants_share_images_and_text_only_in_a_global_scope(
    cache_scope: str, shared: bool
) -> None:
    preparer = Preparer(GatewayConfig(model_dir=str(Path(CHECKPOINT)), cache_scope=cache_scope))
    message = user(part(png(64, 64)), "?")
    tenants = [tenant_of(headers) for headers in (ALICE, ALICE, BOB, {})]
    chats = [await preparer.chat(message, tenant=tenant) for tenant in tenants]
    texts = [await preparer.completion("a text", tenant) for tenant in tenants]
    await preparer.close()
    for names in (
        [prompt.items[0].mm_hash for prompt in chats],
        [prompt.scope for prompt in chats],
        [prompt.scope for prompt in texts],
    ):
        assert names[0] == names[1]
        assert (len(set(names)) == 1) == shared


async def test_rows_are_of_an_adapter_that_changes_the_tower() -> None:
    """Of no other: those of the model are shared with adapters of the language model alone."""
    preparer = Preparer(GatewayConfig(model_dir=str(Path(CHECKPOINT))))
    message, digests = user(part(png(64, 64)), "?"), ("a" * 32, "b" * 32)
    towers = [Adapter("one", digest, changes_tower=True) for digest in digests]
    asked = [NO_ADAPTER, Adapter("one", "c" * 32), *towers, *towers]
    chats = [await preparer.chat(message, adapter=adapter) for adapter in asked]
    await preparer.close()
    plain, language, *of_towers = [prompt.items[0].mm_hash for prompt in chats]
    assert plain == language
    assert len({plain, *of_towers}) == 3


async def test_each_prompt_has_the_scope_of_who_asks() -> None:
    """Chats and completions: two keys never look into one cache (F53)."""
    asked = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
    ]
    async with (
        serving() as (server, frontend, _),
        aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session,
    ):
        for key in ("alice", "alice", "bob"):
            for path, body in asked:
                async with session.post(path, json=body, headers={"authorization": key}) as answer:
                    assert answer.status == 200
    scopes = [generation.scope for generation in frontend.generations]
    assert len(set(scopes)) == 2 and len(set(scopes[:4])) == 1
