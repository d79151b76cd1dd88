"""Flags that several verbs share, and what they become.

A flag whose `dest` is the key of a setting (`engine.device`) abbreviates that setting: it is
checked and applied where all settings are, in `epd.cli.configure.settings`.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd.cli.configure.settings import leaves
from epd.cli.parser import UsageError, one_of, parse_nbytes
from epd.config import CUDA_DEFAULTS
from epd.setting import Setting

if TYPE_CHECKING:
    from epd.cli.ask.question import AskSampling
    from epd.cli.start.plan import LogOptions, Placing
    from epd.config import Settings

LOCAL_URL = "http://127.0.0.1:8000"
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_Group = Any  # argparse's group of arguments has no public name


def size(text: str) -> int:
    """An argument type: bytes, with or without a unit."""
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_settings(parser: argparse.ArgumentParser, name: str, title: str, **defaults: str) -> _Group:
    """A group of flags: all that name it where settings are defined.  `defaults`: of this verb."""
    group = parser.add_argument_group(title)
    for setting in leaves().values():
        if setting.extra.get("group") == name:
            default = defaults.get(setting.key) or setting.in_words(setting.default)
            _add_setting(group, setting, default)
    return group


def _add_setting(group: _Group, setting: Setting, default: str) -> None:
    form: dict[str, Any] = {"type": size if setting.unit == "bytes" else setting.type}
    if setting.type is bool:
        form = {"action": "store_const", "const": True}
    elif setting.type == tuple[str, ...]:
        form = {"nargs": "+", "action": "extend"}
    if setting.type is not bool:
        form["metavar"] = setting.extra["metavar"]
    text = f"{setting.text}; default {default}" if default else setting.text
    if setting.key in CUDA_DEFAULTS:
        text += f", on a GPU {setting.in_words(CUDA_DEFAULTS[setting.key])}"
    flags = filter(None, (setting.flag, setting.extra.get("short")))
    group.add_argument(*flags, dest=setting.key, help=text, **form)


def add_model_flags(parser: argparse.ArgumentParser) -> _Group:
    group = add_settings(parser, "model", "model and device")
    group.add_argument(
        "--served-model-name", "--model-name", dest="model_names", nargs="+", metavar="NAME",
        help="its name in the API; further ones are taken in requests, too",
    )  # fmt: skip
    group.add_argument(
        "--speculative-config", metavar="JSON",
        help='draft tokens from the text so far: {"method":"ngram","num_speculative_tokens":4,'
        '"prompt_lookup_min":2,"prompt_lookup_max":4}; by the checkpoint\'s own layer (mtp); or by '
        'that of a head (eagle3, with "model":"DIR"); answers stay the same; default: none',
    )  # fmt: skip
    return group


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    group = add_settings(parser, "config", "configuration and log")
    group.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML or JSON file of settings; flags win"
    )
    group.add_argument(
        "--set", dest="assignments", action="append", default=[], metavar="KEY=VALUE",
        help="any one setting, such as timing.lost_after_s=5; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--log-level", type=one_of("debug", "info", "warning", "error"), metavar="LEVEL",
        help="debug, info, warning or error",
    )  # fmt: skip
    group.add_argument(
        "--log-json", action="store_true", help="each line on stderr is a JSON object"
    )


def add_place_flags(parser: argparse.ArgumentParser, port: str = "any that is free") -> None:
    """`port`: its default; a temporary server leaves the settings' own to one that stays."""
    add_settings(parser, "where", "where", port=port).add_argument(
        "--run-dir", default="", metavar="DIR",
        help="parent of the private directory for ipc sockets; default $XDG_RUNTIME_DIR/epd",
    )  # fmt: skip


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N",
        help=f"of an answer, default {max_tokens}",
    )  # fmt: skip
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default 0: the likeliest token"
    )
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same answer")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Of verbs that ask: a running server, or a temporary one with all that it may need."""
    parser.add_argument("--url", default="", metavar="URL", help="a running server's base URL")
    parser.add_argument(
        "--api-key", dest="access.api_keys", nargs=1, metavar="KEY",
        help="of that server; better in EPD_API_KEY, which other users cannot see",
    )  # fmt: skip
    add_cacert_flag(parser)
    parser.add_argument(
        "--topology", metavar="TOPOLOGY", help="of a temporary server, default 1e1p1d"
    )
    add_place_flags(parser)
    add_model_flags(parser)
    add_config_flags(parser)


def add_cacert_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cacert", default="", metavar="FILE",
        help="CAs (PEM) that may have signed the server's certificate, in place of this host's",
    )  # fmt: skip


def add_running_flags(parser: argparse.ArgumentParser) -> None:
    """Of verbs that look at a running server."""
    parser.add_argument(
        "--url", default=LOCAL_URL, metavar="URL",
        help=f"the gateway's base URL, default {LOCAL_URL}",
    )  # fmt: skip
    parser.add_argument(
        "--api-key", default="", metavar="KEY",
        help="of that server; better in EPD_API_KEY, which other users cannot see",
    )  # fmt: skip
    add_cacert_flag(parser)


def seconds(text: str) -> float:
    """An argument type: a time, with or without a unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 500ms, 5s, 2m, 1h or 90d")
    return float(found[1]) * UNITS_S[found[2] or "s"]


def sampling_of(args: argparse.Namespace) -> AskSampling:
    """Raises UsageError."""
    from epd.cli.ask.question import AskSampling

    if args.max_tokens < 1:
        raise UsageError(f"--max-tokens {args.max_tokens}: an answer has at least one token")
    return AskSampling(args.max_tokens, args.temperature, args.seed)


def settings_of(args: argparse.Namespace) -> Settings:
    """File, --set and flags, put together and checked.  Raises ConfigError."""
    from epd.cli.configure import speculative
    from epd.cli.configure.settings import build_settings

    flags = {key: value for key, value in vars(args).items() if key in leaves()}
    if names := vars(args).get("model_names"):
        flags |= {"model_name": names[0], "model_aliases": names[1:]}
    if (text := vars(args).get("speculative_config")) is not None:
        flags |= speculative.read_flag(text)
    return build_settings(args.config, args.assignments, flags)


def log_of(args: argparse.Namespace, level: str = "info") -> LogOptions:
    """`level`: the verb's default."""
    from epd.cli.start.plan import LogOptions

    return LogOptions(args.log_level or level, args.log_json)


def placing_of(args: argparse.Namespace) -> Placing:
    from epd.cli.start.plan import Placing

    given = vars(args)
    return Placing(**{name: given[name] for name in Placing.__slots__ if name in given})
