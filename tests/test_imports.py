"""Who may import whom (docs/architecture.md, section 3), read from the syntax of every module.

The rules are what lets one coroutine run under ZMQ and GPU threads and under the simulator alike,
and what keeps the command line and the gateway free of torch. An import inside a function counts
like one at the top, except where a rule says so.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STDLIB = sys.stdlib_module_names

MAX_FILES = 25
LATER = re.compile(r"epd(_lab)?(\.\w+)+:\w+")  # a place by which `epd.later` imports

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


PORTS = ("epd.frontend", "epd.engine.base", "epd.transport.base")
DATA = (
    "epd.failure",
    "epd.keys",
    "epd.layouts",
    "epd.messages",
    "epd.observed",
    "epd.ranges",
    "epd.records",
    "epd.room_messages",
    "epd.shares",
    "epd.wire",
)
LEAVES = ("epd.config", "epd.dropped", "epd.errors", "epd.later", "epd.topology", *DATA)
READERS = ("epd.media_files", "epd.model_files", "epd.engine.weights.pieces")
FILES = ("epd.families.registry", *READERS)
STORED = ("epd.engine.weights.stored", "epd.engine.weights.stored_formats")
# Of what computes.
TREE = packages("av", "flash_attn", "msgspec", "numpy", "PIL", "triton") | TENSORS
TRANSPORT = packages("msgspec", "numpy", "zlib_ng", "zmq")
TRANSPORT_LAZY = packages("cuda", "mooncake", "torch")


def roles(*names: str) -> tuple[str, ...]:
    return tuple(f"epd.roles.{name}" for name in names)


def api(*names: str) -> tuple[str, ...]:
    return (*(f"epd.api.{name}" for name in names), "epd.frontend", "epd.in_thread", *LEAVES)


HTTP = packages("httptools", "msgspec", "pybase64", "uvicorn")
SHARED_ROLES = roles(
    *("behind_gateways", "place"),
    *("adapter_objection", "at_hand", "base", "bell", "cache_events", "fan_out", "hands"),
    *("health", "incoming", "links", "mailbox", "member", "outgoing", "ports", "progress"),
    *("rooms", "timers", "unsent", "watching"),
)


def role(*own: str) -> Area:
    """A folder of one role, or of what several share."""
    allowed = (*roles(*own), *SHARED_ROLES, "epd.groups", "epd.fsm", "epd.scheduling")
    return Area((*allowed, *LEAVES, *PORTS), not_stdlib=NOT_IN_ROLES)


def family(*parents: str) -> Area:
    return Area(("epd.engine", *FILES, *LEAVES, *(f"epd.families.{p}" for p in parents)), TREE)


FOLDERS = [path.parent.name for path in (ROOT / "epd" / "families").glob("*/__init__.py")]
# Of families that have parts of another.
PARENTS = dict.fromkeys(("qwen3_5", "glm", "paddleocr_vl"), ("qwen_vl",)) | {
    "deepseek_ocr2": ("internvl",),
    "mistral3": ("kimi",),
}


# The longest prefix of a module's name decides.
AREAS = {
    "epd.errors": Area((), not_stdlib=NOT_PURE),
    "epd.in_thread": Area((), not_stdlib=NOT_PURE - {"asyncio", "threading"}),
    "epd.later": Area((), not_stdlib=NOT_PURE),
    "epd.setting": Area((), packages("msgspec"), NOT_PURE),
    "epd.config": Area(("epd.errors", "epd.setting"), packages("msgspec"), NOT_PURE),
    "epd.wire": Area((), packages("msgspec"), NOT_PURE),
    "epd.shares": Area((), not_stdlib=NOT_PURE),
    "epd.ranges": Area((), packages("msgspec"), NOT_PURE),
    "epd.dropped": Area((), not_stdlib=NOT_PURE),
    "epd.layouts": Area(("epd.ranges", "epd.shares", "epd.wire"), packages("msgspec"), NOT_PURE),
    "epd.records": Area(
        ("epd.layouts", "epd.observed", "epd.ranges", "epd.wire"), packages("msgspec"), NOT_PURE
    ),
    "epd.failure": Area(("epd.ranges", "epd.wire"), not_stdlib=NOT_PURE),
    "epd.keys": Area((), not_stdlib=NOT_PURE),
    "epd.observed": Area(("epd.ranges", "epd.wire"), not_stdlib=NOT_PURE),
    "epd.room_messages": Area(
        ("epd.failure", "epd.layouts", "epd.ranges", "epd.records", "epd.wire"),
        not_stdlib=NOT_PURE,
    ),
    "epd.messages": Area(DATA, packages("msgspec"), NOT_PURE),
    "epd.topology": Area(("epd.config",), not_stdlib=NOT_PURE),
    "epd.frontend": Area(("epd.messages", "epd.observed"), not_stdlib=NOT_PURE),
    "epd.fsm": Area(
        ("epd.fsm", "epd.frontend", "epd.scheduling.placement", *DATA),
        packages("transitions"),
        NOT_PURE,
    ),
    "epd.scheduling": Area(("epd.scheduling", *LEAVES), not_stdlib=NOT_PURE),
    # What is read of a model and of media, without torch.
    **dict.fromkeys(READERS, Area((*FILES, *STORED, *LEAVES), packages("msgspec"))),
    # For types, and where weights are read; a test below shows that it is not loaded.
    **dict.fromkeys(
        STORED, Area((*FILES, *STORED, "epd.engine.kernels.packed", *LEAVES), packages("torch"))
    ),
    "epd.media_files.avif_child": Area((*FILES, *LEAVES), packages("PIL")),
    "epd.media_files.container": Area((*FILES, *LEAVES), lazily=packages("av")),
    "epd.media_files.image_opening": Area((*FILES, *LEAVES), lazily=packages("PIL")),
    "epd.model_files.finite": Area((), packages("llguidance")),  # for types
    "epd.model_files.grammar": Area((*FILES, *LEAVES, *PORTS), packages("llguidance", "numpy")),
    # What computes.
    "epd.engine.base": Area(
        ("epd.errors", "epd.messages"), not_stdlib=NOT_PURE, lazily=packages("torch")
    ),
    "epd.engine": Area(
        ("epd.engine", "epd.groups.device", "epd.scheduling.slice_cost", *FILES, *LEAVES), TREE
    ),
    "epd.groups.device": Area(("epd.engine", "epd.groups.device", *LEAVES), TREE),
    "epd.families": Area((*FILES, *LEAVES)),
    **{f"epd.families.{name}": family(name, *PARENTS.get(name, ())) for name in FOLDERS},
    **{
        f"epd.families.{name}.sizes": Area(
            (*(f"epd.families.{p}.sizes" for p in PARENTS.get(name, ())), *FILES, *LEAVES)
        )
        for name in FOLDERS
    },
    # The ways that bytes take.
    "epd.transport.base": Area(("epd.errors", "epd.messages"), not_stdlib=NOT_PURE),
    "epd.transport": Area(("epd.transport", *LEAVES), TRANSPORT, lazily=TRANSPORT_LAZY),
    # The actors.
    "epd.groups": Area(
        ("epd.groups", "epd.roles.incoming", "epd.fsm", "epd.scheduling", *LEAVES, *PORTS),
        not_stdlib=NOT_IN_ROLES,
    ),
    **{
        f"epd.groups.{name}": Area(("epd",), None)
        for name in ("commands", "elsewhere", "following", "processes")
    },
    "epd.roles": role("gateway"),
    "epd.roles.compose": role("gateway", "encode", "prefill", "decode", "steps"),
    "epd.roles.holding": role("compose"),
    "epd.roles.gateway": role("gateway"),
    "epd.roles.encode": role("encode"),
    "epd.roles.prefill": role("prefill", "steps"),
    "epd.roles.decode": role("decode", "steps"),
    "epd.roles.steps": role("steps"),
    "epd.roles.watching": role("gateway"),
    # The front.
    "epd.api": Area(
        ("epd.api", *LEAVES, "epd.frontend", *FILES),
        packages("jinja2", "prometheus_client", "tokenizers", "uvloop") | HTTP,
    ),
    "epd.api.http": Area(
        (*api("http"), "epd.scheduling.admission"), HTTP | packages("aiohttp", "yarl")
    ),
    "epd.api.schema": Area(api("schema"), packages("msgspec")),
    "epd.api.asked": Area(
        (*api("asked", "http", "schema"), *FILES), packages("llguidance", "msgspec")
    ),
    "epd.api.expendable": Area(
        (*api("asked", "expendable", "http"), *FILES),
        packages("llguidance", "msgspec"),
    ),
    "epd.api.prompts": Area(
        (*api("answers.detokenize", "asked", "expendable", "http", "prompts"), *FILES),
        packages("aiohttp", "jinja2", "msgspec", "PIL", "tokenizers", "yarl"),
    ),
    # `epd run` checks what it is given for a model by the reader of bodies.
    "epd.api.answers": Area(
        api("answers", "asked", "http", "prompts"),
        packages("msgspec", "tokenizers"),
    ),
    "epd.api.openai": Area(
        (*api("answers", "asked", "http", "openai", "prompts"), *FILES),
        packages("msgspec"),
    ),
    **{
        f"epd.api.{name}": Area(
            api(name, "answers", "asked", "http", "openai"),
            packages("msgspec"),
        )
        for name in ("anthropic", "responses")
    },
    "epd.api.document": Area(("epd.api", "epd.frontend", *LEAVES), packages("msgspec")),
    "epd.api.watching": Area(
        api("answers", "asked", "http", "prompts", "watching", "web"),
        packages("msgspec", "prometheus_client"),
        lazily=packages("opentelemetry"),
    ),
    # The laboratory, and what composes.
    "epd.tiny": Area(("epd.tiny",)),
    "epd_lab": Area(()),
    **dict.fromkeys(
        (
            *("epd_lab.diagrams.families_page", "epd_lab.diagrams.models_page"),
            *("epd_lab.diagrams.settings_page", "epd_lab.diagrams.verb"),
            *("epd_lab.sim.cli.replay", "epd_lab.sim.reports.page", "epd_lab.sim.verb"),
        ),
        Area(("epd", "epd_lab"), packages("msgspec")),
    ),
    "epd_lab.sim": Area(
        (
            *("epd_lab.sim", "epd_lab.formal", "epd.groups", "epd.roles", "epd.fsm"),
            *("epd.scheduling", "epd.transport", "epd_lab.trace_events", *LEAVES, *PORTS),
            "epd.engine.adapter_list",
        ),
        packages("msgspec", "numpy"),
    ),
    "epd_lab.diagrams": Area(
        ("epd_lab.diagrams", "epd.fsm", "epd.groups", "epd.roles", *LEAVES),
        packages("transitions"),
    ),
    "epd_lab.formal": Area(
        ("epd_lab.formal", "epd.fsm", "epd.frontend", *LEAVES),
        packages("msgspec"),
        not_stdlib=NOT_PURE,
    ),
    "epd_lab.bench": Area(("epd", "epd_lab"), None),
    "epd_lab.plan": Area(("epd", "epd_lab"), packages("msgspec")),
    "epd.cli": Area(("epd",), None),
    "epd.runtime": Area(("epd",), None),
    "epd.vllm": Area(("epd",), packages("aiohttp", "msgspec", "torch")),
    "epd.vllm.connector": Area(("epd",), packages("msgspec", "torch", "vllm")),
    "epd": Area(("epd.cli",)),
}


@dataclass(frozen=True)
class Import:
    module: str  # who imports
    name: str  # what, with the imported name: `epd.fsm.kernel.Row`
    line: int
    lazy: bool  # inside a function, or by `epd.later`


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
        elif isinstance(node, ast.Constant) and LATER.fullmatch(str(node.value)):
            names = [node.value.replace(":", ".")]
        else:
            continue
        is_lazy = id(node) in lazy or isinstance(node, ast.Constant)
        found += [Import(module, name, node.lineno, is_lazy) for name in names]
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
        ("epd.roles.encode.role", "import zmq"),
        ("epd.roles.encode.role", "import torch"),
        ("epd.roles.encode.role", "import uvloop"),
        ("epd.roles.encode.role", "from time import monotonic"),
        ("epd.roles.encode.role", "from random import random"),
        ("epd.roles.encode.role", "from epd.transport.bus.zmq import ZmqBus"),
        ("epd.roles.encode.role", "from epd.engine.language.engine import TorchLanguageEngine"),
        ("epd.fsm.kernel", "import asyncio"),
        ("epd.fsm.kernel", "import logging"),
        ("epd.scheduling.batching", "import asyncio"),
        ("epd.scheduling.batching", "def f():\n    import torch"),
        ("epd.transport.shm.backend", "from epd.roles.base import Actor"),
        ("epd.engine.language.engine", "from epd.roles.base import Actor"),
        ("epd.api.app", "from epd.roles.gateway.role import Gateway"),
        ("epd.api.app", "import torch"),
        ("epd.api.app", "from epd.engine.language.engine import TorchLanguageEngine"),
        ("epd.api.prompts.prepare", "from epd.engine.base import MediaLayout"),
        ("epd.fsm.generation", "from epd.api.http.errors import ApiError"),
        ("epd.engine.factory", "from epd.families.kimi.adapter import KimiAdapter"),
        ("epd.engine.language.engine", "from epd.families.text.adapter import Llama"),
        ("epd.families.kimi.adapter", "from epd.families.qwen_vl.adapter import QwenVl"),
        ("epd.families.kimi.sizes", "import torch"),
        ("epd.roles.encode.role", "from epd.roles.steps.requests import Requests"),
        ("epd.model_files.geometry", "import torch"),
        ("epd.engine.base", "import torch"),
        ("epd.config", "from epd.messages import Address"),
        ("epd.cli.main", "from epd_lab.sim import verb"),
        ("epd_lab.sim.core.loop", "import uvloop"),
    ],
)
def test_the_rules_can_be_broken(module: str, line: str) -> None:
    assert [objection(found) for found in imports_of(module, line)] != [""]


def test_no_folder_is_a_list() -> None:
    """A folder of more files is looked through by name alone (docs/architecture.md, section 3)."""
    tops = ("epd", "epd_lab", "tests", "training", "examples")
    paths = [path for top in tops for path in (ROOT / top).rglob("*.py")]
    counts = Counter(path.parent.relative_to(ROOT) for path in paths)
    assert max(counts.values()) <= MAX_FILES, counts.most_common(3)
