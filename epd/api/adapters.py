"""Adapters that come and go: `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`.

Names and answers are vLLM's.  A client names a directory below the operator's, and no other is
read.  One is read at a time, on a thread; who comes meanwhile tries again.  What one client loads
is served to all, so strangers may not: beyond this host it takes a key, or certificates.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, TypeVar

from msgspec import Meta

from epd.api.http.access import warning
from epd.api.http.body import Intake
from epd.api.http.errors import ApiError, bad_request
from epd.api.http.exchange import Exchange
from epd.api.http.shapes import NotRead, Shape, read_shape
from epd.api.prompts.prepare import Preparer
from epd.config import GatewayConfig
from epd.frontend import AdapterDesk, Refused
from epd.model_files.checkpoint import ModelError
from epd.model_files.lora import AdapterFiles, read_below

READ_TIMEOUT_S = 60.0
OFF = "adapters are not loaded for whoever comes: set an API key, or listen on 127.0.0.1"
TEXT = b"text/plain; charset=utf-8"
Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[\w./:@+-]+\Z")]

S = TypeVar("S", bound=Shape)


class LoadRequest(Shape, kw_only=True):
    lora_name: Name
    lora_path: Annotated[str, Meta(min_length=1, max_length=1000)]
    refused = {"load_inplace": NotRead("unload the adapter first", (False,))}  # noqa: RUF012


class UnloadRequest(Shape, kw_only=True):
    lora_name: Name
    refused = {"lora_int_id": NotRead("an adapter has its name alone")}  # noqa: RUF012


class AdapterVerbs:
    """Over one gateway."""

    def __init__(
        self, desk: AdapterDesk, config: GatewayConfig, preparer: Preparer, intake: Intake
    ) -> None:
        self._desk = desk
        self._lora = config.engine.lora
        self._preparer = preparer
        self._intake = intake
        self._is_off = bool(warning(config.host, config.access))
        self._reading: asyncio.Future[AdapterFiles] | None = None  # may outlast its request

    async def load(self, exchange: Exchange) -> None:
        """POST /v1/load_lora_adapter.  Raises ApiError, ClientGone."""
        request = await self._read(exchange, LoadRequest)
        name = request.lora_name
        if name in self._preparer.served_names or name in self._preparer.adapters:
            raise bad_request(f"the name {name} is taken; give another one", "lora_name")
        files = await self._files(request.lora_path)
        path = files.directory.relative_to(self._lora.runtime_dir)
        try:
            await self._desk.load(self._preparer.adapter(name, files), str(path))
        except Refused as refusal:
            raise ApiError(refusal.status, refusal.message) from None
        told = f"Success: LoRA adapter '{name}' added successfully."
        await exchange.respond(200, told.encode(), TEXT)

    async def unload(self, exchange: Exchange) -> None:
        """POST /v1/unload_lora_adapter.  Raises ApiError, ClientGone."""
        name = (await self._read(exchange, UnloadRequest)).lora_name
        try:
            await self._desk.unload(name)
        except Refused as refusal:
            raise ApiError(refusal.status, refusal.message, param="lora_name") from None
        told = f"Success: LoRA adapter '{name}' removed successfully."
        await exchange.respond(200, told.encode(), TEXT)

    async def _read(self, exchange: Exchange, shape: type[S]) -> S:
        if self._is_off:
            raise ApiError(403, OFF, code="adapters_are_off")
        body = await exchange.read_json(self._intake, self._intake.limits.read_timeout_s)
        return read_shape(body, shape)

    async def _files(self, path: str) -> AdapterFiles:
        """Raises ApiError."""
        if self._reading is not None and not self._reading.done():
            raise ApiError(429, "another adapter is being read; try again later", code="overloaded")
        root, rank = self._lora.runtime_dir, self._lora.max_lora_rank
        work = asyncio.to_thread(read_below, root, path, rank)
        self._reading = reading = asyncio.ensure_future(work)
        await asyncio.wait([reading], timeout=READ_TIMEOUT_S)
        if not reading.done():
            reading.add_done_callback(lambda late: late.exception())  # which nobody asks for
            raise ApiError(504, f"{path} was not read within {READ_TIMEOUT_S:g} s", code="timeout")
        try:
            return reading.result()
        except ModelError as error:
            raise bad_request(str(error), "lora_path") from None
