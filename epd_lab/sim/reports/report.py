"""The files of a run: trace, timeline, sequence diagram.

`write_report` runs a plan again, watched (the same run: watching changes nothing), and writes three
files named by the run.
"""

from __future__ import annotations

import re
from pathlib import Path

from epd_lab.sim.reports import sequence
from epd_lab.sim.reports.tracks import Tracks
from epd_lab.sim.run import Plan, run

AFTER_S = 0.3  # shown after the last answer
IDENTITY = re.compile(r"gateway-\d+-\d+(/\d+)*(/kv)?")


def write_report(plan: Plan, name: str, out: Path, focus: str = "") -> list[Path]:
    """Write `name`.json, `name`.md and `name`.log into `out`; returns their paths.

    `focus`: a request id or room to which the sequence diagram keeps; without it, the first one
    that a violation names.
    """
    tracks = Tracks()
    result = run(plan, keep=True, prepare=tracks.watch_run)
    world = result.world
    assert world is not None
    if not focus and result.violations:
        found = IDENTITY.search(result.violations[0])
        focus = found.group() if found else ""
    probed = [r for r in result.records if r.ask.index < 9000]
    until_s = max((r.ended_s for r in probed if r.ended), default=world.loop.now_s) + AFTER_S
    title = f"{name}: {plan.topology}, {len(plan.asks)} requests, digest {result.digest}"
    out.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    pages = {
        "json": tracks.draw(world.events, world.loop.now_s),
        "md": sequence.draw(world, tracks.lanes, title, focus, until_s),
        "log": "\n".join([*world.lines(), *result.violations, ""]),
    }
    world.close()
    paths = []
    for suffix, text in pages.items():
        paths.append(out / f"{stem}.{suffix}")
        paths[-1].write_text(text, encoding="utf-8")
    return paths
