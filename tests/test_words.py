"""The words of the documents: short sentences, nouns of the glossary, and no field that speaks.

A sentence has at most 30 words.  A noun belongs where "who", "what", "such", "others" or "that
which" could stand, and a field or a process does not tell, say, want, hear or know.  Docstrings of
`MODULES` have neither long sentences nor such verbs.  A class has a name of its own.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
MAX_WORDS = 30
MAX_LINES = {"docs/performance.md": 60}
VAGUE = re.compile(r"\b(who|whom|what|such(?! as)|others|that which)\b", re.IGNORECASE)
SPEAKS = re.compile(
    r"\b(tell|tells|told|say|says|said|want|wants|wanted|hear|hears|heard|know|knows|known)\b",
    re.IGNORECASE,
)
PERSON = re.compile(
    r"\b(you|people|operators?|clients?|users?|readers?)\W+(\w+\W+)?$", re.IGNORECASE
)
MODULES = (  # whose docstrings keep it, too
    *("epd/*.py", "epd/api/**/*.py", "epd/engine/**/*.py", "epd/fsm/**/*.py"),
    *("epd/media_files/**/*.py", "epd/model_files/**/*.py", "epd/scheduling/**/*.py"),
    *("epd/tiny/**/*.py", "epd/cli/**/*.py", "epd/families/**/*.py", "epd/groups/**/*.py"),
    *("epd/roles/**/*.py", "epd/runtime/**/*.py", "epd/transport/**/*.py"),
    *("training/**/*.py", "epd_lab/**/*.py"),
)
SHAPES = tuple(f"epd/api/{name}/" for name in ("anthropic", "asked", "openai", "responses"))
SHARED = frozenset(  # names of classes that still stand for several things: none is added
    """
    Accepted Ask Batch Child Client Completions Costs Counts Fault Generation Generations Heads
    Histogram Holds Image Instance Leave Line Link Membership Message Part Patches Placed
    Placing Probe Prompt Record Refused Request Result Row Rows RowsKept Settings Shape Staged
    Step Stream Told Workload World WriteRefused
    """.split()
)


def texts(document: str) -> list[str]:
    """Paragraphs, items, headings and cells, without code; a span of code counts as a word."""
    document = re.sub(r"^```.*?^```", "", document, flags=re.DOTALL | re.MULTILINE)
    document = re.sub(r"<!--.*?-->", "", document, flags=re.DOTALL)
    document = re.sub(r"(?m)^(#.*)$", r"\1\n", document)
    document = re.sub(r"(?<=\n\n)(    .*\n)+", "", document)
    document = re.sub(r"`[^`]*`", "CODE", document)
    document = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", document)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.)\s)|\|", document)
    return [" ".join(block.split()) for block in blocks if block.strip(" \n|-:")]


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


def found(document: str) -> tuple[int, int, int]:
    blocks = texts(document)
    long = sum(len(s.split()) > MAX_WORDS for text in blocks for s in sentences(text))
    vague = sum(len(VAGUE.findall(text)) for text in blocks)
    speaks = sum(
        not PERSON.search(text[: match.start()])
        for text in blocks
        for match in SPEAKS.finditer(text)
    )
    return long, vague, speaks


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_keeps_the_rule_of_words(page: Path) -> None:
    assert found(page.read_text(encoding="utf-8")) == (0, 0, 0)


def docstrings(path: Path) -> Iterator[str]:
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, nodes) and (text := ast.get_docstring(node)):
            yield re.sub(r"\n-+\n", "\n\n", text)  # a heading's line


@pytest.mark.parametrize("modules", MODULES)
def test_docstrings_keep_the_rule_of_words(modules: str) -> None:
    for path in sorted(ROOT.glob(modules)):
        for text in docstrings(path):
            long, _, speaks = found(text)
            assert (long, speaks) == (0, 0), f"{path}: {text}"


def named() -> Mapping[str, set[str]]:
    """Class names of more than one place: events of all machines are one, shapes of all APIs, too;
    a checker of the simulator has the name of the thing that it checks."""
    places = defaultdict[str, set[str]](set)
    for path in (*ROOT.glob("epd/**/*.py"), *ROOT.glob("epd_lab/**/*.py")):
        place = path.relative_to(ROOT).as_posix()
        if place.startswith("epd_lab/sim/checkers/"):
            continue
        for room in ("epd/fsm/", *SHAPES):
            if place.startswith(room):
                place = "shapes" if room in SHAPES else room
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_a_class_has_a_name_of_its_own() -> None:
    assert named().keys() == SHARED


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_at_its_top_whom_it_is_for(page: Path) -> None:
    if page.parent.name == "docs":
        text = re.sub(r"^<!--.*?-->\s*", "", page.read_text(encoding="utf-8"))
        assert re.match(r"# .+\n\n\*For [^*]+\*\n", text)


def test_performance_is_short() -> None:
    for name, most in MAX_LINES.items():
        assert (ROOT / name).read_text(encoding="utf-8").count("\n") <= most


def test_the_rule_notices() -> None:
    assert found("A field says what it holds.\n") == (0, 1, 1)
    assert found("You know it, and `what` is code.\n") == (0, 0, 0)
    assert found("a " * 31 + "end.\n") == (1, 0, 0)
    assert found("| " + "a " * 20 + "| " + "a " * 20 + "|\n") == (0, 0, 0)
    assert found("```\nwho knows\n```\n\n    who knows\n") == (0, 0, 0)
