"""docs/settings.md: every setting with default, bounds and flag; what is constant, and why."""

from __future__ import annotations

import re
from itertools import groupby

from epd.cli.configure.settings import GONE, constants, leaves
from epd.config import CUDA_DEFAULTS
from epd.setting import Setting
from epd_lab.diagrams.page import markdown_table

_HEAD = """\
<!-- Written by `python -m epd diagrams` from epd/config.py; do not edit. -->

# Settings

*For operators: every setting with its default, bounds and flag.*

Each has one key, for `--set KEY=VALUE`, for a TOML or JSON file (`--config FILE`, a table per
prefix), and in the output of `epd run --show-config`. Sizes may be written as 256MiB. A flag wins
over `--set`, and that over the file. An empty default is an empty text, or no list."""

_CONSTANTS = """\
## Constants
Former settings, and settings of other systems. Giving one is an error with the reason."""


def page() -> str:
    parts = [_HEAD]
    for table, found in groupby(leaves().values(), key=lambda one: one.key.rpartition(".")[0]):
        parts += [f"## {table}" if table else "## Of all", _settings(list(found))]
    fixed = [[f"`{s.key}`", _default(s), s.text, s.fixed] for s in constants().values()]
    gone = [[f"`{key}`", "", "", reason] for key, reason in GONE.items()]
    parts += [_CONSTANTS, markdown_table(["Key", "Value", "Meaning", "Why"], fixed + gone)]
    return re.sub(r"</?think>", r"`\g<0>`", "\n\n".join(parts)) + "\n"


def _settings(settings: list[Setting]) -> str:
    rows = [
        [f"`{s.key}`", f"`{s.flag}`" if s.flag else "", _default(s), s.range, s.text]
        for s in settings
    ]
    return markdown_table(["Key", "Flag", "Default", "Values", "Meaning"], rows)


def _default(setting: Setting) -> str:
    on_gpu = CUDA_DEFAULTS.get(setting.key)
    default = setting.in_words(setting.default) or ("false" if setting.type is bool else "")
    return f"{default}; on a GPU {setting.in_words(on_gpu)}" if on_gpu is not None else default
