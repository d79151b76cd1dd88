"""A gateway role and a model that do as they are told, for tests of the HTTP side.

Token ids are Unicode code points here: id 104 is "h".  A script is what a generation answers: a
list of updates, floats (seconds to wait) and events to wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from epd.api.asked.asked import Asked
from epd.api.asked.chat_message import ChatMessage
from epd.api.asked.reasoning import Place
from epd.api.asked.template_flags import NO_FLAGS, TemplateFlags
from epd.api.http.errors import bad_request
from epd.api.openai.validation import read_chat
from epd.api.prompts.prepare import Prompt
from epd.api.server import ApiServer
from epd.config import AccessConfig, EngineConfig, GatewayConfig, IdempotencyConfig, Limits
from epd.frontend import (
    NO_ADAPTER,
    Adapter,
    AdapterDesk,
    Generation,
    GenerationError,
    GenerationUpdate,
    JsonObject,
    Leave,
    Metric,
    PreparedItem,
    Readiness,
    Refused,
    TimeLimits,
    TimelineEntry,
    TransferParams,
)
from epd.messages import TokenLogprobs
from epd.model_files.lora import AdapterFiles
from epd.observed import Observed, Query

NUM_IMAGE_ROWS = 64
NUM_PIXELS = 100
EOS = 3
TIMELINE = [
    TimelineEntry("GENERATION", "gateway", "", "PREPARING", 1000.0),
    TimelineEntry("CHUNK", "p0", "1", "COMPUTED", 1000.005, 0.0025, 7),
    TimelineEntry("GENERATION", "gateway", "", "FINISHED", 1000.0123456),
]


def chat_asked(**present: Any) -> Asked:
    """A chat request as it is read."""
    body = {"messages": [{"role": "user", "content": "hi"}], **present}
    return read_chat(body, FakePreparer(), Limits())


def conversation(messages: Sequence[JsonObject]) -> list[ChatMessage]:
    """The messages of a chat request as they are read."""
    found = chat_asked(messages=[*messages]).messages
    assert found is not None
    return found


def said(text: str, finish: str = "", *, logprobs: bool = False) -> GenerationUpdate:
    ids = tuple(ord(c) for c in text)
    entries = tuple(TokenLogprobs(i, -0.5, ((i, -0.5), (i + 1, -1.5))) for i in ids)
    return GenerationUpdate(ids, entries if logprobs else (), finish)


def failed(kind: str, status: int, message: str = "it broke") -> GenerationUpdate:
    return GenerationUpdate(error=GenerationError(kind, message, status, status == 503))


HELLO = [said("he"), said("llo"), said("", "stop")]


class FakeStream:
    """Plays a script once started; `cancel` ends it."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.client_request_id = ""
        self.transfer_params = lambda: TransferParams({"h": {"transport": "shm"}}, {"a": 1})
        self.timeline = lambda: list(TIMELINE)
        self.on_concluded = lambda: None
        self.cancelled = asyncio.Event()
        self.reasons: list[tuple[Leave, str]] = []
        self.updates: asyncio.Queue[GenerationUpdate | None] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

    async def play(self, script: Sequence[Any]) -> None:
        for step in script:
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, asyncio.Event):
                await step.wait()
            else:
                self.updates.put_nowait(step)
        self.updates.put_nowait(None)
        self.on_concluded()

    def next_ready(self) -> GenerationUpdate | None:
        if self.updates.empty():
            return None
        update = self.updates.get_nowait()
        if update is None:
            self.updates.put_nowait(None)
        return update

    def __aiter__(self) -> AsyncIterator[GenerationUpdate]:
        return self

    async def __anext__(self) -> GenerationUpdate:
        update = await self.updates.get()
        if update is None:
            self.updates.put_nowait(None)
            raise StopAsyncIteration
        return update

    def cancel(self, why: Leave, reason: str) -> None:
        self.reasons.append((why, reason))
        self.cancelled.set()
        self.updates.put_nowait(None)


class FakeFrontend:
    """Implements `epd.frontend.Frontend`; `scripts` are used in turn, the last one again."""

    def __init__(self, *scripts: Sequence[Any]) -> None:
        self.scripts = list(scripts) or [HELLO]
        self.refused: dict[int, Refused] = {}  # by number of the admission
        self.streams: list[FakeStream] = []
        self.limits: list[TimeLimits | None] = []  # of each admission
        self.generations: list[Generation] = []
        self.readiness = Readiness(True, "", [])
        self.samples: list[Metric] = []
        self.queries: list[Query] = []  # about the machines
        self.observed: dict[str, Observed] | None = {}
        self.adapters: AdapterDesk | None = None
        self.drained: list[tuple[str, float, bool, bool, tuple[str, ...]]] = []
        self.drain_refusal: Refused | None = None
        self.is_full = False

    def drain(
        self,
        name: str,
        within_s: float,
        *,
        forced: bool,
        restarts: bool,
        roles: tuple[str, ...] = (),
    ) -> None:
        if self.drain_refusal is not None:
            raise self.drain_refusal
        self.drained.append((name, within_s, forced, restarts, roles))

    def admit(self, limits: TimeLimits | None = None, who: str = "") -> FakeStream:
        self.limits.append(limits)
        refusal = self.refused.get(len(self.streams))
        if refusal is not None:
            raise refusal
        self.streams.append(FakeStream(f"gw-1-{len(self.streams)}"))
        return self.streams[-1]

    def start_generation(self, stream: FakeStream, generation: Generation) -> None:
        script = self.scripts[min(len(self.generations), len(self.scripts) - 1)]
        self.generations.append(generation)
        stream.task = asyncio.create_task(stream.play(script))

    def ready(self) -> Readiness:
        return self.readiness

    async def profile(self, *, starts: bool) -> dict[str, tuple[bool, str]]:
        return {"p0": (starts, "as told")}

    async def observe(self, query: Query) -> tuple[dict[str, Observed], list[str]]:
        self.queries.append(query)
        if self.observed is None:
            raise Refused(429, "too many look")
        return self.observed, ["d0"]

    def metrics(self) -> list[Metric]:
        return self.samples


class Letters:
    """A detokenizer for code points."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def finish(self) -> str:
        return ""


class FakePreparer:
    """A prompt has one token per character and 64 per image."""

    model_name = "tiny"
    served_names: tuple[str, ...] = ("tiny",)
    adapters: Mapping[str, Adapter] = {}
    max_context = 200
    vocab_size = 0x110000
    eos_token_ids = (EOS,)
    takes_images = True
    defaults: dict[str, Any] = {}  # noqa: RUF012
    reasoning = Place.BEHIND
    reasoning_parser = "qwen3"
    call_form = "hermes"

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.gate: asyncio.Event | None = None
        self.entered = asyncio.Event()

    def adapter(self, name: str, files: AdapterFiles) -> Adapter:
        return Adapter(name, files.digest)

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        tenant: str = "",
        flags: TemplateFlags = NO_FLAGS,
        adapter: Adapter = NO_ADAPTER,
    ) -> Prompt:
        self.messages = list(messages)
        self.tools = list(tools)
        self.entered.set()
        if self.gate is not None:
            await self.gate.wait()
        ids: list[int] = []
        items = []
        for message in messages:
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            for part in parts:
                if part["type"] == "text":
                    ids += map(ord, part["text"])
                    continue
                url = part["image_url"]["url"]
                if url.startswith("file:"):
                    raise bad_request("file: is not allowed", "messages[0].content[0].image_url")
                if url == "crash":
                    raise RuntimeError("a fault of ours")
                item = PreparedItem("0" * 64, len(ids), NUM_IMAGE_ROWS, (1, 16, 16), b"")
                items.append(item)
                ids += [0] * NUM_IMAGE_ROWS
        num_pixels = NUM_PIXELS * len(items)
        return Prompt(
            tuple(ids), tuple(items), tenant, reasoning=self.reasoning, num_pixels=num_pixels
        )

    async def completion(self, prompt: str | Sequence[int], tenant: str = "") -> Prompt:
        ids = map(ord, prompt) if isinstance(prompt, str) else prompt
        return Prompt(tuple(ids), (), tenant)

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(map(ord, word)) for word in words)

    async def grammar(self, constraint: Any, tenant: str = "") -> str:
        return "a grammar"

    def samples(self) -> list[Metric]:
        return []

    async def tokens(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [*([2] if add_special_tokens else []), *map(ord, text)]

    async def text(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        return [f"<{token_id}>" for token_id in token_ids]

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Letters:
        return Letters()

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        return chr(token_id), chr(token_id).encode()

    async def close(self) -> None:
        self.closed = True


@asynccontextmanager
async def serving(
    frontend: FakeFrontend | None = None,
    traces: str = "",
    access: AccessConfig = AccessConfig(),  # noqa: B008 (frozen)
    host: str = "127.0.0.1",
    metrics: str = "",
    engine: EngineConfig = EngineConfig(),  # noqa: B008 (frozen)
    idempotency: IdempotencyConfig = IdempotencyConfig(),  # noqa: B008 (frozen)
    peers: tuple[str, ...] = (),
    port: int = 0,
    **limits: Any,
) -> AsyncIterator[tuple[ApiServer, FakeFrontend, FakePreparer]]:
    """A real server on a free port, over fakes."""
    frontend = frontend or FakeFrontend()
    preparer = FakePreparer()
    config = GatewayConfig(
        host=host,
        port=port,
        limits=Limits(**limits),
        otlp_traces_endpoint=traces,
        otlp_metrics_endpoint=metrics,
        access=access,
        engine=engine,
        idempotency=idempotency,
        peers=peers,
    )
    server = ApiServer(frontend, config, preparer)
    await server.start()
    try:
        yield server, frontend, preparer
    finally:
        await server.close()
        for stream in frontend.streams:
            if stream.task is not None:
                stream.task.cancel()
