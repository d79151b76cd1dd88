"""Settings of one cluster: a file, then `--set KEY=VALUE`, then flags; the last one wins.

Theory of operation
-------------------
`Settings` gathers all that the processes of a cluster share. Its leaves have dotted names
(`timing.lost_after_s`): the keys of the file, of `--set`, and of the flags that abbreviate them.
Every value is checked on its own, where it was given, so that an error can name file or flag, key,
and remedy. It is checked by the bounds beside the field (`epd.setting`), and by `CHECKS` where
these are not enough. What is put together from checked values needs no second message."""

from __future__ import annotations

import functools
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from epd.cli.configure import speculative
from epd.cli.parser import parse_nbytes, suggestion
from epd.config import (
    CUDA_DEFAULTS,
    AccessConfig,
    ConfigError,
    GatewayConfig,
    InstanceConfig,
    Settings,
)
from epd.later import later
from epd.runtime.cpus import parse_cpus
from epd.setting import Setting
from epd.setting import settings as settings_of

API_KEY_VARIABLE = "EPD_API_KEY"  # several: with commas between them
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
GONE = {  # what was a setting once, and stands as a constant in the code
    "limits.max_json_values": "a body has at most 65,536 values, beside the ids of a prompt",
    "limits.max_redirects": "an URL may redirect 3 times",
    "limits.max_side_ratio": "one side of an image is at most 200 times the other",
    "limits.retry_after_s": "Retry-After is predicted",
    "timing.fence_interval_s": "fences are asked for again as all else, by retry_interval_s",
}

Table = dict[str, Any]  # values by dotted key, or tables in tables


@functools.cache
def leaves() -> dict[str, Setting]:
    """By dotted key every setting, in order; without what is fixed."""
    return {one.key: one for one in settings_of(Settings) if not one.fixed}


@functools.cache
def constants() -> dict[str, Setting]:
    """By dotted key what stands among the settings and is fixed."""
    return {one.key: one for one in settings_of(Settings) if one.fixed}


def flatten(settings: msgspec.Struct) -> Table:
    """Dotted key to value of a struct of structs, without what is fixed."""
    values = dict(_flat(msgspec.to_builtins(settings), ""))
    return {key: value for key, value in values.items() if key not in constants()}


def shown(settings: Settings) -> Table:
    """What `--show-config` prints: tables of settings, without keys that are secret."""
    tables = nested(flatten(settings))
    tables["access"]["api_keys"] = ["..." for _ in settings.access.api_keys]
    return tables


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, list(value) if isinstance(value, tuple) else value


def build_settings(
    file: Path | None = None,
    assignments: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """`flags`: dotted key to value, None where the flag was not given.  Raises ConfigError."""
    values = named(file, assignments, flags)
    if str(values.get("engine.device", "cpu")).startswith("cuda"):
        values = {**CUDA_DEFAULTS, **values}
    if values.get("engine.kv_nbytes") == 0 and "engine.device" not in values:
        raise ConfigError("engine.kv_nbytes 0 means what is free on a GPU; on a CPU give a size")
    values = speculative.completed(values)
    settings = msgspec.convert(nested(values), Settings)
    _check_together(settings)
    return settings


def named(file: Path | None, assignments: Sequence[str], flags: Mapping[str, Any] | None) -> Table:
    """Those that somebody named, without defaults.  Raises ConfigError."""
    values: Table = {}
    if file is not None:
        for key, value in _flat(read_file(file), ""):
            values[key] = checked(key, value, str(file))
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment}: write KEY=VALUE, such as timing.lost_after_s=5")
        values[key] = checked(key, _parsed(text), "--set")
    for key, value in (flags or {}).items():
        if value is not None:
            values[key] = checked(key, value, "flags")
    return values


def read_file(path: Path) -> Table:
    """The tables of a TOML or JSON file.  Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        tables = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; give a TOML or JSON file") from error
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"--config {path} is not {kind}: {error}") from error
    if not isinstance(tables, dict):
        raise ConfigError(f"--config {path} holds no table of settings")
    return tables


def checked(key: str, value: Any, origin: str) -> Any:
    """The value of one setting in its type.  Raises ConfigError naming `origin` and `key`."""
    setting = leaves().get(key)
    if setting is None:
        raise ConfigError(f"{origin}: {key} is {_no_setting(key)}")
    if key == "transport_options" and isinstance(value, dict):
        value = json.dumps(value, sort_keys=True)
    if key == "engine.dtype":
        value = SHORT_DTYPES.get(value, value)
    try:
        if setting.unit == "bytes" and isinstance(value, str):
            value = parse_nbytes(value)
        if setting.type == tuple[str, ...] and isinstance(value, str):
            value = value.split(",")
        converted: Any = msgspec.convert(value, setting.type)
    except msgspec.ValidationError:
        wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        what = wanted.get(setting.type, "a list of texts")
        raise ConfigError(f"{origin}: {key} must be {what}, not {value!r}") from None
    except ValueError as error:
        raise ConfigError(f"{origin}: {key}: {error}") from None
    problem = setting.problem(converted)
    if problem and setting.choices:
        problem += suggestion(str(converted), setting.choices)
    if not problem and converted and key in CHECKS:
        problem = CHECKS[key](converted)
    if problem:
        raise ConfigError(f"{origin}: {key} is {converted!r}; {problem}")
    return converted


def _no_setting(key: str) -> str:
    """What it is instead: a constant, a slip of the pen, or a right name in the wrong table."""
    if (constant := constants().get(key)) is not None:
        return f"fixed at {constant.default!r} and no setting any more: {constant.fixed}"
    if key in GONE:
        return f"fixed and no setting any more: {GONE[key]}"
    name = key.rpartition(".")[2]
    found = [known for known in leaves() if known.rpartition(".")[2] == name]
    hint = f"; did you mean {found[0]}?" if found else "; epd run --show-config lists all of them"
    return f"not a setting{suggestion(key, leaves()) or hint}"


def _is_above_one(factor: float) -> str:
    if factor > 1:
        return ""
    return "it must be above 1 (how many times as long a step may take), or 0 for no bound"


def _is_object(text: str) -> str:
    try:
        if isinstance(json.loads(text), dict):
            return ""
    except ValueError:
        pass
    return 'it must be a JSON object, such as {"directory": "/mnt/rows"}'


def _lists_cpus(text: str) -> str:
    try:
        for part in text.split("|"):
            parse_cpus(part)
    except ValueError as error:
        return str(error)
    return ""


def _is_directory(path: str) -> str:
    return "" if os.path.isdir(path) else "it must be a directory"


CHECKS: dict[str, Callable[[Any], str]] = {  # of what is given, where bounds do not say it
    "chat_template": lambda path: (
        "" if os.access(path, os.R_OK) else "it must be a file that can be read"
    ),
    "engine.cpu_affinity": _lists_cpus,
    "engine.lora.runtime_dir": _is_directory,
    "engine.max_itl_impact": _is_above_one,
    "limits.allowed_local_media_path": _is_directory,
    "transport": later("epd.transport.backends:problem"),
    "transport_options": _is_object,
}


def check_send_ring(settings: Settings) -> None:
    """Raises ConfigError where encoders could not send what they make."""
    if settings.mooncake.protocol == "rdma" and not settings.encode.send_buffer_nbytes:
        raise ConfigError(
            "mooncake.protocol rdma reads rows from registered memory only: give the encoders "
            "a ring of it, --encode-send-buffer-nbytes 256MiB"
        )


def _check_together(settings: Settings) -> None:
    if settings.mooncake.max_port <= settings.mooncake.min_port:
        raise ConfigError("mooncake.max_port must be above mooncake.min_port: two ports are taken")
    check_send_ring(settings)
    if settings.encode.cache_dir and settings.encode.cache_store:
        raise ConfigError(
            "encode.cache_dir and encode.cache_store are both set: rows are kept in files or in "
            "Mooncake Store; drop one of them"
        )
    timing = settings.timing
    if not timing.heartbeat_interval_s < timing.suspect_after_s < timing.lost_after_s:
        raise ConfigError(
            "timing.heartbeat_interval_s, suspect_after_s and lost_after_s must grow; "
            f"they are {timing.heartbeat_interval_s:g}, {timing.suspect_after_s:g} and "
            f"{timing.lost_after_s:g} s"
        )
    if timing.group_step_timeout_s >= timing.stall_timeout_s:
        raise ConfigError(
            f"timing.group_step_timeout_s ({timing.group_step_timeout_s:g} s) must be less than "
            f"stall_timeout_s ({timing.stall_timeout_s:g} s), or streams are given up before their "
            "group starts anew; change one of them"
        )


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def nested(values: Mapping[str, Any]) -> Table:
    """Tables of tables of what has dotted keys."""
    tree: Table = {}
    for key, value in values.items():
        *tables, name = key.split(".")
        table = tree
        for part in tables:
            table = table.setdefault(part, {})
        table[name] = value
    return tree


def gateway_config(
    settings: Settings, instance_id: str, endpoint: str, cpu_affinity: str = ""
) -> GatewayConfig:
    own = {
        "otlp_traces_endpoint": settings.otlp_traces_endpoint or _of_environment("TRACES"),
        "otlp_metrics_endpoint": settings.otlp_metrics_endpoint or _of_environment("METRICS"),
        "access": msgspec.structs.replace(settings.access, api_keys=api_keys(settings)),
    }
    return GatewayConfig(
        **(msgspec.structs.asdict(settings) | own),
        instance_id=instance_id,
        endpoint=endpoint,
        cpu_affinity=cpu_affinity,
    )


def instance_config(
    settings: Settings,
    instance_id: str,
    roles: tuple[str, ...],
    endpoint: str,
    gateway_endpoint: str,
    rank_devices: tuple[str, ...] = (),
    lineage: str = "",
) -> InstanceConfig:
    own = {
        "profile_dir": os.path.abspath(settings.profile_dir) if settings.profile_dir else "",
        "access": AccessConfig(),  # keys are the gateway's
    }
    return InstanceConfig(
        **(msgspec.structs.asdict(settings) | own),
        instance_id=instance_id,
        roles=roles,
        endpoint=endpoint,
        gateway_endpoint=gateway_endpoint,
        rank_devices=rank_devices,
        lineage=lineage,
    )


def api_keys(settings: Settings) -> tuple[str, ...]:
    """A command line is seen by all users of a host; an environment is not."""
    return settings.access.api_keys or keys_of_environment()


def keys_of_environment() -> tuple[str, ...]:
    return tuple(filter(None, os.environ.get(API_KEY_VARIABLE, "").split(",")))


def _of_environment(signal: str) -> str:
    """`env` where OpenTelemetry's own variables ask for it; its library reads the rest."""
    given = os.environ.get
    is_off = given("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_off or given(f"OTEL_{signal}_EXPORTER") == "none":
        return ""
    names = (f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return "env" if any(map(given, names)) else ""
