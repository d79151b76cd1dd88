"""Prompts as tokens, and tokens as text: `/tokenize`, `/detokenize` and Anthropic's `count_tokens`.

The tokens are those of a completion of the same prompt, with a row of an image for each of its
placeholders, so their count is that of `usage`.  None of this needs an instance, so it is not
admitted as a generation; how many are open at once has the same limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from epd.api.anthropic.request import read_counted
from epd.api.asked.asked import Asked, facts_of
from epd.api.asked.parameters import TokenId
from epd.api.http.body import Intake
from epd.api.http.errors import ApiError, bad_request
from epd.api.http.exchange import Exchange
from epd.api.http.identity import tenant_of
from epd.api.http.shapes import JsonValue, Shape, bounded, names_of, read_shape
from epd.api.openai.request import ChatRequest
from epd.api.openai.validation import check_model, read_chat
from epd.api.prompts.prepare import Preparer
from epd.frontend import JsonObject

T = TypeVar("T")


class TokenizeRequest(Shape):
    """Either a prompt or messages; defaults as vLLM's."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, JsonValue]] | None = None
    tools: list[dict[str, JsonValue]] | None = None
    media_io_kwargs: dict[str, JsonValue] | None = None
    mm_processor_kwargs: dict[str, JsonValue] | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strings: bool | None = None
    return_token_strs: bool | None = None  # vLLM's name of it


_CHAT = names_of(TokenizeRequest) & {*ChatRequest.__struct_fields__}


class DetokenizeRequest(Shape, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request of `/tokenize`, read."""

    names: bool
    prompt: str = ""
    add_special_tokens: bool = True
    chat: Asked | None = None


class Tokenizing:
    """Over one model."""

    def __init__(self, preparer: Preparer, intake: Intake) -> None:
        self._preparer = preparer
        self._intake = intake
        self._limits = intake.limits
        self._num_open = 0

    async def tokenize(self, exchange: Exchange) -> None:
        """POST /tokenize.  Raises ApiError, ClientGone."""
        async with self._place():
            request = await self._read(exchange, self._read_tokenize)
            ids = await self._tokens(exchange, request)
            value = {
                "count": len(ids),
                "max_model_len": self._preparer.max_context,
                "tokens": ids,
                "token_strings": None,
                "token_strs": None,
            }
            if request.names:
                # of a long context a third of a second
                names = await asyncio.to_thread(self._preparer.token_names, ids)
                value |= {"token_strings": names, "token_strs": names}
            await exchange.respond_json(200, value)

    def _read_tokenize(self, body: JsonObject) -> _Asked:
        request = read_shape(body, TokenizeRequest)
        check_model(request.model, self._preparer)
        names = bool(request.return_token_strings or request.return_token_strs)
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("send either prompt or messages", "prompt")
        if request.prompt is not None:
            if request.continue_final_message:
                message = "continue_final_message is for messages; a prompt is continued anyway"
                raise bad_request(message, "continue_final_message")
            special = request.add_special_tokens is not False
            return _Asked(names, prompt=request.prompt, add_special_tokens=special)
        if request.add_special_tokens:
            message = "add_special_tokens is for a prompt; chat templates write their own"
            raise bad_request(message, "add_special_tokens")
        chat = {name: body[name] for name in _CHAT if name in body}
        return _Asked(names, chat=read_chat(chat, self._preparer, self._limits))

    async def _tokens(self, exchange: Exchange, request: _Asked) -> Sequence[int]:
        if request.chat is None:
            return await self._preparer.tokens(
                request.prompt, add_special_tokens=request.add_special_tokens
            )
        exchange.on_disconnect(lambda: None)  # its pictures are not fetched for nobody
        prompt = await self._preparer.chat(
            request.chat.messages or (),
            request.chat.tools,
            tenant_of(exchange.headers, scope=exchange.caller.scope),
            request.chat.template_flags,
        )
        return prompt.token_ids

    async def detokenize(self, exchange: Exchange) -> None:
        """POST /detokenize.  Raises ApiError, ClientGone."""
        async with self._place():
            ids = await self._read(exchange, self._read_detokenize)
            await exchange.respond_json(200, {"prompt": await self._preparer.text(ids)})

    def _read_detokenize(self, body: JsonObject) -> list[int]:
        facts = facts_of(self._preparer, self._limits)
        request = read_shape(body, bounded(DetokenizeRequest, facts))
        check_model(request.model, self._preparer)
        return request.tokens

    async def count(self, exchange: Exchange) -> None:
        """POST /v1/messages/count_tokens.  Raises ApiError, ClientGone."""
        async with self._place():
            asked = await self._read(
                exchange, lambda body: read_counted(body, self._preparer, self._limits)
            )
            try:
                tenant = tenant_of(exchange.headers, scope=exchange.caller.scope)
                prompt = await self._preparer.chat(
                    asked.messages or (), asked.tools, tenant, asked.template_flags
                )
            except ApiError as error:
                raise asked.told(error) from None
            await exchange.respond_json(200, {"input_tokens": len(prompt.token_ids)})

    async def _read(self, exchange: Exchange, read: Callable[[JsonObject], T]) -> T:
        body = await exchange.read_json(self._intake, self._limits.read_timeout_s)
        assert exchange.body is not None
        return await exchange.body.work(read, body)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        limit = self._limits.max_open_requests
        if self._num_open >= limit:
            message = f"{limit} prompts are being tokenized, the limit; try again later"
            raise ApiError(429, message, code="overloaded")
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
