"""`epd drain`, `epd role` and `epd rollout`: what a gateway is asked for, and what it shows until
that is done.

A message to an instance may be lost, so one that still takes work is asked again."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence

from epd.api.watching.cluster_view import ProcessView
from epd.cli.ask.client import Client
from epd.cli.boundary import CommandFailed

EVERY_S = 0.5
ASK_AGAIN_S = 5.0
MORE_S = 60.0  # behind its bound, for the moves and the end of the process
TAKES_WORK = ("HEALTHY", "SUSPECT", "STUCK", "PROBING")  # or may again
MEMBERS = (*TAKES_WORK, "DRAINING", "SWITCHING")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def processes(client: Client) -> dict[str, ProcessView]:
    """Instances by name.  Raises CommandFailed."""
    told = await client.state({"over_s": "0"})
    return {one.instance: one for one in told.processes if one.epoch}


async def drain(
    client: Client,
    name: str,
    within_s: float,
    *,
    forced: bool,
    restarts: bool = False,
    roles: Sequence[str] = (),
    first: int = 0,
    tell: Callable[[str], None] = say,
) -> ProcessView:
    """Until that life of it is over; the last facts of it.  `first`: its epoch, if it may be back
    soon.  Raises CommandFailed."""
    body: dict[str, object] = {"instance": name, "within_s": within_s, "force": forced}
    body |= {"roles": [*roles]} if roles else {"restart": restarts}
    path = "/role" if roles else "/drain"
    await client.drain(body, path)
    told, waited_s = "", 0.0
    while waited_s < within_s + MORE_S:
        one = (await processes(client)).get(name)
        first = first or (one.epoch if one is not None else 0)
        if one is None or one.epoch != first or one.state not in MEMBERS:
            if one is not None and one.state == "LOST":
                tell(f"{name} was lost: what was open there went elsewhere as after a kill")
            return one or ProcessView(instance=name, roles=[])
        if one.state in TAKES_WORK and waited_s and waited_s % ASK_AGAIN_S == 0:
            await client.drain(body, path)
        if (line := _progress(one)) != told:
            tell(told := line)
        await asyncio.sleep(EVERY_S)
        waited_s += EVERY_S
    raise CommandFailed(f"{name} has not left; epd list instances shows what it holds")


def _progress(one: ProcessView) -> str:
    kinds = ", ".join(f"{kind} {count}" for kind, count in one.in_use.items() if count)
    if one.drain_left_s is None:
        return f"{one.instance} is asked"
    when = f"moves in {one.drain_left_s:.0f} s" if one.drain_left_s else "moves now"
    does = "switches" if one.state == "SWITCHING" else "drains"
    return f"{one.instance} {does}: {one.assigned} open ({kinds or 'nothing held'}); it {when}"


async def rollout(
    client: Client,
    names: Sequence[str],
    within_s: float,
    back_within_s: float,
    *,
    forced: bool,
    tell: Callable[[str], None] = say,
) -> list[str]:
    """Restart these (none: all members) one by one; those that are back.  Raises CommandFailed."""
    before = await processes(client)
    named = names or [name for name, one in before.items() if one.state in MEMBERS]
    if unknown := [name for name in named if name not in before]:
        raise CommandFailed(f"no instance {unknown[0]}; there are {', '.join(before)}")
    for at, name in enumerate(named):
        epoch = (await processes(client))[name].epoch
        await drain(client, name, within_s, forced=forced, restarts=True, tell=tell)
        rest = ", ".join(named[at + 1 :])
        then = f"; {rest} were not restarted" if rest else ""
        await _back(client, name, epoch, back_within_s, then)
        tell(f"{name} serves again ({at + 1} of {len(named)})")
    return list(named)


async def switch(
    client: Client,
    name: str,
    roles: Sequence[str],
    within_s: float,
    back_within_s: float,
    *,
    forced: bool,
    tell: Callable[[str], None] = say,
) -> ProcessView:
    """Until its next life serves; the facts of that.  Raises CommandFailed, also where it has its
    former roles still."""
    before, began_s = (await processes(client)).get(name), time.monotonic()
    epoch = before.epoch if before is not None else 0
    await drain(client, name, within_s, roles=roles, first=epoch, forced=forced, tell=tell)
    left_s = time.monotonic() - began_s
    tell(f"{name} has left after {left_s:.1f} s, and loads what it lacks")
    one = await _back(client, name, epoch, back_within_s)
    if set(one.roles) != set(roles):
        raise CommandFailed(f"{name} serves {', '.join(one.roles)} as before: {one.reason}")
    took_s = time.monotonic() - began_s
    tell(f"{name} serves {', '.join(one.roles)}, {took_s - left_s:.1f} s later ({took_s:.1f} s)")
    return one


async def _back(
    client: Client, name: str, epoch: int, within_s: float, then: str = ""
) -> ProcessView:
    """When its life behind that epoch serves.  Raises CommandFailed."""
    waited_s = 0.0
    while waited_s < within_s:
        one = (await processes(client)).get(name)
        if one is not None and one.epoch != epoch and one.state == "HEALTHY":
            return one
        await asyncio.sleep(EVERY_S)
        waited_s += EVERY_S
    raise CommandFailed(f"{name} is not back after {within_s:g} s{then}")
