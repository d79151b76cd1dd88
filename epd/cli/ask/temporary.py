"""The server that a command talks to: one that runs already, or a temporary cluster of its own."""

from __future__ import annotations

import argparse
import asyncio
import signal
import ssl
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from epd.cli.ask import tls
from epd.cli.ask.client import Client, connected
from epd.cli.configure import options
from epd.cli.configure.settings import api_keys, keys_of_environment
from epd.cli.parser import UsageError
from epd.cli.start.plan import StartPlan, plan_topology
from epd.cli.start.ports import settle_port
from epd.cli.start.supervisor import running
from epd.errors import INTERRUPTED
from epd.runtime.worker import on_hang_up


class Running(NamedTuple):
    """Where a server is asked, and with which key; empty: without one."""

    base_url: str
    api_key: str = ""
    trusted: ssl.SSLContext | None = None  # by whom its certificate may be signed


def server_of(args: argparse.Namespace) -> StartPlan | Running:
    """The plan of a temporary server, or one that runs already.

    Raises what `plan_topology` raises: nothing has been started then.
    """
    if args.url and args.topology:
        raise UsageError("--topology is for a temporary server; with --url one runs already")
    settings = options.settings_of(args)
    if args.url:
        return _running(args, next(iter(api_keys(settings)), ""))
    if args.cacert:
        raise UsageError("--cacert is for a running server: give its --url, too")
    settings = settle_port(settings, wanted=args.port)
    log = options.log_of(args, "warning")
    return plan_topology(args.topology or "1e1p1d", settings, options.placing_of(args), log)


def running_of(args: argparse.Namespace) -> Running:
    """Of a verb that only looks.  Raises UsageError."""
    return _running(args, args.api_key or next(iter(keys_of_environment()), ""))


def _running(args: argparse.Namespace, api_key: str) -> Running:
    url = check_url(args.url)
    is_tls = url.startswith("https") or args.cacert  # whose file may be wrong
    return Running(url, api_key, tls.trusting(args.cacert) if is_tls else None)


def check_url(url: str) -> str:
    """The base URL without a trailing slash and without /v1.  Raises UsageError."""
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(f"--url {url}: write http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")


def with_server(server: StartPlan | Running, work: Callable[[Client], Awaitable[int]]) -> int:
    """Run `work` with a client of it; Ctrl-C and SIGTERM end both, in order."""

    async def live() -> int:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        on_hang_up(task.cancel)
        if isinstance(server, Running):
            async with connected(*server) as client:
                return await work(client)
        assert server.gateway is not None
        access = server.gateway.access
        key, own = next(iter(access.api_keys), ""), access.ssl_certfile
        trusted = tls.pinned(own) if own else None
        async with running(server), connected(server.gateway.base_url, key, trusted) as client:
            return await work(client)

    try:
        return asyncio.run(live())
    except asyncio.CancelledError:
        return INTERRUPTED
