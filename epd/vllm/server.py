"""The HTTP side of one vLLM server: a prompt of token ids in, tokens out as they come.

It is `/inference/v1/generate`, which vLLM serves with `--enable-scale-out`: placeholders are
expanded already, and a picture is its identifier and its grid.  No pixels go there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
import msgspec

from epd.failure import Failure, FailureKind
from epd.frontend import JsonObject
from epd.messages import KvOffer, MediaItem, PrefillRequest, SamplingParams
from epd.records import TokenLogprobs

PATH = "/inference/v1/generate"
IDLE_S = 2.0  # of a connection; vLLM closes one after 5, which a request must not meet
PROBE_S = 5.0
LOOK_S = 0.2  # for steps of the engine
SHOWS = 3  # steps: it plans two at most before its worker has ended the first
TEST: JsonObject = {
    "token_ids": [0],
    "sampling_params": {"max_tokens": SHOWS + 1, "ignore_eos": True, "detokenize": False},
    "stream": False,
}
MAX_LINE_NBYTES = 1 << 24  # an event with logprobs

Grid = tuple[int, int, int]


class LikelyToken(msgspec.Struct):
    logprob: float
    token_id: int = -1
    token: str = ""  # before 0.32 in its place: "token_id:7"
    rank: int | None = None

    @property
    def number(self) -> int:
        return int(self.token.removeprefix("token_id:")) if self.token else self.token_id


class SampledToken(LikelyToken):
    top_logprobs: tuple[LikelyToken, ...] = ()


class SampledTokens(msgspec.Struct):
    content: tuple[SampledToken, ...] = ()


class ServerChoice(msgspec.Struct):
    """Some tokens of an answer, as they came; without a `finish_reason` it goes on."""

    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    logprobs: SampledTokens | None = None

    def tokens(self) -> list[TokenLogprobs]:
        if self.logprobs is None:
            return [TokenLogprobs(token_id, 0.0) for token_id in self.token_ids]
        return [
            TokenLogprobs(one.number, one.logprob, _likeliest(one), one.rank or 0)
            for one in self.logprobs.content
        ]


class ServerEvent(msgspec.Struct):
    choices: tuple[ServerChoice, ...] = ()
    error: object = None
    kv_transfer_params: JsonObject | None = None


class EngineServer:
    """Of one API server; `encode_grid` makes vLLM's own metadata of a picture; `guides`: its
    structured outputs are made by llguidance."""

    def __init__(
        self, url: str, encode_grid: Callable[[Grid], str], *, guides: bool = False
    ) -> None:
        self.url, self.guides = url.rstrip("/"), guides
        self._encode_grid = encode_grid
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=PROBE_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=connector, read_bufsize=MAX_LINE_NBYTES
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def probe(self) -> None:
        """Raises OSError or TimeoutError where it does not serve."""
        assert self._session is not None
        try:
            async with asyncio.timeout(PROBE_S), self._session.get(f"{self.url}/health") as answer:
                if answer.status != 200:
                    raise OSError(f"{self.url}/health answers {answer.status}")
        except aiohttp.ClientError as error:
            raise OSError(f"{self.url} does not answer: {error}") from error

    async def test(self, num_steps: Callable[[], int]) -> None:
        """Until its engine has made some steps, which are counted by `num_steps`: `/health` answers
        even where a worker stands still.  Raises OSError or TimeoutError."""
        await self.probe()
        came = list[ServerChoice]()
        answer, enough = self.answer(TEST, came.append), num_steps() + SHOWS
        reading = asyncio.ensure_future(answer.read())
        try:
            while not reading.done() and num_steps() < enough:
                await asyncio.wait([reading], timeout=LOOK_S)
        finally:
            answer.close()
        failure = await reading
        if not came and num_steps() < enough:
            raise OSError(failure.reason)

    def answer(self, body: JsonObject, on_chunk: Callable[[ServerChoice], None]) -> ServerAnswer:
        assert self._session is not None
        return ServerAnswer(self._session, self.url + PATH, body, on_chunk)

    def again(self, message: PrefillRequest | KvOffer) -> tuple[int, ...]:
        """Tokens that the client has, and that the server is to make again: it reads a grammar
        from the answer's first token on."""
        is_behind = message.sampling.grammar and message.num_emitted
        return message.token_ids[-message.num_emitted :] if is_behind else ()

    def body_of(self, message: PrefillRequest | KvOffer) -> JsonObject:
        """Of an attempt that is not refused (`objection_to`), without the tokens of `again`."""
        num_before = message.num_emitted - len(again := self.again(message))
        body: JsonObject = {
            "request_id": f"{message.request_id}-{message.attempt}",
            "token_ids": message.token_ids[: len(message.token_ids) - len(again)],
            "sampling_params": sampling_of(message.sampling, num_before),
            "stream": True,
        }
        if message.scope:
            body["cache_salt"] = message.scope
        if message.items:
            hashes = [item.mm_hash for item in message.items]
            places = [{"offset": item.offset, "length": item.num_rows} for item in message.items]
            grids = [self._encode_grid(item.grid_thw) for item in message.items]
            body["features"] = {
                "mm_hashes": {"image": hashes},
                "mm_placeholders": {"image": places},
                "kwargs_data": {"image": [None] * len(hashes)},
                "mm_metadata": {"image": grids},
            }
            body["ec_transfer_params"] = {mm_hash: {} for mm_hash in hashes}
        return body


class ServerAnswer:
    """One request under way.  It ends by its last chunk, a failure, or `close`."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        body: JsonObject,
        on_chunk: Callable[[ServerChoice], None],
    ) -> None:
        self._session, self._url, self._body = session, url, body
        self._on_chunk = on_chunk
        self._reading: asyncio.Task[Failure] | None = None
        self._is_closed = False
        self.is_refused = False  # nobody listens there any more
        self.kv_transfer_params: JsonObject | None = None  # of an answer that came whole

    def close(self) -> None:
        """Hang up, by which the server drops it."""
        self._is_closed = True
        if self._reading is not None:
            self._reading.cancel()

    async def read(self) -> Failure:
        """Until nothing of it comes any more; why it has ended, if no chunk said so."""
        hung_up = Failure(FailureKind.CANCELLED, "nobody reads it any more")
        if self._is_closed:
            return hung_up
        self._reading = asyncio.ensure_future(self._read())
        try:
            await asyncio.wait([self._reading])
        finally:
            self._reading.cancel()
        return hung_up if self._reading.cancelled() else self._reading.result()

    async def _read(self) -> Failure:
        data = msgspec.json.encode(self._body)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(self._url, data=data, headers=headers) as answer:
                if answer.status != 200:
                    return refusal(answer.status, await answer.text())
                async for line in answer.content:
                    if failure := self._take(line.strip()):
                        return failure
        except aiohttp.ClientConnectorError as error:
            self.is_refused = True
            return Failure(FailureKind.ENGINE, f"the vLLM server is gone: {error}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return Failure(FailureKind.ENGINE, f"the vLLM server does not answer: {error}")
        except (ValueError, msgspec.MsgspecError) as error:
            return Failure(FailureKind.ENGINE, f"the vLLM server's answer cannot be read: {error}")
        return Failure(FailureKind.ENGINE, "the vLLM server ended the answer too early")

    def _take(self, line: bytes) -> Failure | None:
        data = line.removeprefix(b"data:").strip()
        if not data or data == b"[DONE]":
            return None
        event = msgspec.json.decode(data, type=ServerEvent)
        if event.error:
            return Failure(FailureKind.ENGINE, f"the vLLM server failed: {event.error}")
        self.kv_transfer_params = event.kv_transfer_params
        for choice in event.choices:
            self._on_chunk(choice)
        return None


def refusal(status: int, text: str) -> Failure:
    """What an HTTP status other than 200 means."""
    said = f"the vLLM server answers {status}: {text[:300]}"
    if status in {403, 404}:
        return Failure(FailureKind.INTERNAL, f"start vLLM with --enable-scale-out; {said}")
    kind = FailureKind.CAPACITY if status in {400, 413, 422} else FailureKind.ENGINE
    return Failure(kind, said)


def _likeliest(one: SampledToken) -> tuple[tuple[int, float], ...]:
    """The likeliest first; the sampled one may be among them."""
    ordered = sorted(one.top_logprobs, key=lambda top: -top.logprob)
    return tuple((top.number, top.logprob) for top in ordered)


def sampling_of(sampling: SamplingParams, num_emitted: int) -> JsonObject:
    """In vLLM's words.  `num_emitted` tokens of the answer are at the prompt's end."""
    params: JsonObject = {
        "max_tokens": sampling.max_tokens - num_emitted,
        "min_tokens": max(0, sampling.min_tokens - num_emitted),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": True,  # its end is among those
        "detokenize": False,
    }
    if sampling.temperature:
        params["seed"] = sampling.seed
    if sampling.logit_bias:
        params["logit_bias"] = dict(sampling.logit_bias)
    if sampling.allowed_token_ids:
        params["allowed_token_ids"] = sampling.allowed_token_ids
    if sampling.grammar:
        params["structured_outputs"] = structured_outputs_of(sampling.grammar)
    if sampling.num_logprobs >= 0:
        params["logprobs"] = sampling.num_logprobs
    return params


def structured_outputs_of(grammar: str) -> JsonObject:
    """In vLLM's words, for its guidance backend, which has this grammar's own compiler."""
    if not grammar.startswith("{"):
        return {"grammar": grammar}
    (whole,) = msgspec.json.decode(grammar)["grammars"]
    schema = whole["json_schema"]
    return {"grammar": whole["lark_grammar"]} if schema is None else {"json": schema}


def objection_to(
    sampling: SamplingParams, items: tuple[MediaItem, ...], *, guides: bool = False
) -> str:
    """What vLLM cannot be asked for here; empty: nothing of it.  `guides`: it follows grammars."""
    asked = {
        "grammar or tool choice (--structured-outputs-config, as printed)": (
            sampling.grammar and not guides
        ),
        "bad_words": sampling.bad_words,
        "no_repeat_ngram": sampling.no_repeat_ngram,
        "logprobs of the prompt": sampling.num_prompt_logprobs >= 0,
        "logprobs of chosen tokens": sampling.logprob_token_ids,
        "a video": any(item.offsets or item.grid_thw[0] != 1 for item in items),
    }
    refused = [name for name, is_asked in asked.items() if is_asked]
    return f"behind vLLM there is no {' and no '.join(refused)}" if refused else ""
