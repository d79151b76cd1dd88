"""Clients: they ask at their times, read what comes, some hang up; what they saw is the record."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from epd.frontend import NO_ADAPTER, GenerationError, GenerationUpdate, Leave, Refused
from epd.messages import TokenLogprobs
from epd.roles.compose import Gateway
from epd.roles.gateway.stream import Stream
from epd_lab.sim.cluster import Cluster
from epd_lab.sim.lives import Node
from epd_lab.sim.workload import Ask


@dataclass(slots=True)
class Record:
    """What one client saw."""

    ask: Ask
    request_id: str = ""
    asked_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0  # when the last token came
    gap_s: float = 0.0  # the longest time between two tokens
    ended_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    staged: list[int] = field(default_factory=list)  # tokens of the stages before
    finish_reason: str = ""
    error: GenerationError | None = None
    refused: str = ""
    num_refused: int = 0  # times, before its answer
    hung_up: bool = False
    has_enough: bool = False  # it read its stop word, and left
    gateway: str = ""  # the life of the one that it has asked
    gateway_died: bool = False
    num_answers: int = 0  # terminal ones; must end as 1

    @property
    def ended(self) -> bool:
        return self.ended_s > 0

    def outcome(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        if self.error is not None:
            return f"{self.error.kind}: {self.error.message}"
        if self.hung_up:
            return "hung up"
        if self.has_enough:
            return "has enough"
        if self.gateway_died:
            return "the gateway died"
        return self.finish_reason or "no answer"


class Clients:
    """All clients of a run."""

    def __init__(self, cluster: Cluster, asks: tuple[Ask, ...]) -> None:
        self._cluster = cluster
        self._loop = cluster.world.loop
        self.records: list[Record] = []
        self.ask_all(asks)
        cluster.world.on_death.append(lambda process: self._died(process.name))

    @property
    def all_ended(self) -> bool:
        records = self.records  # the last one first: it is the likeliest to be open
        return not records or (records[-1].ended and all(record.ended for record in records))

    def ask_all(self, asks: Iterable[Ask]) -> None:
        """Each at its time."""
        for ask in asks:
            record = Record(ask)
            self.records.append(record)
            self._loop.call_at(ask.at_s, self._ask, record)

    def add(self, ask: Ask) -> Record:
        record = Record(ask)
        self.records.append(record)
        self._ask(record)
        return record

    def _ask(self, record: Record) -> None:
        self._loop.marks.setdefault("first ask", self._loop.steps)
        record.asked_s = self._loop.now_s
        node = self._gateway_of(record)
        if node is None:
            record.refused, record.ended_s = "the gateway is down", self._loop.now_s
            record.num_answers = 1
            return
        record.gateway = node.process.name
        self._loop.create_task(
            self._read(record, node),
            name=f"client {record.ask.index}",
            context=node.process.context,
        )

    def _comes_back(self, record: Record, refused: Refused | GenerationError) -> bool:
        """Whether it does, in so many seconds as it was given."""
        record.num_refused += 1
        self._cluster.world.fired["refused_with_a_time"] += 1
        if refused.status != 429 or record.num_refused > record.ask.num_returns:
            return False
        record.error, record.num_answers = None, 0
        self._loop.call_at(self._loop.now_s + refused.retry_after_s, self._ask, record)
        return True

    def _gateway_of(self, record: Record) -> Node | None:
        """Clients take turns over the gateways, and turn to the next one where one is down."""
        names = self._cluster.gateways
        first = record.ask.index % len(names)
        nodes = map(self._cluster.node, (*names[first:], *names[:first]))
        return next((node for node in nodes if node is not None), None)

    async def _read(self, record: Record, node: Node) -> None:
        assert node.gateway is not None
        record.asked_s = self._loop.now_s
        claim = ""
        for stage in record.ask.stages():
            asked = self._named(record, node.gateway).generation(stage, claim)
            try:
                stream = node.gateway.role.submit(asked, record.ask.limits)
            except Refused as refused:
                if self._comes_back(record, refused):
                    return
                record.refused, record.ended_s = refused.message, self._loop.now_s
                record.num_answers += 1
                return
            record.request_id = stream.request_id
            self._cluster.world.trace("ask", record.ask.index, stream.request_id, stage)
            if not stage:
                await self._read_answer(record, stream)
                self._note_patience(record)
                error = record.error
                if error is not None and error.status == 429 and self._comes_back(record, error):
                    return
            elif await self._read_stage(record, stream):
                claim = str(stream.transfer_params().kv.get("remote_request_id", ""))
            else:
                break
        if not record.num_answers:  # it leaves between two stages
            record.hung_up = True
            record.num_answers += 1
        record.ended_s = self._loop.now_s
        if "all answered" not in self._loop.marks and self.all_ended:
            self._loop.marks["all answered"] = self._loop.steps
        self._cluster.world.trace("answer", record.ask.index, record.outcome())

    def _named(self, record: Record, gateway: Gateway) -> Ask:
        """Of adapters that come and go, a client names one that is a model now, or the model."""
        if (desk := gateway.adapters) is not None and not record.request_id:
            named = desk.offered.get(record.ask.adapter.name, NO_ADAPTER)
            record.ask = replace(record.ask, adapter=named)
        return record.ask

    async def _read_answer(self, record: Record, stream: Stream) -> None:
        if hang_up_s := record.ask.cancel_after_s:
            await self._read_until(record, stream, hang_up_s)
        else:
            await self._read_all(record, stream)

    async def _read_all(self, record: Record, stream: Stream) -> None:
        """To the end, or to its stop word."""
        async for update in stream:
            self._take(record, update)
            if record.ask.stop_word in update.token_ids and not record.num_answers:
                record.has_enough = True
                record.num_answers += 1
                stream.cancel(Leave.ENOUGH, "stop string")
                break  # what else has come is not read

    def _note_patience(self, record: Record) -> None:
        """An answer took longer than its client waits for a single token."""
        limits = record.ask.limits
        outlasted = limits is not None and record.last_s - record.first_s > limits.first_token_s
        self._cluster.world.fired["outlasted_its_patience"] += outlasted

    async def _read_stage(self, record: Record, stream: Stream) -> bool:
        """Whether it went well."""
        async for update in stream:
            record.staged += update.token_ids
            if update.error is not None:
                record.error = update.error
                record.num_answers += 1
        return record.error is None

    async def _read_until(self, record: Record, stream: Stream, hang_up_s: float) -> None:
        """For so long; then the client hangs up."""
        try:
            async with asyncio.timeout(hang_up_s):
                await self._read_all(record, stream)
        except TimeoutError:
            if not record.num_answers:
                record.hung_up = True
                record.num_answers += 1
                stream.cancel(Leave.GONE, "the client hung up")

    def _take(self, record: Record, update: GenerationUpdate) -> None:
        now_s = self._loop.now_s
        if update.token_ids and not record.tokens:
            record.first_s = record.last_s = now_s
        if update.token_ids:
            record.gap_s = max(record.gap_s, now_s - record.last_s)
            record.last_s = now_s
        record.tokens.extend(update.token_ids)
        record.logprobs.extend(update.logprobs)
        if update.error is not None or update.finish_reason:
            record.error, record.finish_reason = update.error, update.finish_reason
            record.num_answers += 1

    def _died(self, life: str) -> None:
        """A client whose gateway dies sees its connection break."""
        for record in self.records:
            if record.gateway == life and not record.ended:
                record.gateway_died, record.ended_s = True, self._loop.now_s
                record.num_answers += 1
