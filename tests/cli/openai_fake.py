"""An OpenAI server that streams what a script says, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Step = str | int | asyncio.Event | dict[str, Any]
MODEL = "a-model"


class FakeServer:
    """`script`: one list of steps per question, in order.

    A text is a piece of the answer; an event is waited for; a dictionary is an event of its own;
    a number, alone, is the status of a refusal.
    """

    def __init__(self, script: Sequence[Sequence[Step]]) -> None:
        self._script = [list(steps) for steps in script]
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []  # of each request: its Authorization
        self.left = asyncio.Event()  # a client went before its answer was whole
        self.url = ""

    async def _models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization", ""))
        return web.json_response({"data": [{"id": MODEL}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.keys.append(request.headers.get("Authorization", ""))
        self.asked.append(await request.json())
        steps = self._script.pop(0)
        if isinstance(steps[0], int):
            error = {"error": {"message": "no such thing, try another"}}
            return web.json_response(error, status=steps[0])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for step in steps:
                await self._take(response, step)
        except (ConnectionError, asyncio.CancelledError):
            self.left.set()
            raise
        return response

    async def _take(self, response: web.StreamResponse, step: Step) -> None:
        if isinstance(step, asyncio.Event):
            await step.wait()
        elif step == "[DONE]":
            await response.write(b"data: [DONE]\n\n")
        else:
            event = step if isinstance(step, dict) else {"choices": [{"delta": {"content": step}}]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def ended(reason: str = "stop") -> list[Step]:
    """The last events of a whole answer."""
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    last = {"choices": [{"delta": {}, "finish_reason": reason}]}
    return [last, {"choices": [], "usage": usage}, "[DONE]"]


@asynccontextmanager
async def serving(*script: Sequence[Step]) -> AsyncIterator[FakeServer]:
    server = FakeServer(script)
    app = web.Application(client_max_size=1 << 24)
    app.router.add_get("/v1/models", server._models)
    app.router.add_post("/v1/chat/completions", server._chat)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()
