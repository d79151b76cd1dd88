"""`epd bench truth`: the same black-box rows of several servers, in one run, as one table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence

from epd_lab.bench.machine import describe
from epd_lab.bench.truth.client import Peer, TruthCell
from epd_lab.bench.truth.rows import NamedRow, rows


async def measure(
    peers: Sequence[Peer], table: Sequence[NamedRow]
) -> list[tuple[NamedRow, list[TruthCell]]]:
    """Row by row, server by server.  Raises OSError where one lists no model at the start."""
    try:
        for peer in peers:
            await peer.open()
        return [(row, [await row.ask(peer) for peer in peers]) for row in table]
    finally:
        for peer in peers:
            await peer.close()


def run(
    urls: Mapping[str, str], pids: Mapping[str, int], timeout_s: float, *, as_json: bool
) -> int:
    peers = [Peer(name, url, timeout_s) for name, url in urls.items()]
    found = asyncio.run(measure(peers, rows(pids)))
    if as_json:
        table = [
            {"row": row.name, "right": row.right}
            | {peer.name: cell.as_json() for peer, cell in zip(peers, cells, strict=True)}
            for row, cells in found
        ]
        print(json.dumps({"machine": describe(), "servers": dict(urls), "rows": table}))
        return 0
    print(f"| row | right is | {' | '.join(urls)} |\n|{'---|' * (2 + len(urls))}")
    for row, cells in found:
        print(f"| {row.name} | {row.right} | {' | '.join(map(str, cells))} |")
    return 0
