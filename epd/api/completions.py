"""From a request to its answer: validate, admit, prepare, generate, write.

Admission comes before any work on the prompt: a gateway that fetches and tokenizes first and
refuses afterwards does most work when it is most loaded (fault F39).  Each choice is a generation
of its own with its own place; either all are admitted or none.  Whatever happens then, each place
is given back exactly once: by the end of the generation, or by `cancel`, with the cause.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from epd.api.answers.answer import Answer, AnswerFacts, Extras
from epd.api.answers.choice import Choice, Delta, joined
from epd.api.answers.choices import make_choices
from epd.api.answers.pace import SLICE, Pace, size, whole_size
from epd.api.asked.asked import Asked, ModelFacts
from epd.api.http.body import Intake
from epd.api.http.errors import ApiError
from epd.api.http.exchange import ClientGone, Exchange
from epd.api.http.identity import tenant_of
from epd.api.http.places import NBYTES_PER_TOKEN, Places
from epd.api.http.rarely import fetched
from epd.api.http.time_limits import read_time_limits
from epd.api.openai.answer import ChatAnswer, CompletionAnswer
from epd.api.openai.validation import read_chat, read_completion, read_encode
from epd.api.prompts.pixels import PixelBudget
from epd.api.prompts.prepare import Preparer, Prompt
from epd.api.watching.metering import NO_METER, Meter
from epd.api.watching.telemetry import Telemetry
from epd.api.watching.tracing import CLIENT_LEFT, Record, Tracer, describe_answer, describe_request
from epd.config import Limits
from epd.frontend import (
    Frontend,
    Generation,
    GenerationError,
    GenerationStream,
    GenerationUpdate,
    JsonObject,
    Leave,
    Refused,
    TimeLimits,
)

T = TypeVar("T")
Reader = Callable[[JsonObject, ModelFacts, Limits], Asked]
NO_TRACER = Tracer()
# Imported with their first request: most gateways are asked in one API alone.
MESSAGES = "epd.api.anthropic.request:read_message", "epd.api.anthropic.answer:MessageAnswer"
RESPONSES = "epd.api.responses.request:read_response", "epd.api.responses.answer:ResponseAnswer"


class Completions:
    """Serves completions over one model, in the forms of several APIs."""

    def __init__(
        self,
        frontend: Frontend,
        preparer: Preparer,
        intake: Intake,
        time_limits: TimeLimits,
        telemetry: Telemetry,
        tracer: Tracer = NO_TRACER,
        meter: Meter = NO_METER,
        num_keys: Callable[[], int] = int,
    ) -> None:
        """`time_limits`: the longest that a client may ask for, and what it gets if it does not;
        `num_keys`: by which clients are told apart."""
        self._frontend = frontend
        self._tracer = tracer
        self._meter = meter
        self._telemetry = telemetry
        self._preparer = preparer
        self._intake = intake
        self._pixels = PixelBudget(intake.limits, self._num_encoders)
        self._places = Places(intake.limits, num_keys)
        self._pace = Pace(intake.threads)
        self._limits = intake.limits
        self._time_limits = time_limits
        self._open: dict[str, list[GenerationStream]] = {}  # by request id
        self._readers: set[asyncio.Task[object]] = set()  # kept alive until they end

    async def chat(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions.  Raises ApiError, ClientGone."""
        await self._traced(exchange, "chat", read_chat, ChatAnswer)

    async def encode(self, exchange: Exchange) -> None:
        """POST /encode/v1/chat/completions.  Raises ApiError, ClientGone."""
        await self._traced(exchange, "chat", read_encode, ChatAnswer)

    async def completion(self, exchange: Exchange) -> None:
        """POST /v1/completions.  Raises ApiError, ClientGone."""
        await self._traced(exchange, "text_completion", read_completion, CompletionAnswer)

    async def message(self, exchange: Exchange) -> None:
        """POST /v1/messages.  Raises ApiError, ClientGone."""
        await self._traced(exchange, "chat", *[await fetched(place) for place in MESSAGES])

    async def response(self, exchange: Exchange) -> None:
        """POST /v1/responses.  Raises ApiError, ClientGone."""
        await self._traced(exchange, "chat", *[await fetched(place) for place in RESPONSES])

    async def _traced(
        self, exchange: Exchange, operation: str, read: Reader, kind: type[Answer]
    ) -> None:
        """Serve it, and leave a record of how that went."""
        record = Record(self._tracer, self._tracer.begin(exchange.headers), operation)
        if record.is_sampled:
            exchange.traceresponse = self._tracer.response_header(record.context)
        status = 500
        try:
            asked = await self._read(exchange, read)
            caller, num_tokens = exchange.caller, _estimate(exchange, asked)
            with self._places.taken(caller, asked.num_choices, num_tokens) as bill:
                exchange.more_headers += bill.headers
                try:
                    await self._serve(exchange, asked, kind, record)
                finally:
                    bill.num_tokens = exchange.num_input_tokens + exchange.num_output_tokens
            status = exchange.status
        except ApiError as error:
            status = exchange.status or error.status
            record.failed(error.code or "error", error.message)
            raise
        except ClientGone:
            status = CLIENT_LEFT
            record.failed("client_disconnected", "the client closed the connection")
            raise
        except BaseException as error:
            record.failed(type(error).__name__, "internal error; the server's log has the reason")
            raise
        finally:
            record.responded(status)
            self._meter.measure(record)

    def cut_off(self) -> None:
        """The server ends: what is open gets an error now, rather than a broken connection."""
        for streams in list(self._open.values()):
            _cancel(streams, Leave.FAULT, "the gateway is shutting down")

    def _num_encoders(self) -> int:
        return sum("encode" in i["roles"] for i in self._frontend.ready().instances)

    async def _read(self, exchange: Exchange, read: Reader) -> Asked:
        if self._frontend.is_full:  # refused before its body costs anything (F39)
            limits = read_time_limits(exchange.headers, self._time_limits)
            self._admit(1, limits, exchange.caller.share)
        value = await exchange.read_json(self._intake, self._limits.read_timeout_s)
        self._telemetry.body_read(exchange.age_s)
        assert exchange.body is not None
        return await exchange.body.work(read, value, self._preparer, self._limits)

    async def _serve(
        self, exchange: Exchange, asked: Asked, kind: type[Answer], record: Record
    ) -> None:
        limits = read_time_limits(exchange.headers, self._time_limits)
        asked.is_timed = limits.token_s < self._time_limits.token_s
        streams = self._admit(asked.num_choices, limits, exchange.caller.share)
        request_id: str = streams[0].request_id
        for stream in streams:
            record.watch(stream)
            stream.client_request_id = exchange.request_id.decode()
        exchange.named_here(request_id)
        exchange.on_disconnect(lambda: _cancel(streams, Leave.GONE, "client disconnected"))
        try:
            prompts = await self._start(exchange, streams, asked, record)
        except ApiError as error:
            raise asked.told(error) from None
        for prompt in prompts:
            self._telemetry.prompt_prepared(len(prompt.token_ids), len(prompt.items))
            exchange.num_input_tokens += len(prompt.token_ids)
        if record.is_sampled:
            describe_request(record, asked, prompts, self._preparer.model_name, request_id)
        facts = AnswerFacts(
            request_id,
            asked.adapter.name or self._preparer.model_name,
            int(time.time()),
            exchange.num_input_tokens,
            self._preparer.token_text,
        )
        answer = kind(facts, asked)
        exchange.failure = answer.failure
        choices = make_choices(
            streams, asked, prompts, self._preparer, tells_reasoning=answer.tells_reasoning
        )
        self._open[request_id] = streams
        try:
            write = self._write_stream if asked.stream else self._write_whole
            await write(exchange, asked, answer, choices)
            self._telemetry.answered(exchange.age_s)
        except BaseException as error:
            unfinished = [c.stream for c in choices if not c.finish_reason and not c.failed]
            _cancel(unfinished, *_told(error))
            raise
        finally:
            describe_answer(record, choices)
            exchange.num_output_tokens = sum(choice.num_tokens for choice in choices)
            del self._open[request_id]

    # --- before the first token -------------------------------------------------------------------

    def _admit(self, num_choices: int, limits: TimeLimits, who: str) -> list[GenerationStream]:
        """A place for every choice, or for none."""
        streams: list[GenerationStream] = []
        try:
            for _ in range(num_choices):
                streams.append(self._frontend.admit(limits, who))  # noqa: PERF401  # given back
        except Refused as refused:
            _cancel(streams, Leave.REFUSED, refused.message)
            code = "overloaded" if refused.status == 429 else "unavailable"
            status, message, wait_s = refused.status, refused.message, refused.retry_after_s
            raise ApiError(status, message, code=code, retry_after_s=wait_s) from None
        return streams

    async def _start(
        self, exchange: Exchange, streams: list[GenerationStream], asked: Asked, record: Record
    ) -> list[Prompt]:
        try:
            tenant = tenant_of(exchange.headers, asked.cache_salt, exchange.caller.scope)
            if asked.messages is not None:
                flags = asked.template_flags
                said = asked.messages, asked.tools, tenant, flags, asked.adapter
                prompts = [await self._preparer.chat(*said)]
            else:
                prompts = [await self._preparer.completion(one, tenant) for one in asked.prompts]
            asked.staged.check(prompts[0].items)
            if asked.truncate_prompt_tokens is not None:
                prompts = [prompt.truncated(asked.truncate_prompt_tokens) for prompt in prompts]
            limits = [asked.max_new_tokens(len(p.token_ids), self._preparer) for p in prompts]
            grammar = ""
            if (constraint := asked.grammar_source) is not None:
                grammar = await self._preparer.grammar(constraint, tenant)
            bad_words = self._preparer.bad_words(asked.bad_words)
            asked.check_choice(bad_words, self._preparer)
            if exchange.disconnected:
                raise ClientGone
            if num_pixels := sum(prompt.num_pixels for prompt in prompts):
                exchange.give_back = self._pixels.take(exchange.caller.share, num_pixels)
        except BaseException as error:
            _cancel(streams, *_told(error))
            raise
        seed = random.getrandbits(63) if asked.seed is None else asked.seed
        reports = record.is_sampled or exchange.headers.get(b"x-epd-timeline") == b"1"
        try:
            for i, stream in enumerate(streams):
                which, choice = divmod(i, asked.n)
                prompt = prompts[which]
                sampling = asked.sampling(
                    choice, seed, limits[which], self._preparer, grammar, bad_words
                )
                generation = Generation(
                    prompt.token_ids,
                    prompt.items,
                    sampling,
                    asked.user,
                    reports,
                    prompt.scope,
                    asked.staged.stage,
                    asked.staged.claim,
                    asked.staged.encoded_at,
                    asked.adapter,
                )
                self._frontend.start_generation(stream, generation)
        except BaseException as error:
            _cancel(streams, *_told(error))
            raise
        return prompts

    # --- writing ----------------------------------------------------------------------------------

    async def _write_whole(
        self, exchange: Exchange, asked: Asked, answer: Answer, choices: list[Choice]
    ) -> None:
        deltas = await self._each(choices, lambda choice: self._collect(exchange, choice))
        pairs = list(zip(choices, deltas, strict=True))
        amount = sum(whole_size(asked, choice) for choice in choices)
        body = await self._pace.tell(answer.whole, amount, pairs, _extras(exchange, asked))
        await exchange.respond(200, body)

    async def _collect(self, exchange: Exchange, choice: Choice) -> Delta:
        deltas: list[Delta] = []
        while not choice.finish_reason:
            deltas.append(choice.take(await self._updates(exchange, choice)))
        return joined(deltas)

    async def _write_stream(
        self, exchange: Exchange, asked: Asked, answer: Answer, choices: list[Choice]
    ) -> None:
        await self._each(choices, lambda choice: self._stream(exchange, asked, answer, choice))
        amount = sum(whole_size(asked, choice) for choice in choices)
        await exchange.send_events(await self._pace.tell(answer.end, amount, choices), more=False)

    async def _stream(
        self, exchange: Exchange, asked: Asked, answer: Answer, choice: Choice
    ) -> None:
        """One write per wake-up, however many tokens have come."""
        extras = _extras(exchange, asked)
        is_begun = False
        while not choice.finish_reason:
            delta = choice.take(await self._updates(exchange, choice))
            opening = b"" if is_begun else answer.opening(choice)
            is_begun = True
            is_last = bool(delta.finish_reason)  # some forms then tell all of it again
            amount = whole_size(asked, choice) if is_last else size(delta.logprobs)
            events = await self._pace.tell(answer.events, amount, choice, delta, extras)
            if opening or events:
                await exchange.send_events(opening + events)

    async def _updates(self, exchange: Exchange, choice: Choice) -> list[GenerationUpdate]:
        """Wait for news, then take a slice of it.  Raises ApiError if the generation failed."""
        stream = choice.stream
        is_first = choice.num_tokens == 0
        try:
            update: GenerationUpdate | None = await anext(aiter(stream))
        except StopAsyncIteration:
            choice.failed = True
            if exchange.disconnected:
                raise ClientGone from None
            message = "the generation was ended before its answer; try again later"
            raise ApiError(503, message, code="unavailable") from None
        updates, amount = [], 0
        while update is not None:
            if update.error is not None:
                choice.failed = True
                raise self._failure(update.error)
            updates.append(update)
            amount += size(update.logprobs) or len(update.token_ids)
            update = stream.next_ready() if amount < SLICE else None
        if is_first and choice.index == 0 and any(u.token_ids for u in updates):
            exchange.give_back()
            self._telemetry.first_token(exchange.age_s)
            choice.first_token_s = time.time()
        return updates

    def _failure(self, error: GenerationError) -> ApiError:
        status, message, wait_s = error.status, error.message, error.retry_after_s
        return ApiError(status, message, code=error.kind, retry_after_s=wait_s)

    async def _each(
        self, choices: list[Choice], read: Callable[[Choice], Coroutine[object, object, T]]
    ) -> list[T]:
        """Read all choices side by side; the first failure is raised at once.

        The readers of the others are left behind: their streams are cancelled by the caller, which
        ends them.
        """
        if len(choices) == 1:
            return [await read(choices[0])]
        readers = [asyncio.create_task(read(choice)) for choice in choices]
        try:
            await asyncio.wait(readers, return_when=asyncio.FIRST_EXCEPTION)
            for reader in readers:
                if reader.done():
                    reader.result()
            return [reader.result() for reader in readers]
        finally:
            self._readers.update(reader for reader in readers if not reader.done())
            for reader in readers:
                reader.add_done_callback(self._reader_ended)

    def _reader_ended(self, reader: asyncio.Task[object]) -> None:
        """Look at the outcome: of a reader left behind nobody else does."""
        self._readers.discard(reader)
        if not reader.cancelled():
            reader.exception()


def _estimate(exchange: Exchange, asked: Asked) -> int:
    """Tokens of prompt and answers, before the prompt is made."""
    assert exchange.body is not None
    num_text = exchange.body.text_nbytes // NBYTES_PER_TOKEN
    return num_text + (asked.max_tokens or 0) * asked.num_choices


def _cancel(streams: Sequence[GenerationStream], why: Leave, reason: str) -> None:
    for stream in streams:
        stream.cancel(why, reason)


def _told(error: BaseException) -> tuple[Leave, str]:
    """Whose doing it was that the client got this instead of an answer."""
    if isinstance(error, ClientGone):
        return Leave.GONE, "client disconnected"
    if isinstance(error, ApiError) and error.status < 500:
        return Leave.REFUSED, error.message
    return Leave.FAULT, error.message if isinstance(error, ApiError) else repr(error)


def _extras(exchange: Exchange, asked: Asked) -> Extras:
    """What the client asked for besides the answer: by headers, or for its next stage."""
    headers = exchange.headers
    return Extras(
        timeline=headers.get(b"x-epd-timeline") == b"1",
        transfer_params=bool(asked.staged.stage) or headers.get(b"x-epd-transfer-params") == b"1",
        began_s=time.time() - exchange.age_s,
    )
