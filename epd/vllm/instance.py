"""A vLLM server as an instance of prefill and decode: its roles, on a thread of the engine's own.

The instance joins gateways as any other does, gets rows from encoders into its receive pool, and
has its lives by `serve_instance`.  It computes with the vLLM server whose process it lives in. It
asks that by HTTP, and the rows lie on the shelf, where the connector finds them.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import msgspec

from epd.config import ConfigError, InstanceConfig
from epd.engine.base import LanguageEngine, MediaLayout, RopePositions
from epd.errors import explain
from epd.groups.asks import OtherRanks
from epd.roles.compose import Engines, Instance
from epd.roles.decode.role import DecodeRole
from epd.roles.prefill.role import LeavingKv
from epd.roles.steps.absent import WithoutDecode, WithoutPrefill
from epd.runtime.worker import EXIT_DRAINED, EXIT_EXPELLED, Ending, serve_instance
from epd.vllm.requests import PrefillHere, ServerRequests, ShelvedRows
from epd.vllm.server import EngineServer
from epd.vllm.shelf import Shelf
from epd.vllm.tickets import NUM_TICKETS, TicketProducer, TicketRequests, WithoutKv

if TYPE_CHECKING:
    from epd.messages import KvLayout, RowContract
    from epd.roles.steps.requests import Requests

RETRY_S = 5.0  # between lives of an instance that a gateway refused
LOOK_S = 0.5  # for a server that is starting
JOIN_S = 5.0  # for the thread's end
GRID_FAMILIES = "epd.families.qwen"  # vLLM needs `image_grid_thw` of a picture, and no more
ALL_ROWS = 1 << 30  # tokens that may be computed before the images are here: vLLM waits for all

logger = logging.getLogger(__name__)


@dataclass
class ServerEngine:
    """What the roles here ask of a `LanguageEngine`; the rest of that is vLLM's own business."""

    row_contract: RowContract
    max_context: int
    shelf: Shelf
    server: EngineServer
    kv_layout: KvLayout | None = None  # that of tickets, if KV may leave the server or come there
    adapters: tuple[str, ...] = ()
    num_blocks: int = 0
    num_landing_blocks: int = NUM_TICKETS
    kv_in_place: bool = True
    kv_memory: None = None

    def attach_kv(self, memory: memoryview) -> None:
        """Tickets are read where they land."""

    def rope_positions(self, num_tokens: int, items: Sequence[MediaLayout]) -> RopePositions:
        """vLLM has its own."""
        return RopePositions(None)


class ServerInstance(Instance):
    def _add_language(self, engine: LanguageEngine, ranks: OtherRanks | None) -> None:
        own = cast("ServerEngine", engine)
        actor, config = self.actor, self.config
        made = actor, engine, config.timing, own.server, own.max_context
        attempts: ServerRequests
        kv: LeavingKv
        if own.kv_layout is not None:
            attempts = shared = TicketRequests(*made)
            kv = TicketProducer(actor, self.outgoing, shared)
            if "decode" in config.roles:
                its = cast("Requests", shared)
                self.decode = DecodeRole(actor, self.incoming, its, config.decode)
            else:
                attempts.extend(WithoutDecode(actor))
        else:
            attempts = ServerRequests(*made)
            kv = without = WithoutKv(actor)
            attempts.extend(without)
        if "prefill" in config.roles:
            self._add_prefill(own, attempts, kv)
        else:
            attempts.extend(WithoutPrefill(actor))

    def _add_prefill(self, own: ServerEngine, attempts: ServerRequests, kv: LeavingKv) -> None:
        actor, config = self.actor, self.config
        own.shelf.clear()
        self.embeddings = rows = ShelvedRows(
            actor,
            self.incoming,
            own.row_contract,
            config.prefill,
            config.timing,
            self.links.is_given_up,
            lambda landed: landed,
        )
        rows.shelf = own.shelf
        late = msgspec.structs.replace(config.prefill, min_early_tokens=ALL_ROWS)
        self.prefill = PrefillHere(actor, kv, self.incoming, attempts, rows, late)


def plan(flags: str, model: str, dtype: str) -> InstanceConfig:
    """The configuration of an instance, by the flags of `epd run`, whose `--role` may be another.
    Raises ConfigError, ModelError, TransportError or UsageError."""
    from epd.cli.main import parser_of
    from epd.cli.verbs.run import make_plan

    given = ["--role", "prefill+decode", "--model", model, "--dtype", dtype, *shlex.split(flags)]
    with ExitStack() as held:
        (config,) = make_plan(parser_of("run").parse(given), held).instances
    return config


def contract_of(config: InstanceConfig) -> RowContract:
    """Of rows as this model's encoders make them.  Raises ModelError."""
    from epd.engine.adapter import adapter_for
    from epd.engine.weights.loading import DTYPES
    from epd.families.registry import ADAPTERS
    from epd.model_files.checkpoint import ModelError, read_checkpoint

    adapter = adapter_for(checkpoint := read_checkpoint(config.model_dir, weights=False))
    if not (adapter.has_vision and ADAPTERS[checkpoint.model_type].startswith(GRID_FAMILIES)):
        raise ModelError(
            f"{config.model_dir} is a {checkpoint.model_type!r} model; rows go to vLLM for models "
            "whose pictures are described by a grid alone: Qwen2-VL and its descendants"
        )
    return adapter.row_contract(DTYPES[config.engine.dtype])


class InstanceThread:
    """Begins when it is made; ends with `close`, or with its process."""

    def __init__(self, config: InstanceConfig, engine: ServerEngine) -> None:
        self._config, self._engine = config, engine
        self._is_closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = Ending()
        self._thread = threading.Thread(target=self._run, name="epd", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing = True
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(lambda: self._ending.at_once(0))
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = self._engine.server
        await server.open()
        try:
            await self._until_up()
            goes_on = True
            while goes_on and not self._is_closing:
                self._ending = Ending()
                goes_on = await self._live() not in {EXIT_EXPELLED, EXIT_DRAINED}
                if not self._is_closing:
                    await asyncio.sleep(RETRY_S)
        finally:
            await server.close()

    async def _until_up(self) -> None:
        """The API server starts behind the engine, in whose process this is."""
        while not self._is_closing:
            try:
                await self._engine.server.probe()
            except (OSError, TimeoutError):
                await asyncio.sleep(LOOK_S)
            else:
                return

    async def _live(self) -> int:
        """Its exit status.  After `EXIT_EXPELLED` bytes may still move, which only the end of the
        process ends: no other life may begin in it."""
        from epd.model_files.fingerprint import model_fingerprint

        config, engine = self._config, self._engine

        async def rest() -> bool:
            return True  # what a life has asked the server ends with its connections

        async def anew(asked: InstanceConfig) -> Engines:
            if asked.roles != config.roles:
                raise ConfigError("a vLLM server has the roles of its command: start it anew")
            return engines

        engines = Engines(
            anew=anew,
            language=cast("LanguageEngine", engine),
            probe=partial(engine.server.test, lambda: engine.shelf.num_steps),
            rest=rest,
            kind=ServerInstance,
        )
        fingerprint = model_fingerprint(config.model_dir, config.engine.quantization)
        try:
            status = await serve_instance(config, engines, fingerprint, self._ending, _tell)
        except Exception as error:
            logger.warning("the instance beside vLLM ended: %s", explain(error)[1])
            return 1
        if status == EXIT_EXPELLED:
            logger.error("the instance beside vLLM has left for good: restart this vLLM server")
        elif status == EXIT_DRAINED:
            logger.warning("the instance beside vLLM was taken out: restart this server to join")
        return status


def _tell(state: str, detail: str) -> None:
    at = logging.WARNING if state in {"refused", "expelled", "device lost"} else logging.INFO
    logger.log(at, "%s %s", state, detail)
