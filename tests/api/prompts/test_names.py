"""Names whose servers are silent hold neither the pictures of others nor the loop's end."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from epd.api.http.data_url import image_bound
from epd.api.http.errors import ApiError
from epd.api.prompts import names
from epd.api.prompts.media import MediaFetcher
from epd.config import Limits

LIMITS = Limits(fetch_timeout_s=1.0)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Names under `.silent` get no answer until the test ends."""
    over, real = threading.Event(), socket.getaddrinfo

    def look(host: Any, *others: Any, **more: Any) -> Any:
        if str(host).endswith(".silent"):
            over.wait(60)
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return real(host, *others, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look)
    yield
    over.set()


async def refusal(fetcher: MediaFetcher, host: str) -> str:
    with pytest.raises(ApiError) as refused:
        await fetcher.fetch(f"http://{host}/a.png", image_bound(LIMITS), "p")
    return refused.value.message


@pytest.mark.usefixtures("silent")
async def test_silent_names_hold_nobody_else() -> None:
    fetcher = MediaFetcher(LIMITS)
    slow = [asyncio.create_task(refusal(fetcher, f"h{i}.silent")) for i in range(40)]
    await asyncio.sleep(0.1)
    async with asyncio.timeout(0.5):
        assert "private or local" in await refusal(fetcher, "localhost")
    assert all("within 1 s" in message for message in await asyncio.gather(*slow))
    await fetcher.close()


@pytest.mark.usefixtures("silent")
async def test_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "MAX_LOOKUPS", 2)
    fetcher = MediaFetcher(LIMITS)
    told = await asyncio.gather(*(refusal(fetcher, f"h{i}.silent") for i in range(3)))
    assert sorted("too many names" in message for message in told) == [False, False, True]
    await fetcher.close()
