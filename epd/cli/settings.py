"""Settings of one cluster: a file, then `--set KEY=VALUE`, then flags; the last one wins.

Theory of operation
-------------------
`Settings` gathers all that the processes of a cluster share; its leaves have dotted names
(`timing.lost_after_s`), which are the keys of the file, of `--set`, and of the flags that
abbreviate them. Every value is checked on its own, at the place where it was given, so that an
error can name file or flag, key, and remedy. What is put together from checked values needs no
second message.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from epd.cli import speculative
from epd.cli.parser import parse_nbytes, suggestion
from epd.config import (
    CACHE_SCOPES,
    CHECKSUMS,
    CUDA_DEFAULTS,
    ENCODE_POLICIES,
    MOONCAKE_PROTOCOLS,
    REASONING_PARSERS,
    TRANSPORTS,
    AccessConfig,
    ConfigError,
    DecodeConfig,
    EncodeConfig,
    EngineConfig,
    GatewayConfig,
    InstanceConfig,
    Limits,
    MooncakeConfig,
    PrefillConfig,
    Timing,
    is_transport,
)
from epd.runtime.cpus import parse_cpus

MAY_BE_ZERO = frozenset(
    {
        "port",
        "cpus_per_instance",
        "prefill.pool_nbytes",
        "prefill.slot_nbytes",
        "prefill.rows_timeout_s",
        "engine.threads",
        "engine.kv_nbytes",
        "engine.max_itl_impact",
        "engine.max_captured_tokens",
        "engine.max_quantum_ms",
        "engine.speculative.num_speculative_tokens",
        "engine.speculative.prompt_lookup_min",
        "engine.speculative.prompt_lookup_max",
        "limits.max_redirects",
        "encode.cache_device_nbytes",
        "encode.cache_host_nbytes",
        "encode.send_buffer_nbytes",
        "encode.send_slot_nbytes",
    }
)
API_KEY_VARIABLE = "EPD_API_KEY"  # several: with commas between them
LOAD_FORMATS = ("auto", "dummy")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPES = ("float32", "bfloat16", "float16")
ONE_OF = {
    "cache_scope": CACHE_SCOPES,
    "engine.checksums": CHECKSUMS,
    "encode_policy": ENCODE_POLICIES,
    "engine.dtype": DTYPES,
    "engine.load_format": LOAD_FORMATS,
    "mooncake.protocol": MOONCAKE_PROTOCOLS,
    "reasoning_parser": REASONING_PARSERS,
}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the processes of one cluster share."""

    model_dir: str = ""  # empty: the bundled tiny model
    model_name: str = ""  # empty: the directory's name
    chat_template: str = ""  # a file; empty: the model's own
    reasoning_parser: str = ""  # how answers mark their reasoning: qwen3; empty: it is text
    model_aliases: tuple[str, ...] = ()  # other names that requests may give
    host: str = "127.0.0.1"
    port: int = 8000
    tenant: str = ""
    cache_scope: str = "tenant"  # who shares rows and KV: one tenant, or all (global)
    encode_policy: str = "affinity"  # who encodes a picture: affinity, round_robin or random
    prefix_affinity: bool = True  # prompts go where their beginnings are, if that is not overloaded
    cluster_key: str = ""  # a key file: required between hosts
    transport: str = "auto"  # of rows and KV: auto, shm, tcp, mooncake or file
    transport_directory: str = ""  # of the file transport: shared by all instances
    transport_options: str = ""  # a JSON object, for a transport of others: package.module:factory
    mooncake: MooncakeConfig = MooncakeConfig()
    profile_dir: str = ""  # traces of /start_profile and /stop_profile; empty: there are none
    health_when_ready: bool = False  # /health is 200 only when /ready is
    otlp_traces_endpoint: str = ""  # of OpenTelemetry; empty: what its own variables say
    cpus_per_instance: int = 0  # CPUs of its own for each; 0: the instances share them
    access: AccessConfig = AccessConfig()
    limits: Limits = Limits()
    timing: Timing = Timing()
    encode: EncodeConfig = EncodeConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    engine: EngineConfig = EngineConfig()


@functools.cache
def leaves() -> dict[str, type]:
    """Dotted key to type of every setting, in order."""
    return dict(_leaves(Settings, ""))


def _leaves(struct: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, type]]:
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _leaves(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field.type


def flatten(settings: msgspec.Struct) -> dict[str, Any]:
    """Dotted key to value of a struct of structs."""
    return dict(_flat(msgspec.to_builtins(settings), ""))


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
    values: dict[str, Any] = {}
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
    if str(values.get("engine.device", "cpu")).startswith("cuda"):
        values = {**CUDA_DEFAULTS, **values}
    if values.get("engine.kv_nbytes") == 0 and "engine.device" not in values:
        raise ConfigError("engine.kv_nbytes 0 means what is free on a GPU; on a CPU give a size")
    values = speculative.completed(values)
    settings = msgspec.convert(_nested(values), Settings)
    _check_together(settings)
    return settings


def read_file(path: Path) -> dict[str, Any]:
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
    kind = leaves().get(key)
    if kind is None:
        hint = suggestion(key, leaves()) or _tail_hint(key)
        raise ConfigError(f"{origin}: {key} is not a setting{hint}")
    if key == "transport_options" and isinstance(value, dict):
        value = json.dumps(value, sort_keys=True)
    if key == "engine.dtype":
        value = SHORT_DTYPES.get(value, value)
    try:
        if key.endswith("_nbytes") and isinstance(value, str):
            value = parse_nbytes(value)
        if kind == tuple[str, ...] and isinstance(value, str):
            value = value.split(",")
        converted: Any = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        what = wanted.get(kind, "a list of texts")
        raise ConfigError(f"{origin}: {key} must be {what}, not {value!r}") from None
    except ValueError as error:
        raise ConfigError(f"{origin}: {key}: {error}") from None
    problem = _problem(key, converted)
    if problem:
        raise ConfigError(f"{origin}: {key} is {converted!r}; {problem}")
    return converted


def _tail_hint(key: str) -> str:
    """A right name in the wrong table."""
    name = key.rpartition(".")[2]
    found = [known for known in leaves() if known.rpartition(".")[2] == name]
    return f"; did you mean {found[0]}?" if found else "; epd run --show-config lists all of them"


def _problem(key: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value < 0 or (value == 0 and key not in MAY_BE_ZERO):
            return "it must be above zero" if key not in MAY_BE_ZERO else "it may not be negative"
        if not math.isfinite(value):
            return "it must be a finite number"
    if isinstance(value, tuple) and not all(value):
        return "none of them may be empty"
    if key == "limits.allowed_local_media_path" and value and not Path(value).is_dir():
        return "it must be a directory"
    if (key == "port" or key.endswith("_port")) and value > 65535:
        return "a port is at most 65535"
    if (
        key.endswith(("share_per_peer", "share_per_key")) or key == "engine.gpu_memory_utilization"
    ) and value > 1:
        return "a share is at most 1"
    if key == "engine.max_itl_impact" and 0 < value <= 1:
        return "it must be above 1 (how many times as long a step may take), or 0 for no bound"
    if (known := ONE_OF.get(key)) is not None and value not in known:
        named = ", ".join(filter(None, known))
        return f"it must be one of {named}{suggestion(value, known)}"
    if key == "chat_template" and value and not os.access(value, os.R_OK):
        return "it must be a file that can be read"
    if key == "transport" and not is_transport(value):
        last = value.split(",")[-1]
        return (
            f"it must be auto, or some of {', '.join(TRANSPORTS[1:])} and package.module:factory "
            f"with commas between them"
            f"{suggestion(last, TRANSPORTS)}"
        )
    if key == "transport_options" and not _is_object(value):
        return 'it must be a JSON object, such as {"directory": "/mnt/rows"}'
    if key == "engine.device" and not re.fullmatch(r"cpu|cuda(:\d+)?(,cuda(:\d+)?)*", value):
        return "it must be cpu, cuda, cuda: and a number, or several: cuda:0,cuda:1"
    if key == "engine.cpu_affinity" and value:
        try:
            for part in value.split("|"):
                parse_cpus(part)
        except ValueError as error:
            return str(error)
    if key == "otlp_traces_endpoint" and value and not re.match(r"https?://[^/]", value):
        return "it must be the collector's address for OTLP over HTTP: http://host:4318/v1/traces"
    if key.startswith(speculative.PREFIX):
        return speculative.problem(key.removeprefix(speculative.PREFIX), value)
    return ""


def _is_object(text: str) -> bool:
    try:
        return not text or isinstance(json.loads(text), dict)
    except ValueError:
        return False


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


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
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
    return GatewayConfig(
        instance_id=instance_id,
        model_dir=settings.model_dir,
        model_name=settings.model_name,
        chat_template=settings.chat_template,
        reasoning_parser=settings.reasoning_parser,
        model_aliases=settings.model_aliases,
        host=settings.host,
        port=settings.port,
        endpoint=endpoint,
        tenant=settings.tenant,
        cache_scope=settings.cache_scope,
        encode_policy=settings.encode_policy,
        prefix_affinity=settings.prefix_affinity,
        cluster_key=settings.cluster_key,
        cpu_affinity=cpu_affinity,
        health_when_ready=settings.health_when_ready,
        profile_dir=settings.profile_dir,
        otlp_traces_endpoint=settings.otlp_traces_endpoint or _endpoint_of_environment(),
        access=msgspec.structs.replace(settings.access, api_keys=api_keys(settings)),
        limits=settings.limits,
        timing=settings.timing,
    )


def api_keys(settings: Settings) -> tuple[str, ...]:
    """A command line is seen by all users of a host; an environment is not."""
    keys = tuple(filter(None, os.environ.get(API_KEY_VARIABLE, "").split(",")))
    return settings.access.api_keys or keys


def _endpoint_of_environment() -> str:
    """`env` where OpenTelemetry's own variables ask for traces; its library reads the rest."""
    given = os.environ.get
    if given("OTEL_SDK_DISABLED", "").lower() == "true" or given("OTEL_TRACES_EXPORTER") == "none":
        return ""
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return "env" if any(map(given, names)) else ""


def instance_config(
    settings: Settings,
    instance_id: str,
    roles: tuple[str, ...],
    endpoint: str,
    gateway_endpoint: str,
) -> InstanceConfig:
    return InstanceConfig(
        instance_id=instance_id,
        roles=roles,
        model_dir=settings.model_dir,
        gateway_endpoint=gateway_endpoint,
        endpoint=endpoint,
        cluster_key=settings.cluster_key,
        transport=settings.transport,
        transport_directory=settings.transport_directory,
        transport_options=settings.transport_options,
        mooncake=settings.mooncake,
        timing=settings.timing,
        encode=settings.encode,
        prefill=settings.prefill,
        decode=settings.decode,
        engine=settings.engine,
        profile_dir=os.path.abspath(settings.profile_dir) if settings.profile_dir else "",
    )
