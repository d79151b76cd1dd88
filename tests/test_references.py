"""Files, modules and tests that a document, a docstring or a comment names exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
CODE = sorted(path for top in ("epd", "epd_lab", "tests") for path in ROOT.glob(f"{top}/**/*.py"))
MADE = ("build/", "DIR/", "FILE.")  # made when they are needed, or to be filled in
SPANS = ("instance", "state", "key", "num_tokens")  # an attribute of a span
PATH = re.compile(r"(?<![\w/.:~$*-])((?:[\w-]+/)*[\w-]+\.py|(?:[\w-]+/)+[\w.-]+)(?:::(\w+))?")
DOTTED = re.compile(r"(?<![\w/.])((?:[a-z]\w*\.)+\w+)")
URL = re.compile(r"https?://\S+")
PROSE = re.compile(r'"""(.*?)"""|(?:^|  )# (.*?)$', re.DOTALL | re.MULTILINE)
SUFFIXES = {".json", ".md", ".py", ".toml", ".yaml", ".yml"}
TOPS = sorted(path.name for path in [*ROOT.glob("epd/*"), *ROOT.glob("epd_lab/*")] if path.is_dir())


@cache
def files() -> dict[str, Path]:
    """By each end of its path, as in `fsm/kernel.py`."""
    found: dict[str, Path] = {}
    others = [path for top in ("docs", "tests", "training") for path in ROOT.glob(f"{top}/**/*")]
    for path in [*CODE, *others, *ROOT.glob("*.*"), *ROOT.glob("e*/**/*.*")]:
        parts = path.relative_to(ROOT).parts
        for first in range(len(parts)):
            found.setdefault("/".join(parts[first:]), path)
    return found


@cache
def folders() -> set[str]:
    return {str(Path(name).parent) for name in files()}


def has(path: Path, names: list[str]) -> bool:
    """Whether the file has this name, or this name of a class; of a package, its page."""
    text = path.read_text()
    return all(re.search(rf"\b{re.escape(name)}\b", text) for name in names[:2])


def is_path(name: str, function: str) -> bool:
    name = name.rstrip(".")
    path = files().get(name) or files().get(f"{name}.py")
    if path is None:
        return name in folders()
    return not function or re.search(rf"(def|class) {function}\b", path.read_text()) is not None


def is_dotted(name: str) -> bool:
    """A module, or a name in one."""
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        place = "/".join(parts[:size])
        for path in (f"{place}.py", f"{place}/__init__.py"):
            if path in files():
                return has(files()[path], parts[size:])
    return False


def broken(text: str) -> Iterator[str]:
    """What the text names and what is not there."""
    text = URL.sub("", text)
    for name, function in PATH.findall(text):
        is_ours = name.split("/")[0] in {*TOPS, "epd", "epd_lab", "tests", "docs"}
        if (name.endswith(".py") or (is_ours and "/" in name)) and not (
            any(made in name for made in MADE) or is_path(name, function)
        ):
            yield f"{name}::{function}" if function else name
    for name in DOTTED.findall(text):
        parts = name.split(".")
        is_package = parts[0] in {"epd", "epd_lab", "tests"} and f".{parts[-1]}" not in SUFFIXES
        if is_package and parts[1] not in SPANS and not is_dotted(name):
            yield name


def prose(text: str) -> str:
    """Comments and docstrings of a module, as far as their marks show them."""
    return "\n".join("".join(found) for found in PROSE.findall(text))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_what_a_page_names_exists(page: Path) -> None:
    assert not sorted(set(broken(page.read_text())))


def test_what_docstrings_and_comments_name_exists() -> None:
    assert not [
        f"{path.relative_to(ROOT)}: {name}"
        for path in CODE
        for name in sorted(set(broken(prose(path.read_text()))))
    ]


@pytest.mark.parametrize(
    "name",
    ["fsm/kernels.py", "tests/test_tidy.py::test_ru", "epd.fsm.kernel.Pillar", "engine/models/x"],
)
def test_what_is_not_there_is_found(name: str) -> None:
    assert list(broken(f"As in `{name}`.")) == [name]
    assert not list(broken("`fsm/kernel.py`, tests/test_tidy.py::test_rule, epd.fsm.kernel.Row"))
