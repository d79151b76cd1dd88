"""`python -m tests.with_vllm.truth`, in the environment with vLLM: three columns in one run.

One column after the other, since three vLLM servers are as many as a small machine holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from epd_lab.bench.truth.client import Peer
from epd_lab.bench.truth.run import Cells, measure, renew, report_of, table_of
from epd_lab.bench.truth.table import NamedRow
from tests.with_vllm.server import model_for_vllm
from tests.with_vllm.truth.columns import FrontCluster, OurColumn, VllmCluster, our_column
from tests.with_vllm.truth.rows import all_rows

TIMEOUT_S = 60.0
Make = Callable[[Path, Path], OurColumn | VllmCluster]
COLUMNS: dict[str, Make] = {
    "epd": our_column,
    "epd + vLLM": FrontCluster,
    "vLLM alone": VllmCluster,
}


async def column(name: str, rows: Sequence[NamedRow]) -> Cells:
    with tempfile.TemporaryDirectory() as directory:
        made = COLUMNS[name](Path(directory), model_for_vllm(Path(directory)))
        try:
            url = await made.begin()
            return await measure(Peer(name, url, TIMEOUT_S, made), rows)
        finally:
            await made.end()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.with_vllm.truth")
    parser.add_argument(
        "--rows", action="append", metavar="WORDS", help="only those with one of these words"
    )
    parser.add_argument("--column", action="append", choices=COLUMNS, help="default: all three")
    parser.add_argument("--save", type=Path, metavar="FILE", help="for the JSON of the table")
    parser.add_argument("--renew", type=Path, metavar="FILE", help="only these cells of that table")
    args = parser.parse_args()
    rows = [row for row in all_rows() if any(words in row.name for words in args.rows or [""])]
    found = {name: asyncio.run(column(name, rows)) for name in args.column or COLUMNS}
    report = report_of(rows, found)
    print(table_of(report))
    if args.renew:
        former = json.loads(args.renew.read_text())
        renew(former, report)
        args.renew.write_text(json.dumps(former, indent=1) + "\n")
    if args.save:
        args.save.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
