"""A proxy that drives encode, prefill and decode one by one, as those of other servers do.

    epd run --topology 1e1p1d --port 8000
    python examples/staged_proxy.py --port 9000 --encode http://127.0.0.1:8000/encode \\
        --prefill http://127.0.0.1:8000 --decode http://127.0.0.1:8000

Behind the three URLs is one gateway, which places each stage; they may as well be several clusters,
or other servers that speak the same parameters.  Whatever happens to this process between two
stages, nothing is lost: what was encoded is a cache, and held KV comes back when its lease ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web

MEDIA = ("image_url", "video_url")
SHARED = ("model", "mm_processor_kwargs", "media_io_kwargs")  # the last two shape its rows
FORWARDED = ("Authorization", "X-Api-Key", "X-EPD-Tenant")  # rows and KV belong to who asks
Body = dict[str, Any]


class Refused(Exception):
    """A stage did not answer 200."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(status)
        self.status, self.body = status, body


class Stages:
    """One request's way through them."""

    def __init__(self, session: ClientSession, urls: argparse.Namespace, headers: Any) -> None:
        self._session = session
        self._urls = urls
        self._headers = {name: headers[name] for name in FORWARDED if name in headers}

    async def drive(self, body: Body) -> Body:
        """The body of the last stage."""
        shared = {name: body[name] for name in SHARED if name in body}
        images = await asyncio.gather(*(self._encode(part, shared) for part in _media_of(body)))
        ec = {mm_hash: said for params in images for mm_hash, said in params.items()}
        if ec:
            body = body | {"ec_transfer_params": ec}
        prompt = _first_token_of(body) | {"kv_transfer_params": {"do_remote_decode": True}}
        answer = await self._post(self._urls.prefill, prompt)
        return body | {"kv_transfer_params": answer["kv_transfer_params"]}

    async def _encode(self, part: Body, shared: Body) -> Body:
        """One image, without any text."""
        messages = [{"role": "user", "content": [part]}]
        body = {**shared, "messages": messages, "max_tokens": 1}
        params: Body = (await self._post(self._urls.encode, body))["ec_transfer_params"]
        return params

    async def _post(self, url: str, body: Body) -> Body:
        async with self.last(url, body) as response:
            answer = await response.json()
            if response.status != 200:
                raise Refused(response.status, answer)
            return dict(answer)

    @asynccontextmanager
    async def last(self, url: str, body: Body) -> AsyncIterator[Any]:
        path = f"{url}/v1/chat/completions"
        async with self._session.post(path, json=body, headers=self._headers) as response:
            yield response


def _media_of(body: Body) -> list[Body]:
    contents = (message.get("content") for message in body.get("messages", ()))
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if part.get("type") in MEDIA]


def _first_token_of(body: Body) -> Body:
    left_out = ("max_completion_tokens", "stream", "stream_options")
    return {k: v for k, v in body.items() if k not in left_out} | {"max_tokens": 1}


async def serve(urls: argparse.Namespace) -> None:
    async with ClientSession(timeout=ClientTimeout(total=None)) as session:

        async def chat(request: web.Request) -> web.StreamResponse:
            stages = Stages(session, urls, request.headers)
            try:
                body = await stages.drive(await request.json())
            except Refused as refused:
                return web.json_response(refused.body, status=refused.status)
            async with stages.last(urls.decode, body) as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

        application = web.Application(client_max_size=64 << 20)
        application.router.add_post("/v1/chat/completions", chat)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", urls.port).start()
        print(json.dumps({"port": urls.port}), flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description="drive encode, prefill and decode one by one")
    parser.add_argument("--port", type=int, default=9000)
    for stage in ("encode", "prefill", "decode"):
        parser.add_argument(f"--{stage}", required=True, metavar="URL")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
