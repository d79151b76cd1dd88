"""`--speculative-config`: vLLM's JSON object, and the settings that it stands for.

As there, one of `prompt_lookup_min` and `prompt_lookup_max` stands for the other if that is not
given, and 5 for both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from epd.cli.parser import json_object, suggestion
from epd.config import ConfigError, SpeculativeConfig

FLAG = "--speculative-config"
EXAMPLE = (
    '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_min":2,"prompt_lookup_max":4}'
)
PREFIX = "engine.speculative."
DEFAULT_LOOKUP = 5
MTP_NAMES = ("qwen3_next_mtp", "qwen3_5_mtp", "deepseek_mtp")  # vLLM's, by family


def read_flag(text: str) -> dict[str, Any]:
    """Dotted key to value.  Raises ConfigError that names what is wrong, and the remedy."""
    found = json_object(FLAG, text, EXAMPLE)
    known = msgspec.structs.fields(SpeculativeConfig)
    names = [field.name for field in known]
    for name in found:
        if name not in names:
            hint = suggestion(name, names) or f"; it takes {', '.join(names)}"
            raise ConfigError(f"{FLAG}: {name} is not a key of it{hint}")
    if not found.get("method"):
        raise ConfigError(f"{FLAG} names no method; write {EXAMPLE}")
    if found["method"] in MTP_NAMES:
        found["method"] = "mtp"
    return {PREFIX + name: value for name, value in found.items() if value is not None}


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """With what follows from those given.  Raises ConfigError where they do not fit together."""
    given = {name.removeprefix(PREFIX): v for name, v in values.items() if name.startswith(PREFIX)}
    if not given.get("method"):
        if any(given.values()):
            raise ConfigError(f"{PREFIX}{next(iter(given))} needs {PREFIX}method, such as ngram")
        return dict(values)
    if not (number := given.get("num_speculative_tokens")) and (
        number is None or given["method"] == "ngram"  # with 0 it holds the layer's KV for others
    ):
        raise ConfigError(
            f"{PREFIX}num_speculative_tokens is missing: say how many tokens a step may draft, "
            "such as 4"
        )
    if bool(given.get("model")) != (given["method"] == "eagle3"):
        raise ConfigError(f"{PREFIX}model is the directory of an EAGLE-3 head: eagle3 needs one")
    if given["method"] != "ngram":
        return dict(values)
    low, high = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    low, high = low or high or DEFAULT_LOOKUP, high or low or DEFAULT_LOOKUP
    if low > high:
        raise ConfigError(
            f"{PREFIX}prompt_lookup_min is {low}, above prompt_lookup_max, which is {high}; lower "
            "the first or raise the second"
        )
    return {**values, PREFIX + "prompt_lookup_min": low, PREFIX + "prompt_lookup_max": high}
