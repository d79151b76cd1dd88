"""Dispatch to a verb, behind one error boundary."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from epd.cli.boundary import guarded
from epd.cli.parser import Parser, UsageError, suggestion
from epd.errors import INTERRUPTED
from epd.runtime.lines import hold_standard_files

VERBS = {
    "run": "start one process, or a whole topology on this host",
    "ask": "ask one question about images, of a running or a temporary server",
    "chat": "a conversation with images, with a running or a temporary server",
    "demo": "three workers and a gateway read three sample images",
    "top": "watch a running cluster: instances, machines by state, the oldest ones",
    "list": "machines of a running cluster: transfers in QUARANTINED for 5 s, and the like",
    "drain": "take an instance out: new work goes elsewhere, open work ends or moves",
    "role": "give an instance other roles while the cluster serves",
    "rollout": "restart the instances one by one while the cluster serves",
    "story": "what happened to one request, room or image, at each process",
    "keys": "API keys of clients: make, list and remove them in a file of hashes",
    "k8s": "write the manifests of a topology for Kubernetes",
    "snapshot": "what a running cluster does now, as one file for a browser",
    "sim": "the same roles on virtual time, with faults; replay a race by its seed",
    "plan": "the topology for a load: what to start on so many GPUs, predicted",
    "bench": "measure a server under load, the gateway, the hop, the simulator",
    "diagrams": "write or check the images of the state machines",
    "verify": "prove that a checkpoint is answered from as transformers does",
    "doctor": "what is installed, reachable, missing, left over; and the fix",
    "completion": "what bash, zsh or fish needs to complete verbs and flags",
}

# Verbs of `epd_lab`, which a wheel of the server does not carry.
LABORATORY = ("sim", "plan", "bench", "diagrams")

HEAD = """\
usage: epd VERB [options]
       epd VERB --help

Serve vision-language models with Encode, Prefill and Decode as separate, supervised roles.

verbs:
"""

TAIL = """
examples:
  epd demo
      see it work: start 1e1p1d, ask three questions, show where each request spent its time
  epd run --topology 2e1pd --model DIR --port 8000
      two encoders and one prefill+decode instance behind an OpenAI endpoint
  epd ask "What is the total?" --image receipt.png --url http://127.0.0.1:8000
      ask the running server

options:
  -h, --help   this text
  --version    the version of epd

exit status: 0 ok, 1 failed, 2 wrong usage or configuration, 130 interrupted.
EPD_TRACEBACK=1 in the environment shows where an error came from.
`python -m epd` is the same command."""


def help_text() -> str:
    width = max(map(len, VERBS)) + 3
    return HEAD + "".join(f"  {verb:<{width}}{what}\n" for verb, what in VERBS.items()) + TAIL


def module_of(verb: str) -> ModuleType:
    if verb not in LABORATORY:
        return importlib.import_module(f"epd.cli.verbs.{verb}")
    try:
        return importlib.import_module(f"epd_lab.{verb}.verb")
    except ModuleNotFoundError as error:
        if error.name != "epd_lab":
            raise
        raise UsageError(
            f"epd {verb} is part of the laboratory, a distribution beside the server that is not "
            "installed here: pip install epd-lab, or ./epd_lab of a checkout"
        ) from None


def dispatch(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        print(help_text())
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb in {"-V", "--version"}:
        from epd import __version__

        print(f"epd {__version__}")
        return 0
    if verb not in VERBS:
        kind = "flag" if verb.startswith("-") else "verb"
        raise UsageError(f"unknown {kind} {verb!r}{suggestion(verb, VERBS)} (epd --help lists all)")
    run_verb: Callable[[object], int] = module_of(verb).run
    return run_verb(parser_of(verb).parse(rest))


def parser_of(verb: str) -> Parser:
    """Raises UsageError for a verb of a laboratory that is not here."""
    module = module_of(verb)
    parser = Parser(f"epd {verb}", module.DESCRIPTION, module.EXAMPLES)
    module.add_arguments(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of `epd` with these arguments; prints, and never raises."""
    given = sys.argv[1:] if arguments is None else arguments
    return guarded(lambda: dispatch(given))


def run() -> None:
    """Entry point of the `epd` command.

    Until a verb's event loop takes the signal, Ctrl-C finds nothing to clean up and ends the
    process at once. A KeyboardInterrupt in the middle of an import would show its traceback."""
    hold_standard_files()
    if "--log-json" in sys.argv:  # also for what is wrong with the other flags
        from epd.runtime import json_stderr

        json_stderr.begin()
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    sys.exit(main())
