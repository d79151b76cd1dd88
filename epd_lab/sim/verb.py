"""`epd sim`: the production roles on virtual time, with faults; every race is a seed number."""

from __future__ import annotations

import argparse

DESCRIPTION = """
Run the roles that serve, unchanged, in a deterministic simulator: virtual time, a network that
loses and delays, processes that are killed, stalled and restarted. Checkers hold every run to the
invariants of docs/architecture.md, section 8. A failing seed is replayed by one printed command.
"""

EXAMPLES = (
    ("epd sim list", "the drills, and the faults that they cover"),
    ("epd sim drill all --seeds 20", "every drill under twenty seeds"),
    ("epd sim swarm --seeds 200", "random topologies, workloads and faults"),
    ("epd sim model all", "small configurations, every interleaving"),
    ("epd sim mutants", "known bugs put back: the drills must notice each"),
    ("epd sim replay swarm --seed 7 --trace 50", "one run again, with the end of its trace"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from epd_lab.sim.cli.main import add_arguments as add_all

    add_all(parser)


def run(args: argparse.Namespace) -> int:
    from epd_lab.sim.cli.main import main

    return main(args)
