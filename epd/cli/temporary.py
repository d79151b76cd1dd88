"""The server that a command talks to: one that runs already, or a temporary cluster of its own."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Awaitable, Callable

from epd.cli import options
from epd.cli.boundary import INTERRUPTED
from epd.cli.parser import UsageError
from epd.cli.plan import Plan, plan_topology
from epd.cli.ports import settle_port
from epd.cli.supervisor import running


def server_of(args: argparse.Namespace) -> Plan | str:
    """The plan of a temporary server, or the base URL of a running one.

    Raises what `plan_topology` raises: nothing has been started then.
    """
    if args.url and args.topology:
        raise UsageError("--topology is for a temporary server; with --url one runs already")
    if args.url:
        return check_url(args.url)
    settings = settle_port(options.settings_of(args), wanted=args.port)
    log = options.log_of(args, "warning")
    return plan_topology(args.topology or "1e1p1d", settings, options.placing_of(args), log)


def check_url(url: str) -> str:
    """The base URL without a trailing slash and without /v1.  Raises UsageError."""
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(f"--url {url}: write http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")


def base_url_of(plan: Plan) -> str:
    assert plan.gateway is not None
    return f"http://{plan.gateway.host}:{plan.gateway.port}"


def with_server(server: Plan | str, work: Callable[[str], Awaitable[int]]) -> int:
    """Run `work(base_url)` against it; Ctrl-C and SIGTERM end both, in order."""

    async def live() -> int:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        if isinstance(server, str):
            return await work(server)
        async with running(server):
            return await work(base_url_of(server))

    try:
        return asyncio.run(live())
    except asyncio.CancelledError:
        return INTERRUPTED
