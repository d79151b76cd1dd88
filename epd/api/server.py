"""The HTTP front: raw ASGI on uvicorn's protocol, inside the event loop of the gateway.

uvicorn gives the parser and the connection; its `Server` is left out, because it takes the signals
and wakes ten times a second.  Raw ASGI rather than a framework: routing is one dict, and a
framework would cost more per streamed token than everything else here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import msgspec
from uvicorn.config import Config
from uvicorn.server import ServerState

from epd import __version__
from epd.api.anthropic.errors import error_body as anthropic_error
from epd.api.completions import Completions
from epd.api.http.access import Access, warning
from epd.api.http.body import Intake
from epd.api.http.connection import BACKLOG, KEEP_ALIVE_S, Connection, cannot_listen
from epd.api.http.errors import ApiError, retry_after
from epd.api.http.exchange import ClientGone, Exchange, Receive, Scope, Send
from epd.api.http.idempotency import Handler, Idempotency
from epd.api.http.rarely import Rarely, fetched
from epd.api.http.unknown import Unknown
from epd.api.openai.validation import check_model
from epd.api.prompts.prepare import Preparer
from epd.api.watching.metering import NO_METER
from epd.api.watching.metrics import CONTENT_TYPE, exposition, with_vllm_names
from epd.api.watching.telemetry import Telemetry
from epd.api.watching.tracing import Tracer
from epd.config import ConfigError, GatewayConfig, Limits
from epd.frontend import Frontend, JsonObject, TimeLimits
from epd.later import later

if TYPE_CHECKING:
    from epd.api.http.reloading import Reloading

GRACE_S = 2.0  # for answers that are being written when the server closes
ABORT_S = 1.0  # for generations to end early, then for handlers to see their connection gone

ADAPTERS = {"/v1/load_lora_adapter": "load", "/v1/unload_lora_adapter": "unload"}
log = logging.getLogger(__name__)
note_in_audit = later("epd.api.http.audit:note")


class ApiServer:
    """Serves the API of one gateway.  Start, then close; not to be started again."""

    def __init__(
        self, frontend: Frontend, config: GatewayConfig, preparer: Preparer | None = None
    ) -> None:
        self._frontend = frontend
        self._config = config
        self._preparer = preparer
        self._state = ServerState()
        self._listener: asyncio.Server | None = None
        self._is_draining = False
        self._completions: Completions | None = None
        self._created_s = int(time.time())
        self._started_s = time.monotonic()
        self._telemetry = Telemetry(config.expected_instances, self._created_s)
        self._tracer = Tracer()
        self._meter = NO_METER
        self._intake: Intake | None = None
        self._idempotency: Idempotency | None = None
        self._access = Access(config.access)
        self._reloading: Reloading | None = None
        if config.access.has_files:
            from epd.api.http.reloading import Reloading

            self._reloading = Reloading(self._access, config.access)
        self._routes: dict[str, dict[str, Handler]] = {}
        self._document = b""  # /openapi.json, once somebody has asked
        self.port = config.port  # once started: the one that is listened on, if this is 0

    async def start(self) -> None:
        """Load what the model's prompts need and listen.  Raises ConfigError, ModelError."""
        if self._config.otlp_traces_endpoint:
            from epd.api.watching.otel import build_tracer

            self._tracer = build_tracer(self._config.otlp_traces_endpoint)
        if self._preparer is None:
            # in a thread: a large tokenizer takes a second, and instances are joining meanwhile
            self._preparer = await asyncio.to_thread(Preparer, self._config)
        if (desk := self._frontend.adapters) is not None:
            desk.begin(self._preparer.adapters)
            self._preparer.adapters = desk.offered
        if self._config.otlp_metrics_endpoint:
            from epd.api.watching.otel_metrics import build_meter

            self._meter = build_meter(self._config.otlp_metrics_endpoint, self._preparer.model_name)
        self._routes = self._make_routes(self._preparer)
        uvicorn_config = Config(
            self,
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        uvicorn_config.load()
        limits = self._config.limits
        context = await self._reloading.begin() if self._reloading else None
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: Connection(
                    uvicorn_config, self._state, limits.read_timeout_s, limits.write_timeout_s
                ),
                self._config.host,
                self._config.port,
                backlog=BACKLOG,
                ssl=context,
                ssl_handshake_timeout=limits.read_timeout_s if context else None,
            )
        except OSError as error:
            raise ConfigError(cannot_listen(self._config, error)) from error
        self.port = self._listener.sockets[0].getsockname()[1]
        if open_to_all := warning(self._config.host, self._config.access):
            log.warning(open_to_all)

    def drain(self) -> None:
        """Refuse new work, also of new connections: a refusal has a reason, a closed port none."""
        self._is_draining = True

    async def close(self) -> None:
        """Let answers leave, for a moment; then end what is open, and drop every connection.

        Idempotent, and bounded by about `GRACE_S` and twice `ABORT_S`.
        """
        self.drain()
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        await self._handlers_end(GRACE_S)
        if self._completions is not None:
            self._completions.cut_off()
        await self._handlers_end(ABORT_S)
        for connection in list(self._state.connections):
            connection.transport.abort()
        await self._handlers_end(ABORT_S)
        if self._preparer is not None:
            await self._preparer.close()
        if self._intake is not None:
            self._intake.close()
        if self._idempotency is not None:
            await self._idempotency.close()
        if self._reloading is not None:
            self._reloading.close()
        await asyncio.gather(self._tracer.close(), self._meter.close())

    async def _handlers_end(self, timeout_s: float) -> None:
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=timeout_s)

    # --- one request ------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        exchange = Exchange(scope, receive, send)
        exchange.more_headers = self._access.cross_origin(exchange)
        if exchange.path.startswith("/v1/messages"):
            exchange.error_body = anthropic_error
        await self._answered(exchange, self._handle)

    async def _handle(self, exchange: Exchange) -> None:
        exchange.read_request_id()
        self._access.check(exchange)
        await self._route(exchange)(exchange)

    async def _answered(self, exchange: Exchange, handler: Handler) -> None:
        """Every outcome becomes an answer here, and the server lives on."""
        try:
            await handler(exchange)
        except ClientGone:
            log.debug("%s: the client left", exchange)
        except ApiError as error:
            await _fail(exchange, error)
        except asyncio.CancelledError:
            # Only the end of the loop cancels handlers, after `close` dropped their connections.
            if not self._is_draining:
                raise
            log.debug("%s: cut off by the end", exchange)
        except Exception:
            log.exception("%s failed", exchange)
            message = "internal error; the server's log has the reason"
            await _fail(exchange, ApiError(500, message, code="internal_error"))
        finally:
            exchange.close()
            if exchange.is_counted:
                self._count(exchange)

    def _count(self, exchange: Exchange) -> None:
        path = exchange.path if exchange.path in self._routes else "other"
        self._telemetry.responded(path, exchange.status)
        if (how := self._config.access.audit_log) != "off":
            note_in_audit(exchange, path, with_address=how == "addresses")

    def _route(self, exchange: Exchange) -> Handler:
        methods = self._routes.get(exchange.path)
        below, _, name = exchange.path.partition("/v1/models/")
        if methods is None and name and not below:
            methods = {"GET": self._one_model}
        if methods is None:
            known = ", ".join(sorted(self._routes))
            hint = "; it takes --lora-runtime-dir" if exchange.path in ADAPTERS else ""
            raise ApiError(404, f"no such path {exchange.path[:200]}{hint}; there are {known}")
        if exchange.method == "OPTIONS":
            return self._options
        method = "GET" if exchange.method == "HEAD" else exchange.method
        handler = methods.get(method)
        if handler is None:
            allowed = ", ".join(methods)
            message = f"{exchange.path} takes {allowed}, not {exchange.method}"
            headers = [(b"allow", allowed.encode())]
            raise ApiError(405, message, code="method_not_allowed", headers=headers)
        if method == "POST" and self._is_draining:
            message = "the gateway is shutting down and takes no new requests"
            raise ApiError(503, message, code="unavailable", headers=[(b"connection", b"close")])
        return handler

    def _make_routes(self, preparer: Preparer) -> dict[str, dict[str, Handler]]:
        limits = self._config.limits
        time_limits = TimeLimits.of(self._config.timing)
        self._intake = Intake(limits, preparer.max_context, _unknown(limits))
        completions = Completions(
            self._frontend,
            preparer,
            self._intake,
            time_limits,
            self._telemetry,
            self._tracer,
            self._meter,
            lambda: self._access.num_keys,
        )
        self._completions = completions
        tasks, own_port = self._state.tasks, lambda: self.port
        idempotency = Idempotency(self._config, self._intake, self._answered, tasks, own_port)
        self._idempotency, once = idempotency, idempotency.once
        facts = self._frontend, self._config, preparer.model_name, self._started_s
        cluster = Rarely("epd.api.watching.cluster:ClusterWatch", *facts)
        tokenizing = Rarely("epd.api.tokenizing:Tokenizing", preparer, self._intake)
        desk = self._frontend.adapters
        verbs = Rarely("epd.api.adapters:AdapterVerbs", desk, self._config, preparer, self._intake)
        drains = Rarely("epd.api.drain:DrainVerb", self._frontend, self._config, self._intake)
        adapters = {path: {"POST": verbs.handler(name)} for path, name in ADAPTERS.items()}
        profiling: dict[str, dict[str, Handler]] = {
            "/start_profile": {"POST": lambda exchange: self._profile(exchange, starts=True)},
            "/stop_profile": {"POST": lambda exchange: self._profile(exchange, starts=False)},
        }
        more = (profiling if self._config.profile_dir else {}) | (adapters if desk else {})
        if self._reloading and not warning(self._config.host, self._config.access):
            more |= {"/reload": {"POST": self._reloading.reload}}
        return more | {
            "/v1/chat/completions": {"POST": once(completions.chat)},
            "/encode/v1/chat/completions": {"POST": once(completions.encode)},
            "/encode/v1/models": {"GET": self._models},
            "/encode/health": {"GET": self._health},
            "/v1/completions": {"POST": once(completions.completion)},
            "/v1/messages": {"POST": once(completions.message)},
            "/v1/responses": {"POST": once(completions.response)},
            "/v1/messages/count_tokens": {"POST": tokenizing.handler("count")},
            "/v1/models": {"GET": self._models},
            "/tokenize": {"POST": tokenizing.handler("tokenize")},
            "/detokenize": {"POST": tokenizing.handler("detokenize")},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._metrics},
            "/state": {"GET": cluster.handler("state")},
            "/drain": {"POST": drains.handler("ask")},
            "/role": {"POST": drains.handler("ask_role")},
            "/ui": {"GET": cluster.handler("page")},
            "/version": {"GET": self._version},
            "/openapi.json": {"GET": self._openapi},
            "/docs": {"GET": self._docs},
            "/": {"GET": self._home},
            "/ping": {"GET": self._health, "POST": self._health},
        }

    # --- small answers ----------------------------------------------------------------------------

    def _model(self, name: str) -> JsonObject:
        assert self._preparer is not None
        adapter = self._preparer.adapters.get(name)
        parent: JsonObject = {"parent": self._preparer.model_name} if adapter else {}
        return parent | {
            "id": name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "epd",
            "root": adapter.digest if adapter else self._preparer.model_name,
            "max_model_len": self._preparer.max_context,
        }

    async def _options(self, exchange: Exchange) -> None:
        """What a browser asks before it lets a page ask."""
        methods = self._routes.get(exchange.path, {"GET": self._one_model})
        allowed = ", ".join([*methods, "OPTIONS"]).encode()
        await exchange.respond(200, b"", b"text/plain", [(b"allow", allowed)])

    async def _models(self, exchange: Exchange) -> None:
        assert self._preparer is not None
        names = *self._preparer.served_names, *self._preparer.adapters
        data = [self._model(name) for name in names]
        await exchange.respond_json(200, {"object": "list", "data": data})

    async def _one_model(self, exchange: Exchange) -> None:
        assert self._preparer is not None
        name = exchange.path.removeprefix("/v1/models/")
        check_model(name, self._preparer)
        await exchange.respond_json(200, self._model(name))

    async def _health(self, exchange: Exchange) -> None:
        """Live: the loop turns; with `health_when_ready` also that a request would be served."""
        if self._config.health_when_ready:
            await self._ready(exchange)
        else:
            await exchange.respond_json(200, {"status": "ok"})

    async def _ready(self, exchange: Exchange) -> None:
        """Whether a request would find its instances now."""
        readiness = self._frontend.ready()
        ok = readiness.ok and not self._is_draining
        reason = "shutting down" if self._is_draining else readiness.reason
        value = {"ready": ok, "reason": reason, "stages": readiness.stages}
        value["instances"] = readiness.instances
        if ok:
            await exchange.respond_json(200, value)
        else:
            await exchange.respond_json(503, value, [retry_after()])

    async def _metrics(self, exchange: Exchange) -> None:
        assert self._intake is not None
        assert self._preparer is not None
        samples = [*self._frontend.metrics(), *self._telemetry.samples(), *self._tracer.samples()]
        samples += [*self._intake.samples(), *self._preparer.samples()]
        samples += self._reloading.samples() if self._reloading else ()
        if self._config.metrics_names == "vllm":
            samples = [*with_vllm_names(samples, self._preparer.model_name)]
        await exchange.respond(200, exposition(samples), CONTENT_TYPE)

    async def _profile(self, exchange: Exchange, *, starts: bool) -> None:
        """What each instance made of it; 500 if one could not."""
        told = await self._frontend.profile(starts=starts)
        value = {name: {"ok": ok, "detail": detail} for name, (ok, detail) in told.items()}
        status = 200 if all(ok for ok, _ in told.values()) else 500
        await exchange.respond_json(status, {"instances": value})

    async def _version(self, exchange: Exchange) -> None:
        await exchange.respond_json(200, {"version": __version__})

    # --- pages ------------------------------------------------------------------------------------

    async def _openapi(self, exchange: Exchange) -> None:
        assert self._preparer is not None
        if (
            not self._document or self._frontend.adapters is not None
        ):  # of no interest to most, and 30 ms of work
            document = await fetched("epd.api.document.openapi:document")
            told = await asyncio.to_thread(document, self._preparer, self._config.limits)
            self._document = msgspec.json.encode(told)
        await exchange.respond(200, self._document)

    async def _docs(self, exchange: Exchange) -> None:
        web = await fetched("epd.api.web")
        await exchange.respond(200, web.docs_page(), web.CONTENT_TYPE, list(web.HEADERS))

    async def _home(self, exchange: Exchange) -> None:
        assert self._preparer is not None
        host = exchange.headers.get(b"host", b"").decode("latin-1") or f"127.0.0.1:{self.port}"
        web = await fetched("epd.api.web")
        page = web.home_page(
            self._preparer,
            self._frontend.ready(),
            f"{exchange.scheme}://{host}",
            needs_key=self._access.asks,
        )
        await exchange.respond(200, page, web.CONTENT_TYPE, list(web.HEADERS))


def _unknown(limits: Limits) -> Unknown:
    if limits.unknown_parameters != "warn":
        return Unknown()
    from epd.api.document.schemas import KNOWN

    return Unknown(KNOWN)


async def _fail(exchange: Exchange, error: ApiError) -> None:
    if exchange.started:
        await exchange.fail_events(error)
    else:
        await exchange.respond_error(error)
