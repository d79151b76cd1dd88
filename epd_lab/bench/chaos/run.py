"""`epd bench chaos`: faults of real processes under mixed load; every answer is compared.

Theory of operation
-------------------
A cluster is started as users start it, and answers each question twice while nothing fails: these
are the right answers.  Then clients ask on and on, and the faults of a plan hit its processes.  The
books of outages follow what the gateway shows; they hold a fault back while it would leave a stage
without an instance.  So where a topology has two of each stage, no request may fail, and no stream
pause for longer than a loss takes to be noticed and made good.  Wrong answers are wrong anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

from epd_lab.bench import plots
from epd_lab.bench.chaos.clients import ChaosClients
from epd_lab.bench.chaos.cluster import Kinds
from epd_lab.bench.chaos.hosts import unable
from epd_lab.bench.chaos.outages import Entries, Outages
from epd_lab.bench.chaos.plan import Wish, faults_of, members_of, parts_of
from epd_lab.bench.chaos.process import READY_S, ClusterFailed, Command, ServingCommand
from epd_lab.bench.chaos.questions import questions
from epd_lab.bench.chaos.strikes import LOOK_S, Site, site, strike_all
from epd_lab.bench.chaos.verdict import Run, verdict

CLIENT_TIMEOUT_S = 300.0


def settled(wish: Wish) -> tuple[Wish, list[str]]:
    """What can be done here, and what not.  Raises ConfigError where hosts could be made and the
    topology has nothing for a second one."""
    if wish.partition and (reason := unable()):
        return dataclasses.replace(wish, partition=False), [f"partitions: {reason}"]
    if wish.partition:
        parts_of(wish.topology)
    return wish, []


def chaos(wish: Wish, kinds: Kinds = (ServingCommand, Command)) -> Run:
    """The cluster is gone when it returns."""
    wish, skipped = settled(wish)
    outages = Outages(members_of(wish))
    run = Run(wish, questions(wish.seed), outages, skipped=skipped)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-chaos-"))
        made = stack.enter_context(site(wish, Path(directory), kinds))
        asyncio.run(_load(run, made))
        for server in made.gateways:
            with contextlib.suppress(ClusterFailed):
                server.check_all_returned()
            run.in_use |= server.in_use()
        run.left_behind = made.stop()
    return run


async def _load(run: Run, made: Site) -> None:
    timeout = aiohttp.ClientTimeout(total=CLIENT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    wish, outages, over = run.wish, run.outages, asyncio.Event()
    until_s = 60 * wish.minutes
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
        asyncio.TaskGroup() as group,
    ):
        urls = [server.base_url for server in made.gateways]
        clients = ChaosClients(session, urls, wish.seed)
        run.right = await clients.goldens(run.asked, wish.clients)
        print(f"{len(run.right)} right answers; faults begin", file=sys.stderr, flush=True)
        group.create_task(_watch(session, urls, outages, clients, over))
        asking = [
            group.create_task(clients.load(number, run.asked, until_s))
            for number in range(wish.clients)
        ]
        await _all_there(outages)
        run.faults = await strike_all(
            made, faults_of(wish), outages, outages.pid, clients.now_s, until_s
        )
        await asyncio.gather(*asking)
        run.answers, run.lasted_s = clients.answers, clients.now_s()
        run.num_moved = clients.num_moved
        await _all_there(outages)
        run.away = outages.away
        over.set()


async def _all_there(outages: Outages) -> None:
    """Or as long as that may take."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READY_S):
            while True:
                await asyncio.sleep(LOOK_S)
                if not outages.away:
                    return


async def _watch(
    session: aiohttp.ClientSession,
    urls: list[str],
    outages: Outages,
    clients: ChaosClients,
    over: asyncio.Event,
) -> None:
    """What a gateway shows, into the books: of several the one that has served for longest."""
    serving = dict.fromkeys(urls)
    while not over.is_set():
        shown: Entries | None = None
        for url in [*serving]:
            try:
                async with session.get(f"{url}/ready") as response:
                    found = _by_name((await response.json())["instances"], outages.has_two_hosts)
            except (aiohttp.ClientError, TimeoutError):
                serving.pop(url)
            else:
                shown = shown or found
        outages.gateways_serve = len(serving) == len(urls) or not serving
        serving |= dict.fromkeys(urls)
        if shown:
            outages.see(shown, clients.now_s())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), LOOK_S)


def _by_name(entries: list[dict[str, Any]], has_two_hosts: bool) -> Entries:
    """As a plan names them: host b's are `b-...-e0` at its gateway."""
    found: dict[str, dict[str, Any]] = {}
    for entry in sorted(entries, key=lambda entry: entry["epoch"]):
        host, _, name = entry["instance"].rpartition("-")
        found[f"b/{name}" if host and has_two_hosts else name] = entry
    return found


def report(run: Run, *, as_json: bool, save: Path | None, plot: Path | None) -> int:
    """Print the verdict; exit status 1 when a bound is broken."""
    found = verdict(run)
    text = json.dumps(found, indent=2, default=dataclasses.asdict)
    if save is not None:
        save.write_text(text + "\n")
    if plot is not None:
        plot.write_text(plots.chaos(run))
    short = {name: value for name, value in found.items() if name not in {"replay", "failed"}}
    print(text if as_json else json.dumps(short, indent=2))
    for sentence in found["broken"]:
        print(f"does not hold: {sentence}", file=sys.stderr)
    return 1 if found["broken"] else 0
