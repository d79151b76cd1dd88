"""The tool that plants slips: none is lost, and each operator plants what it says.

What it finds in epd is in docs/simulation.md.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.__main__ import TARGETS, TRANSPORTS, chosen, parser
from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.hunt import Hunt
from tests.mutation.mutants import ROOT, of_modules
from tests.mutation.operators import IN_FUNCTIONS
from tests.mutation.planting import Importer
from tests.mutation.reach import Reach

LEDGER = "tests/mutation/sample/ledger.py"
ROW = "Row(S.OPEN, Filled, S.CLOSED, (Do.TELL, Do.FREE)"
NOT_SEEN = {  # by the sample's tests, which know nothing of it
    "Page.__init__: self.reason = '' ... -> return",
    "Page.__init__: self.reason = '' -> pass",
    "keep_reason: page.reason = 'full' -> pass",
    "Ledger.__init__: 0 in self.num_unseen = 0 -> 1",
    "Ledger.add: self.num_unseen += 1 -> pass",
    "Ledger.add: self.num_unseen += 1 -> self.num_unseen -= 1",
    "Ledger.add: 1 in self.num_unseen += 1 -> 2",
    "Ledger.drop: for entry in list(self._entries) -> for entry in list(self._entries): ... break",
    "Ledger.drop: (entry[0], entry[1]) == (owner, epoch) -> (entry[1],) == (epoch,)",
    "Ledger.wait: 0 in count = 0 -> 1",
    f": {ROW}, keep_reason) -> {ROW}, None)",
}
NOT_REACHED = {"Ledger.never_called: self._size = 0 -> pass"}
NOT_REACHED |= {"Ledger.never_called: 0 in self._size = 0 -> 1"}
WITHOUT_END = {"Ledger.wait: count += 1 -> pass", "Ledger.wait: count += 1 -> count -= 1"}
NOT_IMPORTED = {"Filled: True in by_time = True -> False"}


def hunted(*arguments: str, limit_s: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.mutation", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s
    )


@pytest.mark.long
@pytest.mark.timeout(300)
def test_no_mutant_of_a_module_is_lost(tmp_path: Path) -> None:
    where = ["--target", LEDGER, "--test", "tests/mutation/sample/check_ledger.py"]
    files = ["--reach", str(tmp_path / "reach"), "--json", str(tmp_path / "verdicts")]
    done = hunted("--all", "--jobs", "2", *where, *files, limit_s=280)
    assert done.returncode == 1, done.stderr
    verdicts = json.loads((tmp_path / "verdicts").read_text())
    found = {verdict["key"].removeprefix(f"{LEDGER}:"): verdict for verdict in verdicts}
    planted = {mutant.key.removeprefix(f"{LEDGER}:") for mutant in of_modules((LEDGER,))}
    assert len(verdicts) == len(found)
    assert set(found) == planted
    assert {key for key, verdict in found.items() if not verdict["caught_by"]} == (
        NOT_SEEN | NOT_REACHED
    )
    assert {key for key in found if "nothing reaches" in found[key]["why"]} == NOT_REACHED
    assert {key for key in found if "did not end" in found[key]["why"]} == WITHOUT_END
    assert all("importing" in found[key]["caught_by"] for key in NOT_IMPORTED)
    for key in NOT_SEEN:
        assert f"{LEDGER}:{found[key]['line']}: {found[key]['operator']}: " in done.stdout


def test_tests_of_a_module_come_before_cheaper_ones(tmp_path: Path) -> None:
    """Hundreds may pass through it; the budget must not end before those that look at it."""
    mutant = next(iter(of_modules((LEDGER,))))
    known = Reach()
    known.costs_s = {f"tests/test_roles.py::test_{n}": 0.1 for n in range(200)}
    own = {f"tests/test_ledger.py::test_{n}": 2.0 for n in range(3)}
    known.costs_s |= own
    names = sorted(known.costs_s, key=lambda name: known.costs_s[name])
    hunt = Hunt((LEDGER,), (), (), tmp_path, 1, budget_s=20.0)
    chosen = hunt._affordable(names, known, mutant)
    assert own.keys() <= set(chosen)
    assert 30 < len(chosen) < 50, "and the budget is used"


# Each operator with a line and all that it makes of it.
SLIPS = {
    "drop_statement": ("bell.ring()\nx.y = 1\nlocal = 1", ["pass", "pass"]),
    "drop_branch": ("if a:\n    return\nif b:\n    c()", ["pass"]),
    "return_early": ("def g() -> None:\n    a()\n    b()", ["return"]),
    "only_the_first": ("for x in y:\n    f(x)", ["for x in y: ... break"]),
    "drop_finally": ("try:\n    a()\nfinally:\n    b()", ["finally: pass"]),
    "do_not_handle": ("try:\n    a()\nexcept E:\n    b()", ["except E: raise"]),
    "negate_condition": ("if not a:\n    b()\nreturn [x for x in y if x]", ["a", "not x"]),
    "move_bound": ("while a < b:\n    c()", ["a <= b"]),
    "negate_part": ("return a is None and b", ["a is not None"]),
    "swap_and_or": ("return a or b", ["a and b"]),
    "drop_part": (
        "return (a, b) == (c, d)\nreturn a and b",
        ["(b,) == (d,)", "(a,) == (c,)", "b", "a"],
    ),
    "forget_the_epoch": ("f(peer.epoch, epoch)", ["0", "0"]),
    "off_by_one": ("a = b + 1\na = 4096", ["2"]),
    "other_truth": ("f(wait=True)", ["False"]),
    "other_arithmetic": ("a += b\na = b // c", ["a -= b", "b * c"]),
    "swap_first_and_last": (
        "a[0]\na[-1]\nmin(a)\na.popleft()\nnext(iter(a))\nsorted(a)\nreversed(a)",
        ["a[-1]", "a[0]", "max(a)", "a.pop()", "list(a)[-1]", "sorted(a, reverse=True)", "a"],
    ),
    "drop_argument": ("f(a, b=c)", ["f(a)"]),
    "drop_slice_bound": ("a[b:c]", ["[:c]", "[b:]"]),
    "drop_row": ("(Row(S.A, E, S.B), Ignore((S.A,), (F,), 'why'))", ["(no row)"] * 2),
    "drop_member": ("(S.A, S.B)", ["(dropped)"] * 2),
    "forget_the_action": (
        "Row(S.A, E, S.B, (), keep)\nRow(S.A, E, S.B, do=keep)",
        ["Row(S.A, E, S.B, (), None)", "Row(S.A, E, S.B)"],
    ),
    "stay": ("Row(S.A, E, S.B)\nRow(S.A, E, None)", ["Row(S.A, E, None)"]),
}


@pytest.mark.parametrize("name", sorted(IN_FUNCTIONS))
def test_an_operator_plants_what_it_says(name: str) -> None:
    text, expected = SLIPS[name]
    tree = ast.parse(text)
    changes = [
        change
        for parent in ast.walk(tree)
        for node in ast.iter_child_nodes(parent)
        for change in IN_FUNCTIONS[name](node, parent)
    ]
    assert sorted(change.after for change in changes) == sorted(expected)
    assert ast.unparse(tree) == ast.unparse(ast.parse(text)), "the original was changed"


def test_a_package_is_served_like_a_module() -> None:
    (mutant, *_) = of_modules(("epd/fsm/request/__init__.py",))
    assert mutant.module == "epd.fsm.request"
    importer = Importer(lambda path: mutant.tree() if path == mutant.path else None)
    spec = importer.find_spec(mutant.module)
    assert spec is not None and spec.loader is not None
    assert spec.submodule_search_locations == [str(ROOT / "epd/fsm/request")]
    assert importer.find_spec("epd.fsm.request.context") is None, "as it is"


each_page = pytest.mark.parametrize(
    "page", ["CONTRIBUTING.md", "docs/simulation.md", "tests/mutation/__main__.py"]
)


def commands_of(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8").replace("FILE.py", "bell.py")
    return re.findall(r"python -m tests\.mutation( --[^`#\n]*)", text)


@each_page
def test_every_command_that_is_told_is_one(page: str) -> None:
    told = commands_of(page)
    assert told
    for arguments in told:
        parser().parse_args(shlex.split(arguments))


@pytest.mark.long
@each_page
def test_every_command_that_is_told_has_mutants(page: str) -> None:
    for arguments in commands_of(page):
        assert chosen(parser().parse_args(shlex.split(arguments))), arguments


@pytest.mark.long
def test_what_is_said_to_be_equivalent_exists_and_has_a_reason() -> None:
    known = {mutant.key for mutant in of_modules((*TARGETS, *TRANSPORTS))}
    assert [key for key in EQUIVALENT if key not in known] == [], "gone: remove it from the list"
    assert all(EQUIVALENT.values())


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_sample_of_slips_in_epd_is_caught() -> None:
    """Of each package 90 % were caught (docs/simulation.md): of 30, chance takes some."""
    done = hunted("--sample", "30", "--seed", "1", "--at-least", "0.8", limit_s=7100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_sample_of_slips_in_transports_is_caught() -> None:
    done = hunted(
        "--sample", "60", "--seed", "1", "--in", "epd/transport", "--at-least", "0.6", limit_s=7100
    )
    assert done.returncode == 0, done.stdout + done.stderr
