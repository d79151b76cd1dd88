"""`epd diagrams`: the state machines as images and tables, from the tables that run."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = """
Write docs/state_diagrams: for each state machine its theory, a diagram, the whole matrix of state
and event, and its effects; and one image of which role sends which message to whom. All of it is
read from the tables and the roles that run, so it cannot be wrong, only stale: --check says so.
With them docs/settings.md, read from epd/config.py, docs/drills/models.md, read from
epd_lab/formal, the drawings of the page at /ui, the table of families in docs/engine.md, and
docs/cards and tables of three other pages, read from the measurements under docs/bench.

With --promela or --tla write instead each machine, and both ends of a transfer over a network
that loses, repeats and reorders, as models for SPIN or for a checker of TLA+; docs/simulation.md
says what is checked and how.
"""

EXAMPLES = (
    ("epd diagrams", "write them"),
    ("epd diagrams --check", "fail if a file differs from the code (make check does this)"),
    ("epd diagrams --promela", "write build/promela/*.pml, for SPIN"),
    ("epd diagrams --tla --out DIR", "write DIR/*.tla and *.cfg, modules of TLA+"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    what.add_argument("--promela", action="store_true", help="models for SPIN")
    what.add_argument("--tla", action="store_true", help="modules of TLA+")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="default: docs/state_diagrams, build/promela or build/tla of this checkout",
    )


def default_out(folder: str = "docs/state_diagrams") -> Path:
    """A folder of the checkout that the package is in.  Raises CommandFailed outside one."""
    from epd.cli.boundary import CommandFailed

    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "docs").is_dir():
        raise CommandFailed("this is no checkout of epd; name a directory: --out DIR")
    return checkout / folder


def others() -> dict[Path, str]:
    """Files of the checkout beyond that folder, and what they should be."""
    from epd.api.web import DRAWINGS
    from epd_lab.bench import card_page
    from epd_lab.bench.card_tables import with_tables
    from epd_lab.diagrams import drawings, families_page, models_page, modules_page, settings_page

    docs = default_out("docs")
    engine = docs / "engine.md"
    names = ("peers.md", "topologies.md", "transports.md")
    pages = [docs / name for name in names]
    return {
        docs / "settings.md": settings_page.page(),
        engine: families_page.with_table(engine.read_text(encoding="utf-8")),
        docs / "drills" / "models.md": models_page.page(),
        docs / "state_diagrams" / "engine.md": modules_page.page(),
        **card_page.pages(docs),
        **{page: with_tables(page.read_text(encoding="utf-8"), docs / "bench") for page in pages},
        DRAWINGS: drawings(),
    }


def run(args: argparse.Namespace) -> int:
    from epd.errors import FAILED, OK
    from epd_lab import diagrams, formal

    if args.promela or args.tla:
        out = args.out or default_out("build/promela" if args.promela else "build/tla")
        files = formal.write_promela(out) if args.promela else formal.write_tla(out)
        print(f"{len(files)} files written to {out}")
        return OK
    out = args.out or default_out()
    more = {} if args.out else others()
    if not args.check:
        diagrams.write_diagrams(out)
        for path, content in more.items():
            path.write_text(content, encoding="utf-8")
        print(f"written to {out}")
        return OK
    stale = diagrams.check_diagrams(out)
    for path, content in more.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != content:
            stale.append(path.name)
    for name in stale:
        print(f"stale: {name}")
    if stale:
        print("epd diagrams writes them anew")
    return FAILED if stale else OK
