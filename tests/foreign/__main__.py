"""`python -m tests.foreign [NAME ...]`: every model, by both foreign checkers and the own search.

Exit status 0: they agree, and all laws and promises hold; 1: not; 2: a checker is not installed, or
there is no such model.
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from epd_lab.formal import models
from epd_lab.formal.form import Model
from tests.foreign.agreement import Verdict, judge
from tests.foreign.checkers import spin_missing, tla_missing


def main(names: list[str]) -> int:
    missing = [why for why in (spin_missing(), tla_missing()) if why]
    known = {model.name for model in models()}
    missing += [f"there is no model {name}" for name in names if name not in known]
    if missing:
        print("\n".join(missing), file=sys.stderr)
        return 2
    began_s = time.perf_counter()
    chosen = [model for model in models() if not names or model.name in names]
    with ThreadPoolExecutor(2) as pool:
        verdicts = list(pool.map(_shown, chosen))
    failed = sum(bool(verdict.problems) for verdict in verdicts)
    took_s = time.perf_counter() - began_s
    print(f"{len(verdicts) - failed} passed, {failed} failed, in {took_s:.0f} s")
    return 1 if failed else 0


def _shown(model: Model) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        verdict = judge(model, Path(folder))
    counts = ", ".join(f"{who} {states}" for who, states in verdict.states.items())
    print(
        f"{verdict.name:27} {counts:36} {verdict.promises} promises {verdict.wall_s:6.1f} s",
        *verdict.problems,
        sep="\n  ",
        flush=True,
    )
    return verdict


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
