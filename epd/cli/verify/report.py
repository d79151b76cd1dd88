"""From the command line to the verdict: what is compared, the table, the report."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import msgspec

from epd import __version__
from epd.cli.configure import options
from epd.cli.configure.hub import find_model
from epd.cli.configure.settings import build_settings
from epd.cli.scratch import scratch
from epd.cli.verify.findings import Finding, LeftOut, Result
from epd.cli.verify.fitting import KV_NBYTES, check_fits, free_nbytes, need_of
from epd.cli.verify.rows import ROWS, Row
from epd.cli.verify.sides import Sides
from epd.config import Settings
from epd.errors import FAILED, OK, explain
from epd.frontend import JsonObject
from epd.model_files.checkpoint import read_checkpoint
from epd.model_files.first_layers import cut
from epd.model_files.model_directory import check_config

PATIENT_S = 290.0  # a client waits for 300
VERSIONS = ("torch", "transformers", "tokenizers", "safetensors", "pillow")


def verify(args: argparse.Namespace) -> int:
    """Raises what the settings raise, and CommandFailed where memory is not enough."""
    began_s = time.monotonic()
    directory = given = find_model(args.model)
    against = given if args.against == "transformers" else find_model(args.against)
    whole = read_checkpoint(given)
    check_config(whole)
    settings = _settings(args, given)
    device, dtype = settings.engine.device, settings.engine.dtype
    need = need_of(whole, dtype)
    num_layers = min(args.layers or need.num_layers, need.num_layers)
    check_fits(need, num_layers, free_nbytes(device), device)
    with scratch("epd-verify-") as place:
        if num_layers < need.num_layers:
            directory = cut(given, num_layers, place / "ours")
            against = cut(against, num_layers, place / "theirs")
            settings = _settings(args, directory, allow_unused=True)
        sides = Sides(whole, directory, against, settings, options.log_of(args, "warning"))
        findings = run_rows(sides)
        sides.unload()
    results = {name: found.result for name, found in findings.items()}
    ok = set(results.values()) == {Result.SAME}
    part = f", over {num_layers} of {need.num_layers} layers" * (num_layers < need.num_layers)
    verdict = _verdict(results) + part
    print(verdict, flush=True)
    if args.json is not None:
        named = {name: importlib.metadata.version(name) for name in VERSIONS}
        report = {
            "ok": ok, "verdict": verdict, "model": args.model, "model_type": whole.model_type,
            "against": args.against, "device": device, "dtype": dtype,
            "layers": [num_layers, need.num_layers],
            "versions": {"epd": __version__, "python": platform.python_version()} | named,
            "elapsed_s": round(time.monotonic() - began_s, 1),
            "rows": [
                {"name": row.name, "proves": row.proves, **asdict(findings[row.name])}
                for row in ROWS if row.name in findings
            ],
        }  # fmt: skip
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return OK if ok else FAILED


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


def run_rows(sides: Sides, rows: Sequence[Row] = ROWS) -> dict[str, Finding]:
    """Each is printed as soon as it is there."""
    findings: dict[str, Finding] = {}
    for row in rows:
        if row.of_pictures and not sides.sees:
            continue
        wrong = next((n for n in row.needs if findings[n].result is not Result.SAME), None)
        if wrong:
            finding = Finding(Result.LEFT_OUT, f"not run: {wrong}")
        else:
            _show(f"{'...':9} {row.name:13} {row.proves}")
            finding = _found(partial(row.compare, sides))
        _show("")
        print(f"{finding.result:9} {row.name:13} {finding.detail}", flush=True)
        findings[row.name] = finding
    return findings


def _found(compare: Callable[[], Finding]) -> Finding:
    """An error is a finding, too, so that the rows behind it are not lost."""
    try:
        return compare()
    except LeftOut as left:
        return Finding(Result.LEFT_OUT, str(left))
    except Exception as error:
        return Finding(Result.DIFFERS, explain(error)[1])


def _show(words: str) -> None:
    """On a terminal: what is being compared, while it is."""
    if sys.stderr.isatty():
        print(f"\x1b[2K{words}\r", end="", file=sys.stderr, flush=True)


def _verdict(results: dict[str, Result]) -> str:
    wrong, left = (
        ", ".join(name for name, found in results.items() if found is kind)
        for kind in (Result.DIFFERS, Result.LEFT_OUT)
    )
    if wrong:
        return f"not the same: {wrong}; the first of them is the likeliest cause"
    if left:
        return f"nothing differs, but not all was compared: {left}"
    return "proved: this engine answers as transformers does"
