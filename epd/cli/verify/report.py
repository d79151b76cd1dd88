"""From the command line to the verdict: what is compared, the table, the report."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from epd.cli.ask.client import Client
from epd.cli.ask.temporary import with_server
from epd.cli.configure.hub import find_model
from epd.cli.configure.settings import build_settings
from epd.cli.start.plan import LogOptions, Placing, plan_topology
from epd.cli.start.ports import settle_port
from epd.cli.verify.findings import Finding, Result
from epd.cli.verify.fitting import KV_NBYTES, check_fits, cut, free_nbytes, need_of
from epd.cli.verify.rows import ROWS, Row, run_row, withheld
from epd.cli.verify.sides import Sides
from epd.config import Settings
from epd.errors import FAILED, INTERRUPTED, OK
from epd.frontend import JsonObject
from epd.model_files.checkpoint import read_checkpoint
from epd.model_files.model_directory import check_config

PATIENT_S = 290.0  # a client waits for 300
VERSIONS = ("torch", "transformers", "tokenizers", "safetensors", "pillow")


def verify(args: argparse.Namespace) -> int:
    """Raises what the settings raise, and CommandFailed where memory is not enough."""
    began_s = time.monotonic()
    given = find_model(args.model)
    whole = read_checkpoint(given)
    check_config(whole)
    is_same = args.against == "transformers"
    against = given if is_same else find_model(args.against)
    settings = _settings(args, given)
    engine = settings.engine
    need = need_of(whole, engine.dtype)
    num_layers = min(args.layers or need.num_layers, need.num_layers)
    check_fits(need, num_layers, free_nbytes(engine.device), engine.device)
    with ExitStack() as stack:
        directory = given
        if num_layers < need.num_layers:
            directory, against = (
                cut(one, num_layers, Path(stack.enter_context(_temporary())))
                for one in (given, against)
            )
            settings = _settings(args, directory, allow_unused=True)
        findings = _table(Sides(whole, directory, against, settings), args)
    ok = all(finding.result is Result.SAME for finding in findings.values())
    report = {
        "ok": ok,
        "verdict": _verdict(findings),
        "model": args.model,
        "model_type": whole.model_type,
        "against": args.against,
        "device": engine.device,
        "dtype": engine.dtype,
        "layers": [num_layers, need.num_layers],
        "versions": _versions(),
        "elapsed_s": round(time.monotonic() - began_s, 1),
        "rows": [
            {"name": row.name, "proves": row.proves, **asdict(findings[row.name])}
            for row in ROWS if row.name in findings
        ],
    }  # fmt: skip
    print(report["verdict"], flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(_plain(report), indent=1) + "\n")
    return OK if ok else FAILED


def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="epd-verify-")


def _settings(args: argparse.Namespace, directory: Path, *, allow_unused: bool = False) -> Settings:
    flags: JsonObject = {key: v for key, v in vars(args).items() if "." in key}
    fixed = {
        "model_dir": str(directory),
        "engine.kv_nbytes": KV_NBYTES,
        "engine.allow_unused_tensors": allow_unused,
        "engine.dtype": flags.get("engine.dtype") or "float32",
        **{f"timing.{n}_timeout_s": PATIENT_S for n in ("request", "topology", "first_token")},
    }
    return build_settings(args.config, args.assignments, flags | fixed)


def _table(sides: Sides, args: argparse.Namespace) -> dict[str, Finding]:
    """Each row is printed as soon as it is there."""
    rows = [row for row in ROWS if sides.sees or not row.of_pictures]
    findings = asyncio.run(in_process(sides, rows[:-1]))
    served = rows[-1]
    findings[served.name] = withheld(served, findings) or _served(served, sides, args)
    _print(served, findings[served.name])
    return findings


async def in_process(sides: Sides, rows: Sequence[Row]) -> dict[str, Finding]:
    findings: dict[str, Finding] = {}
    for row in rows:
        finding = withheld(row, findings)
        if finding is None:
            _told(row)
            finding = await run_row(partial(row.compare, sides))
        findings[row.name] = finding
        _print(row, finding)
    if "ours" in vars(sides):
        await sides.ours.close()
    return findings


def _served(row: Row, sides: Sides, args: argparse.Namespace) -> Finding:
    """The answers of processes, once nothing else is in memory."""
    if not sides.right_answers:
        return Finding(Result.LEFT_OUT, "not run: answers")
    sides.unload()
    _told(row)
    settings = settle_port(sides.settings, wanted=None)
    log = LogOptions(args.log_level or "warning", args.log_json)
    plan = plan_topology("1e1p1d" if sides.sees else "1p1d", settings, Placing(), log)
    found: list[Finding] = []

    async def ask(client: Client) -> int:
        found.append(await run_row(partial(row.compare, sides, client)))
        return OK

    if with_server(plan, ask) == INTERRUPTED:
        raise KeyboardInterrupt
    return found[0]


def _told(row: Row) -> None:
    """What is being compared, while it is."""
    if sys.stderr.isatty():
        print(f"\x1b[2K...       {row.name:13} {row.proves}\r", end="", file=sys.stderr, flush=True)


def _print(row: Row, finding: Finding) -> None:
    if sys.stderr.isatty():
        print("\x1b[2K\r", end="", file=sys.stderr, flush=True)
    print(f"{finding.result:9} {row.name:13} {finding.detail}", flush=True)


def _verdict(findings: dict[str, Finding]) -> str:
    wrong = [name for name, found in findings.items() if found.result is Result.DIFFERS]
    left = [name for name, found in findings.items() if found.result is Result.LEFT_OUT]
    if wrong:
        return f"not the same: {', '.join(wrong)}; the first of them is the likeliest cause"
    if left:
        return f"nothing differs, but not all was compared: {', '.join(left)}"
    return "proved: this engine answers as transformers does"


def _plain(value: object) -> object:
    """JSON has no numbers that are not finite."""
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _versions() -> dict[str, str]:
    from epd import __version__

    found = {name: importlib.metadata.version(name) for name in VERSIONS}
    return {"epd": __version__, "python": platform.python_version(), **found}
