"""`epd snapshot`: what a running cluster does now, as one file that any browser opens."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from epd.cli.configure import options

if TYPE_CHECKING:
    from epd.api.watching.cluster_view import ClusterView
    from epd.cli.ask.client import Client

DESCRIPTION = """
Print the page at /ui with what it would show now inside: every process, the counts of all states,
what flowed during a second, and the stories of the oldest machines. The file needs no server and no
network: send it with a bug report. It names requests and processes, and holds no prompt, image or
answer.
"""

EXAMPLES = (("epd snapshot > cluster.html", "the server on this host"),)

BETWEEN_S = 1.0
MAX_MACHINES = "200"  # of each table and process
MAX_REQUESTS = 20  # whose machines are kept also when they are over


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_running_flags(parser)


def run(args: argparse.Namespace) -> int:
    import asyncio
    import time

    from epd.api.watching.cluster_view import KeptAnswer, KeptAnswers
    from epd.api.web import cluster_file
    from epd.cli.ask.temporary import running_of, with_server

    running = running_of(args)

    async def look(client: Client, *, whole: bool) -> KeptAnswer:
        at_ms = time.time() * 1000
        told = await client.state({})
        if whole:
            await _add_stories(client, told)
        return KeptAnswer(at_ms=at_ms, told=told)

    async def work(client: Client) -> int:
        before = await look(client, whole=False)
        await asyncio.sleep(BETWEEN_S)
        now = await look(client, whole=True)
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now.at_ms / 1000))
        title = f"{running.base_url}, {when}"
        print(cluster_file(KeptAnswers(title=title, answers=[before, now])))
        return 0

    return with_server(running, work)


async def _add_stories(client: Client, told: ClusterView) -> None:
    """The oldest machines of each table, and all that belongs to the oldest requests."""
    found = {}
    queries = [{"machine": name} for name in sorted({one.machine for one in told.states})]
    for query in queries:
        for one in (await client.state(query | {"limit": MAX_MACHINES})).machines:
            found[one.instance, one.machine, one.key] = one
    requests = [key for _, machine, key in found if machine == "GENERATION"]
    for request in requests[:MAX_REQUESTS]:
        for one in (await client.state({"key": request, "limit": MAX_MACHINES})).machines:
            found[one.instance, one.machine, one.key] = one
    told.machines = list(found.values())
