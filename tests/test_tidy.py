"""Style that is a test: sizes, forbidden words, and habits that the roles may not fall into.

Each rule is a function from a parsed file to the lines that break it; `test_rule` runs every rule
over its files, and `test_each_rule_can_fail` shows every rule a file that breaks it.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

from epd import __version__
from tests.files_by_process import FIRST, LAST

ROOT = Path(__file__).parent.parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
ROWS = ("    Row(", "    Ignore(")  # as tables in epd/fsm have them
# where a whole process ends, or where nothing but the end of a child is waited for
MAY_CANCEL_TASKS = ("epd/roles/base.py", "epd/cli/", "epd/runtime/", "epd_lab/sim/")
COMPOSES = {f"{name}.py" for name in ("commands", "elsewhere", "following", "processes")}  # ranks
GROUPS = [str(p.relative_to(ROOT)) for p in ROOT.glob("epd/groups/*.py") if p.name not in COMPOSES]
PURE = ("epd/roles/", "epd/fsm/", "epd/scheduling/", *sorted(GROUPS))
# Lines that say `Any`, at most, and why: what has no type must not spread to what has one.
ANY = {
    "epd/api/http/faults.py": (
        5,
        "JSON values beside types of msgspec, by which they are narrowed",
    ),
    "epd/api/http/shapes.py": (6, "any JSON value, which has no other name in a shape, and types"),
    "epd/setting.py": (6, "values of settings, whose kinds are checked by msgspec"),
    "epd/api/http/rarely.py": (1, "what is at a place"),
    "epd/later.py": (1, "a function of any module"),
    "epd/cli/": (47, "JSON of other servers, values of settings, objects of transformers"),
    "epd/engine/": (120, "tensors, modules and configurations of torch and transformers"),
    "epd/families/": (32, "modules and configurations of torch and transformers"),
    "epd/groups/device/": (2, "tensors and modules of torch"),
    "epd/media_files/": (14, "images and films of PIL and av"),
    "epd/model_files/": (18, "JSON of checkpoints, and tensors"),
    "epd/runtime/": (2, "a driver without types"),
    "epd/transport/": (37, "sockets, a driver, and memory that is a buffer or a reference"),
}


@dataclass(frozen=True)
class Source:
    """A Python file, parsed."""

    path: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Of the tree: every rule looks at them."""
        return tuple(ast.walk(self.tree))

    def walk(self) -> Iterator[ast.AST]:
        return iter(self.nodes)


Finding = tuple[int, str]
Rule = Callable[[Source], Iterator[Finding]]
RULES: dict[str, tuple[tuple[str, ...], Rule, str]] = {}


def rule(*where: str, breaks: str) -> Callable[[Rule], Rule]:
    """Register a rule for files below `where`; `breaks` is a source that it must object to."""

    def register(check: Rule) -> Rule:
        RULES[check.__name__] = (where, check, breaks)
        return check

    return register


@cache
def sources() -> tuple[Source, ...]:
    paths = sorted([*ROOT.glob("epd*/**/*.py"), *ROOT.glob("tests/**/*.py")])
    return tuple(parse(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths)


def parse(path: str, text: str) -> Source:
    return Source(path, text, ast.parse(text, path))


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in source.walk():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or an attribute chain, with `?` for what is neither."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def imported(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.walk():
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


# --- sizes ----------------------------------------------------------------------------------------


@rule("epd/", "epd_lab/", "tests/", breaks="x = 1\n" * 401)
def file_is_short(source: Source) -> Iterator[Finding]:
    """A row of a table is data, and stands with its machine."""
    num_lines = sum(not line.startswith(ROWS) for line in source.lines)
    if num_lines > MAX_FILE_LINES:
        yield 1, f"{num_lines} lines; at most {MAX_FILE_LINES}: split by reason to change"


@rule("epd/", "epd_lab/", "tests/", breaks="def f():\n" + "    x = 1\n" * 61)
def function_is_short(source: Source) -> Iterator[Finding]:
    for node in functions(source):
        assert node.end_lineno is not None
        first = node.body[0]
        documented = ast.get_docstring(node, clean=False) is not None
        doc_lines = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
        lines = node.end_lineno - node.lineno + 1 - doc_lines
        if lines > MAX_FUNCTION_LINES:
            yield node.lineno, f"{node.name} has {lines} lines; at most {MAX_FUNCTION_LINES}"


# --- words ----------------------------------------------------------------------------------------


@rule("epd/", "epd_lab/", "tests/", breaks="x = 1\n")
def module_has_docstring(source: Source) -> Iterator[Finding]:
    if source.tree.body and ast.get_docstring(source.tree) is None:
        yield 1, "a module says at its head what it is for"


@rule("epd/", "epd_lab/", "tests/", breaks="x = 1  # TO" + "DO: later\n")
def nothing_is_put_off(source: Source) -> Iterator[Finding]:
    for number, line in enumerate(source.lines, 1):
        if re.search(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b", line):
            yield number, "do it or open an issue"


@rule("epd/", "epd_lab/", "tests/", breaks="x = 1 \n")
def no_trailing_space(source: Source) -> Iterator[Finding]:
    for number, line in enumerate(source.text.split("\n"), 1):
        if line != line.rstrip() or "\t" in line:
            yield number, "trailing space or tab"


# --- faults that hide -----------------------------------------------------------------------------


@rule("epd/", "epd_lab/", breaks="import pickle\n")
def no_pickle(source: Source) -> Iterator[Finding]:
    for line, name in imported(source):
        if name.split(".")[0] in {"pickle", "cloudpickle", "marshal", "shelve", "dill"}:
            yield line, f"{name} runs code that a peer chose"


@rule("epd/", "epd_lab/", "tests/", breaks="try:\n    f()\nexcept Exception:\n    pass\n")
def no_swallowed_exception(source: Source) -> Iterator[Finding]:
    for node in source.walk():
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is None:
            yield node.lineno, "a bare except catches Ctrl-C and cancellation too"
        elif dotted(node.type) in {"Exception", "BaseException"} and all(
            isinstance(statement, ast.Pass | ast.Continue) for statement in node.body
        ):
            yield node.lineno, "an exception of any kind is swallowed without a trace"


@rule("epd/", "epd_lab/", breaks="task.cancel()\n")
def no_task_is_cancelled(source: Source) -> Iterator[Finding]:
    """Cancelling is an event on a machine; timers and handles may be cancelled, tasks may not."""
    if source.path.startswith(MAY_CANCEL_TASKS):
        return
    for node in source.walk():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = dotted(node.func.value)
            if node.func.attr == "cancel" and re.search(r"task|future", owner.lower()):
                yield node.lineno, f"{owner}.cancel(): let it finish, or fire an event"


def lines_with_any(source: Source) -> set[int]:
    return {n.lineno for n in source.walk() if isinstance(n, ast.Name) and n.id == "Any"}


@rule("epd/", breaks="x: dict[str, Any] = {}\n")
def any_is_what_a_library_forces(source: Source) -> Iterator[Finding]:
    """And then it stands in `ANY`, with its reason."""
    if not source.path.startswith(tuple(ANY)):
        for line in lines_with_any(source):
            yield line, "Any: name the type, or take an object and narrow it"


# --- roles, machines, scheduling ------------------------------------------------------------------


@rule("epd/roles/", "epd/groups/", breaks="if machine.state is S.IDLE:\n    pass\n")
def roles_do_not_ask_the_state(source: Source) -> Iterator[Finding]:
    for node in source.walk():
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            names = [dotted(operand) for operand in operands]
            if any(name.endswith((".state", "._state")) for name in names):
                yield node.lineno, "what depends on the state is a row of its table"


@rule(*PURE, breaks="import time\n")
def time_and_chance_are_injected(source: Source) -> Iterator[Finding]:
    for line, name in imported(source):
        if name.split(".")[0] in {"time", "random", "secrets", "uuid", "datetime", "threading"}:
            yield line, f"{name}: take it from the ports, or the simulator cannot replay it"


@rule(*PURE, breaks="async with asyncio.TaskGroup() as group:\n    pass\n")
def order_is_never_by_address(source: Source) -> Iterator[Finding]:
    for node in source.walk():
        name = dotted(node)
        if name.split(".")[-1] == "TaskGroup" or name == "asyncio.wait":
            yield getattr(node, "lineno", 1), f"{name} goes through a set of tasks"
        iterated = node.iter if isinstance(node, ast.For | ast.comprehension) else None
        is_set = isinstance(iterated, ast.Set | ast.SetComp) or (
            isinstance(iterated, ast.Call) and dotted(iterated.func) in {"set", "frozenset"}
        )
        if iterated is not None and is_set:
            yield iterated.lineno, "sort it, or use a dict: a set of strings has no fixed order"


# --- the tests of the rules -----------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_rule(name: str) -> None:
    where, check, _ = RULES[name]
    checked = [source for source in sources() if source.path.startswith(where)]
    found = [
        f"{source.path}:{line}: {text}"
        for source in checked
        for line, text in sorted(check(source))
    ]
    assert checked, f"no files below {where}"
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("name", RULES)
def test_each_rule_can_fail(name: str) -> None:
    where, check, breaks = RULES[name]
    if name == "order_is_never_by_address":
        breaks = f"async def f():\n    {breaks.replace(chr(10), chr(10) + '    ')}"
        assert list(check(parse(where[0], "for x in set(names):\n    print(x)\n")))
    assert list(check(parse(f"{where[0]}broken.py", breaks)))
    assert not list(check(parse(f"{where[0]}fine.py", '"""A fine module."""\n\nx = 1\n')))


def reaches(source: Source) -> int:
    """Private names of objects other than self, read or patched."""
    own = {"self", "cls", "super"}
    read = sum(
        isinstance(node, ast.Attribute)
        and re.match(r"_[a-z]", node.attr) is not None
        and dotted(node.value.func if isinstance(node.value, ast.Call) else node.value) not in own
        for node in source.walk()
    )
    patched = re.findall(r"(?:patch\.object|setattr)\([^\"]*,\s*\"_[a-z]", source.text)
    return read + len(patched)


def test_tests_of_roles_look_at_what_a_role_shows() -> None:
    assert not [s.path for s in sources() if s.path.startswith("tests/roles/") and reaches(s)]
    broken = 'a._b\nself._c\nsuper()._d\npatch.object(a.b, "_e")\n'
    assert reaches(parse("tests/roles/broken.py", broken)) == 2


@pytest.mark.parametrize("where", ANY)
def test_any_does_not_spread(where: str) -> None:
    most, _ = ANY[where]
    found = sum(len(lines_with_any(s)) for s in sources() if s.path.startswith(where))
    assert found <= most, f"{where} has {found} lines with Any; at most {most}"
    assert found > most // 2, f"{where} has {found} lines with Any: bring its bound down"


def test_no_module_is_called_utils() -> None:
    vague = {"utils", "util", "helpers", "misc", "common"}
    found = [source.path for source in sources() if Path(source.path).stem in vague]
    assert not found, f"name each after what it holds: {found}"


def test_links_in_the_documents_lead_somewhere() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("epd/**/*.md")]
    broken = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in documents
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
        if not target.startswith("http") and not (document.parent / target).exists()
    ]
    assert len(documents) > 5
    assert not broken, "\n" + "\n".join(broken)


def test_files_that_are_put_side_by_side_exist() -> None:
    assert all(list(ROOT.glob(f"{beginning}*")) for beginning in (*FIRST, *LAST))


def test_every_package_is_on_the_map() -> None:
    text = (ROOT / "README.md").read_text()
    packages = [path.parent.relative_to(ROOT) for path in ROOT.glob("epd*/*/__init__.py")]
    assert len(packages) > 10
    assert not [str(name) for name in packages if f"`{name}/`" not in text]


def test_packages_tell_their_types_and_their_page_links_nowhere() -> None:
    """A relative link leads nowhere on the page of a package."""
    for name, where in (("epd", "."), ("epd_lab", "epd_lab")):
        project = tomllib.loads((ROOT / where / "pyproject.toml").read_text())
        assert "py.typed" in project["tool"]["setuptools"]["package-data"][name]
        assert (ROOT / name / "py.typed").is_file()
        page = project["project"].get("readme", {"text": ""})["text"]
        assert "](" not in page and "http" not in re.sub("http://127", "", page)


def test_the_laboratory_is_installed_whole() -> None:
    """Its folder is the package itself, so its packages are listed by hand."""
    project = tomllib.loads((ROOT / "epd_lab/pyproject.toml").read_text())
    paths = [path.parent.relative_to(ROOT) for path in ROOT.glob("epd_lab/**/__init__.py")]
    names = sorted(".".join(path.parts) for path in paths)
    assert sorted(project["tool"]["setuptools"]["packages"]) == names
    assert project["project"]["version"] == __version__
