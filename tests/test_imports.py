"""Who may import whom (docs/architecture.md, section 3), read from the syntax of every module.

The rules are what lets one coroutine run under ZMQ and GPU threads and under the simulator alike,
and what keeps the command line and the gateway free of torch. An import inside a function counts
like one at the top, except where a rule says so.
"""

from __future__ import annotations

import ast
import contextlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from epd.cli.main import VERBS

ROOT = Path(__file__).parent.parent
STDLIB = sys.stdlib_module_names

NOT_PURE = frozenset({"asyncio", "logging", "random", "secrets", "threading", "time", "uuid"})
NOT_IN_ROLES = NOT_PURE - {"asyncio"}
TENSORS = frozenset({"accelerate", "safetensors", "torch", "transformers"})


@dataclass(frozen=True)
class Area:
    """Modules of a kind, and all that they may import.

    `epd`: prefixes of the project's own modules. `third_party`: packages, or None for any.
    `not_stdlib`: standard modules that they may not. `lazily`: packages allowed inside functions.
    """

    epd: tuple[str, ...]
    third_party: frozenset[str] | None = frozenset()
    not_stdlib: frozenset[str] = frozenset()
    lazily: frozenset[str] = frozenset()


def packages(*names: str) -> frozenset[str]:
    return frozenset(names)


PORTS = ("epd.api.port", "epd.engine.base", "epd.transport.base")
DATA = (
    "epd.failure",
    "epd.layouts",
    "epd.messages",
    "epd.observed",
    "epd.ranges",
    "epd.records",
    "epd.room_messages",
    "epd.shares",
    "epd.wire",
)
LEAVES = ("epd.config", "epd.dropped", "epd.errors", "epd.topology", *DATA)
TORCH_FREE = (
    "epd.engine.avi",
    "epd.engine.checkpoint",
    "epd.engine.config_sizes",
    "epd.engine.container",
    "epd.engine.deadline_file",
    "epd.engine.families",
    "epd.engine.film_header",
    "epd.engine.fingerprint",
    "epd.engine.finite",
    "epd.engine.geometry",
    "epd.engine.grammar",
    "epd.engine.image_opening",
    "epd.engine.image_header",
    "epd.engine.isom",
    "epd.engine.matroska",
    "epd.engine.model_config",
    "epd.engine.model_directory",
    "epd.engine.pieces",
    "epd.engine.stored",
    "epd.engine.stored_formats",
    "epd.engine.video",
)

# The longest prefix of a module's name decides.
AREAS = {
    "epd.errors": Area((), not_stdlib=NOT_PURE),
    "epd.setting": Area((), packages("msgspec"), NOT_PURE),
    "epd.config": Area(("epd.errors", "epd.setting"), packages("msgspec"), NOT_PURE),
    "epd.wire": Area((), packages("msgspec"), NOT_PURE),
    "epd.shares": Area((), not_stdlib=NOT_PURE),
    "epd.ranges": Area((), packages("msgspec"), NOT_PURE),
    "epd.dropped": Area((), not_stdlib=NOT_PURE),
    "epd.layouts": Area(("epd.ranges", "epd.shares", "epd.wire"), packages("msgspec"), NOT_PURE),
    "epd.records": Area(("epd.layouts", "epd.ranges", "epd.wire"), packages("msgspec"), NOT_PURE),
    "epd.failure": Area(("epd.ranges", "epd.wire"), not_stdlib=NOT_PURE),
    "epd.observed": Area(("epd.ranges", "epd.wire"), not_stdlib=NOT_PURE),
    "epd.room_messages": Area(
        ("epd.failure", "epd.layouts", "epd.ranges", "epd.records", "epd.wire"),
        not_stdlib=NOT_PURE,
    ),
    "epd.messages": Area(
        (
            "epd.failure",
            "epd.layouts",
            "epd.observed",
            "epd.ranges",
            "epd.records",
            "epd.room_messages",
            "epd.wire",
        ),
        packages("msgspec"),
        NOT_PURE,
    ),
    "epd.topology": Area(("epd.config",), not_stdlib=NOT_PURE),
    "epd.fsm": Area(
        ("epd.fsm", "epd.api.port", "epd.scheduling.placement", *DATA),
        packages("transitions"),
        NOT_PURE,
    ),
    "epd.scheduling": Area(("epd.scheduling", *LEAVES), not_stdlib=NOT_PURE),
    "epd.transport.base": Area(("epd.errors", "epd.messages"), not_stdlib=NOT_PURE),
    "epd.engine.base": Area(
        ("epd.errors", "epd.messages"), not_stdlib=NOT_PURE, lazily=packages("torch")
    ),
    "epd.api.port": Area(("epd.messages", "epd.observed"), not_stdlib=NOT_PURE),
    "epd.roles": Area(
        ("epd.roles", "epd.fsm", "epd.scheduling", *LEAVES, *PORTS), not_stdlib=NOT_IN_ROLES
    ),
    "epd.transport": Area(
        ("epd.transport", *LEAVES),
        packages("msgspec", "numpy", "zlib_ng", "zmq"),
        lazily=packages("cuda", "mooncake", "torch"),
    ),
    "epd.engine": Area(
        ("epd.engine", *LEAVES), packages("av", "msgspec", "numpy", "PIL", "triton") | TENSORS
    ),
    **dict.fromkeys(TORCH_FREE, Area((*TORCH_FREE, *LEAVES, *PORTS), packages("msgspec"))),
    # For types, and where weights are read; a test below shows that it is not loaded.
    **dict.fromkeys(
        ("epd.engine.stored", "epd.engine.stored_formats"),
        Area((*TORCH_FREE, *LEAVES), packages("torch")),
    ),
    "epd.engine.container": Area((*TORCH_FREE, "epd.engine.base"), lazily=packages("av")),
    "epd.engine.image_opening": Area((*TORCH_FREE, *PORTS), lazily=packages("PIL")),
    "epd.engine.finite": Area((), packages("llguidance")),  # for types
    "epd.engine.grammar": Area((*TORCH_FREE, *LEAVES, *PORTS), packages("llguidance", "numpy")),
    "epd.api": Area(
        ("epd.api", *LEAVES, *PORTS, *TORCH_FREE),
        packages("aiohttp", "av", "httptools", "jinja2", "msgspec", "PIL", "pybase64")
        | packages("llguidance", "prometheus_client", "tokenizers", "uvicorn", "uvloop", "yarl"),
        lazily=packages("opentelemetry"),
    ),
    "epd.tiny": Area(("epd.tiny",)),
    "epd_lab": Area(()),
    **dict.fromkeys(
        (
            *("epd_lab.diagrams.models_page", "epd_lab.diagrams.settings_page"),
            "epd_lab.diagrams.verb",
            *("epd_lab.sim.cli_replay", "epd_lab.sim.page", "epd_lab.sim.verb"),
        ),
        Area(("epd", "epd_lab"), packages("msgspec")),
    ),
    "epd_lab.tiny": Area(
        ("epd_lab.tiny", "epd.tiny"), packages("jinja2", "numpy", "PIL", "tokenizers") | TENSORS
    ),
    "epd_lab.sim": Area(
        ("epd_lab.sim", "epd.roles", "epd.fsm", "epd.scheduling", "epd.transport", *LEAVES, *PORTS),
        packages("msgspec", "numpy"),
    ),
    "epd_lab.diagrams": Area(
        ("epd_lab.diagrams", "epd.fsm", "epd.roles", *LEAVES), packages("transitions")
    ),
    "epd_lab.formal": Area(("epd_lab.formal", "epd.fsm"), not_stdlib=NOT_PURE),
    "epd_lab.bench": Area(("epd", "epd_lab"), None),
    "epd_lab.plan": Area(("epd", "epd_lab"), packages("msgspec")),
    "epd.cli": Area(("epd",), None),
    "epd.runtime": Area(("epd",), None),
    "epd": Area(("epd.cli",)),
}


@dataclass(frozen=True)
class Import:
    module: str  # who imports
    name: str  # what, with the imported name: `epd.fsm.kernel.Row`
    line: int
    lazy: bool  # inside a function


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(module: str, text: str) -> list[Import]:
    tree = ast.parse(text)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lazy = {id(node) for function in functions for node in ast.walk(function)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: write absolute imports"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [Import(module, name, node.lineno, id(node) in lazy) for name in names]
    return found


def area_of(module: str) -> Area:
    prefix = max((p for p in AREAS if within(module, p)), key=len)
    return AREAS[prefix]


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def objection(an_import: Import) -> str:
    """Why the importing module may not have this, or an empty string."""
    area = area_of(an_import.module)
    top = an_import.name.split(".")[0]
    if top in {"epd", "epd_lab"}:
        allowed = an_import.name == "epd.__version__" or any(
            within(an_import.name, prefix) for prefix in area.epd
        )
    elif top in STDLIB:
        allowed = top not in area.not_stdlib
    else:
        allowed = area.third_party is None or top in area.third_party
        allowed = allowed or (an_import.lazy and top in area.lazily)
    if allowed:
        return ""
    return f"{an_import.module}:{an_import.line}: may not import {an_import.name}"


def modules() -> list[Path]:
    return sorted([*(ROOT / "epd").rglob("*.py"), *(ROOT / "epd_lab").rglob("*.py")])


def all_imports() -> list[Import]:
    return [
        an_import
        for path in modules()
        for an_import in imports_of(module_name(path), path.read_text())
    ]


def test_every_module_imports_only_what_its_area_may() -> None:
    found = [text for text in map(objection, all_imports()) if text]
    assert not found, "\n" + "\n".join(found)


def test_no_module_imports_itself_by_a_detour() -> None:
    """Imports inside functions and for types alone count, too."""
    names = {module_name(path) for path in modules()}
    imports: dict[str, set[str]] = {name: set() for name in names}
    for an_import in all_imports():
        found = an_import.name if an_import.name in names else an_import.name.rpartition(".")[0]
        if found in names:
            imports[an_import.module].add(found)
    with contextlib.suppress(StopIteration):
        while True:  # whoever imports nothing that is left stands at the bottom
            bottom = next(name for name, below in imports.items() if not below & imports.keys())
            del imports[bottom]
    assert not imports, f"cycles among {sorted(imports)}"


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("epd.roles.encode", "import zmq"),
        ("epd.roles.encode", "import torch"),
        ("epd.roles.encode", "import uvloop"),
        ("epd.roles.encode", "from time import monotonic"),
        ("epd.roles.encode", "from random import random"),
        ("epd.roles.encode", "from epd.transport.zmq_bus import ZmqBus"),
        ("epd.roles.encode", "from epd.engine.language import TorchLanguageEngine"),
        ("epd.fsm.kernel", "import asyncio"),
        ("epd.fsm.kernel", "import logging"),
        ("epd.scheduling.batching", "import asyncio"),
        ("epd.scheduling.batching", "def f():\n    import torch"),
        ("epd.transport.shm", "from epd.roles.base import Actor"),
        ("epd.engine.language", "from epd.roles.base import Actor"),
        ("epd.api.app", "from epd.roles.gateway import Gateway"),
        ("epd.api.app", "import torch"),
        ("epd.api.app", "from epd.engine.language import TorchLanguageEngine"),
        ("epd.engine.geometry", "import torch"),
        ("epd.engine.base", "import torch"),
        ("epd.config", "from epd.messages import Address"),
        ("epd.cli.main", "from epd_lab.sim import verb"),
        ("epd_lab.sim.loop", "import uvloop"),
    ],
)
def test_the_rules_can_be_broken(module: str, line: str) -> None:
    assert [objection(found) for found in imports_of(module, line)] != [""]


# --- what really gets loaded ----------------------------------------------------------------------


def loaded_by(code: str) -> set[str]:
    """Top-level names in sys.modules of a fresh process after `code`."""
    report = "import sys; print(' '.join(sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {name.split(".")[0] for name in done.stderr.split()}


HELP = """
from epd.cli.main import main
status = main(["--help"])
assert status == 0, status
"""


def test_help_loads_nothing_but_the_standard_library() -> None:
    """The help text answers at once: nothing installed is imported for it, not even msgspec."""
    blank = loaded_by("pass")
    loaded = loaded_by(HELP) - blank
    assert {name for name in loaded if name not in STDLIB and name != "epd"} == set()
    assert not loaded & {"asyncio", "concurrent", "http", "multiprocessing", "socket", "subprocess"}


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_loads_no_library(verb: str) -> None:
    loaded = loaded_by(HELP.replace("--help", f'{verb}", "--help'))
    assert not loaded & {*TENSORS, "zmq", "uvloop", "aiohttp", "numpy", "tokenizers", "PIL"}


def test_the_gateway_process_loads_neither_torch_nor_transformers() -> None:
    """Every module that a gateway is made of, imported in one process."""
    paths = [*(ROOT / "epd/api").glob("*.py"), *(ROOT / "epd/transport").glob("*.py")]
    paths += [*(ROOT / "epd/roles").glob("*.py"), *(ROOT / "epd/cli").glob("**/*.py")]
    paths += (ROOT / "epd/runtime").glob("*.py")
    names = sorted(module_name(path) for path in paths) + list(TORCH_FREE)
    code = "\n".join(f"import {name}" for name in names if not name.endswith("__main__"))
    loaded = loaded_by(code)
    assert not loaded & {*TENSORS, "triton", "mooncake", "av"}
