"""The HTTP side of a vLLM server, without a model: each token is the one before it plus one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

from epd.vllm.server import PATH


class FakeServer:
    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.num_open = 0
        self.url = ""
        self.status = 200
        self.stops_after = 1 << 30  # tokens: the answer ends there, without an end
        self.pause_s = 0.0
        self.gives_tickets = True  # where an answer comes whole
        self.silent = ""  # a server whose KV does not come: it fails as the connector makes it fail
        self.stands_still = False  # an engine whose worker does not end its step
        self.shift = 0  # of the first token, for a server that disagrees
        self.stop: Callable[[], Awaitable[None]]

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        while self.stands_still:
            await asyncio.sleep(0.01)
        if not body["stream"]:
            number = len(self.bodies)
            await asyncio.sleep(self.pause_s)
            choice = {"token_ids": [body["token_ids"][-1] + 1], "finish_reason": "length"}
            ticket = (
                {"remote_engine_id": self.url, "number": number} if self.gives_tickets else None
            )
            return web.json_response({"choices": [choice], "kv_transfer_params": ticket})
        ticket = body.get("kv_transfer_params")
        if ticket is not None and ticket["remote_engine_id"] == self.silent:
            await asyncio.sleep(self.pause_s)
            return web.json_response({"error": {"message": "Internal server error"}}, status=500)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self.num_open += 1
        try:
            most = body["sampling_params"]["max_tokens"]
            for count in range(1, min(most, self.stops_after) + 1):
                await asyncio.sleep(self.pause_s)
                reason = "length" if count == most else None
                token = body["token_ids"][-1] + count + self.shift * (count == 1)
                choice = {"token_ids": [token], "finish_reason": reason}
                event = json.dumps({"choices": [choice]})
                await answer.write(f"data: {event}\n\n".encode())
        finally:
            self.num_open -= 1
        return answer


@contextlib.asynccontextmanager
async def fake_server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    app = web.Application()
    app.router.add_get("/health", fake._health)
    app.router.add_post(PATH, fake._generate)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    host, port = site._server.sockets[0].getsockname()[:2]
    fake.stop = runner.cleanup
    fake.url = f"http://{host}:{port}"
    try:
        yield fake
    finally:
        await runner.cleanup()
