"""The algorithm of vLLM's example proxies, as the front of a column.

With encoders: one request per picture, all text removed, goes to the encoders in turn, from the
first one on for each request; if one fails, the request does.  With a prefill server: it is asked
for one token, and what it returns goes to decode with the whole request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
from aiohttp import web

PATH = "/v1/chat/completions"
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}
UNKNOWN = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")


class EncoderFailed(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class ExampleProxy:
    """URLs may be changed while it runs.  Without encoders and prefill it only passes on."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.encoders: Sequence[str] = ()
        self.prefill = ""
        self.decode = ""
        self._port = port
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post(PATH, self._chat)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))

    async def close(self) -> None:
        await self._session.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        async with self._session.get(f"{self.decode}/v1/models") as answer:
            return web.json_response(await answer.json())

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        content = [part for one in body["messages"] for part in one["content"]]
        items = [part for part in content if part["type"] == "image_url"]
        try:
            asked = (self._encode(body, item, at) for at, item in enumerate(items))
            encoded = await asyncio.gather(*asked) if self.encoders else ()
        except EncoderFailed as failed:
            return web.json_response({"detail": f"encode: {failed}"}, status=failed.status)
        except (aiohttp.ClientError, OSError) as error:
            return web.json_response({"detail": f"encode: {error!r}"}, status=502)
        if params := {name: value for one in encoded for name, value in one.items()}:
            body["ec_transfer_params"] = params
        try:
            if self.prefill:
                body["kv_transfer_params"] = await self._computed(body)
            return await self._decoded(request, body)
        except (aiohttp.ClientError, OSError) as error:
            return web.json_response({"detail": f"proxy: {error!r}"}, status=500)

    async def _encode(self, body: Any, item: Any, at: int) -> dict[str, Any]:
        url = self.encoders[at % len(self.encoders)]
        messages = [{"role": "user", "content": [item]}]
        asked = {"model": body["model"], "messages": messages, "max_tokens": 1}
        async with self._session.post(url + PATH, json=asked) as answer:
            if answer.status != 200:
                raise EncoderFailed(answer.status, await answer.text())
            return (await answer.json()).get("ec_transfer_params") or {}

    async def _computed(self, body: Any) -> Any:
        asked = body | {"max_tokens": 1, "stream": False}
        asked["kv_transfer_params"] = ASKED | dict.fromkeys(UNKNOWN)
        async with self._session.post(self.prefill + PATH, json=asked) as answer:
            answer.raise_for_status()
            return (await answer.json()).get("kv_transfer_params")

    async def _decoded(self, request: web.Request, body: Any) -> web.StreamResponse:
        async with self._session.post(self.decode + PATH, json=body) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            try:
                async for data in answer.content.iter_any():
                    await response.write(data)
                await response.write_eof()
            except aiohttp.ClientError:
                if request.transport is not None:
                    request.transport.abort()  # as its server does when a generator fails
            return response
