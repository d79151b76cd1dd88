"""`--ec-transfer-config` and `--kv-transfer-config`: JSON as vLLM spells it, in our words.

One table says what each key becomes, `connector_names` what each connector is.  A key that means
something here becomes a setting, one that can mean nothing here is checked and has no effect (its
reader says why), and everything else is refused by name with what is known or what to do instead.
A role that the instance does not play is refused as well.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from epd.cli.connector_names import BUFFER_DEVICES, EC, KV, REMEDIES, Connector, Hop
from epd.cli.parser import suggestion
from epd.cli.settings import check_send_ring, checked
from epd.config import ConfigError, Settings
from epd.transport.foreign import is_foreign


@dataclass(slots=True)
class Applied:
    """What the two configurations come to."""

    values: dict[str, Any] = field(default_factory=dict)  # settings by dotted key
    transports: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)  # by setting: the flag
    sends_rows: bool = False
    instance_id: str = ""
    host: str = ""
    port: str = ""

    @property
    def listen(self) -> str:
        """Own endpoint, where one was asked for."""
        named = self.host or self.port
        return f"tcp://{self.host or '127.0.0.1'}:{self.port or '*'}" if named else ""

    def put(self, hop: Hop, key: str, value: Any) -> None:
        """Raises ConfigError if the other hop wants something else."""
        value = checked(key, value, hop.flag)
        if self.values.get(key, value) != value:
            raise ConfigError(
                f"{self.origins[key]} wants {key} {self.values[key]!r} and {hop.flag} {value!r}: "
                "an instance has one"
            )
        self.values[key], self.origins[key] = value, hop.flag


def read_transfer_configs(ec: str | None, kv: str | None, roles: tuple[str, ...]) -> Applied:
    """Both flags' JSON, for an instance (or a topology) of these roles.  Raises ConfigError."""
    applied = Applied()
    for hop, text in ((EC, ec), (KV, kv)):
        if text is not None:
            _read(hop, text, roles, applied)
    if applied.transports:
        names = [name for name in dict.fromkeys(applied.transports) if name != "auto"]
        applied.values["transport"] = "auto" if "auto" in applied.transports else ",".join(names)
    return applied


def apply(settings: Settings, applied: Applied) -> Settings:
    """The settings with what the connectors say.  Raises ConfigError if a flag says otherwise."""
    default = Settings()
    changed: Any = settings
    for key, value in applied.values.items():
        *tables, name = key.split(".")
        own = _get(settings, key)
        if own not in (_get(default, key), value):
            flag = applied.origins.get(key, "the connector")
            raise ConfigError(
                f"{key} is {own!r} by a setting or flag and {value!r} by {flag}: drop one of them"
            )
        if tables:
            inner = msgspec.structs.replace(getattr(changed, tables[0]), **{name: value})
            changed = msgspec.structs.replace(changed, **{tables[0]: inner})
        else:
            changed = msgspec.structs.replace(changed, **{name: value})
    result: Settings = changed
    if applied.sends_rows:
        check_send_ring(result)
    return result


def _get(settings: Any, key: str) -> Any:
    for name in key.split("."):
        settings = getattr(settings, name)
    return settings


def _read(hop: Hop, text: str, roles: tuple[str, ...], applied: Applied) -> None:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{hop.flag} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f'{hop.flag} holds no object: write {{"{hop.prefix}_connector": ...}}')
    readers = _readers(hop)
    for key in given:
        if key not in readers:
            raise ConfigError(
                f"{hop.flag}: {key} is unknown{suggestion(key, readers)}; known are "
                f"{', '.join(readers)}"
            )
    for name in (f"{hop.prefix}_connector", f"{hop.prefix}_role"):
        if given.get(name) is None:
            raise ConfigError(f"{hop.flag} has no {name}: give one")
    claims = _claims(hop, str(given[f"{hop.prefix}_role"]), roles)
    path = given.get(f"{hop.prefix}_connector_module_path")
    name = given[f"{hop.prefix}_connector"]
    connector = _connector(hop, name) if path is None else _foreign(hop, name, path)
    extra_key = f"{hop.prefix}_connector_extra_config"
    extra = given.get(extra_key)
    for name in connector.needs:
        if not isinstance(extra, dict) or not extra.get(name):
            raise ConfigError(f"{hop.flag}: {extra_key} lacks {name}")
    applied.transports.append(connector.transport)
    applied.sends_rows |= hop is EC and "producer" in claims
    for key, value in given.items():
        if value is not None:
            readers[key](_Read(hop, connector, claims, applied, given), key, value)


@dataclass(frozen=True, slots=True)
class _Read:
    """What a reader of one key may need."""

    hop: Hop
    connector: Connector
    claims: tuple[str, ...]
    applied: Applied
    given: Mapping[str, Any]


Reader = Callable[[_Read, str, Any], None]


def _readers(hop: Hop) -> dict[str, Reader]:
    prefix = hop.prefix
    readers: dict[str, Reader] = {
        f"{prefix}_connector": _done,
        f"{prefix}_role": _done,
        f"{prefix}_connector_extra_config": _extra,
        f"{prefix}_buffer_size": _buffer_size,
        f"{prefix}_buffer_device": _buffer_device,
        f"{prefix}_ip": _ip,
        f"{prefix}_port": _port,
        f"{prefix}_rank": _rank,
        f"{prefix}_parallel_size": _parallel_size,
        f"{prefix}_connector_module_path": _done,
        "engine_id": _engine_id,
    }
    if hop is KV:
        readers["kv_load_failure_policy"] = _load_failure_policy
    return readers


def _claims(hop: Hop, role: str, roles: tuple[str, ...]) -> tuple[str, ...]:
    """`producer`, `consumer` or both.  Raises ConfigError if the instance does not play it."""
    known: dict[str, tuple[str, ...]] = {
        f"{hop.prefix}_producer": ("producer",),
        f"{hop.prefix}_consumer": ("consumer",),
        f"{hop.prefix}_both": ("producer", "consumer"),
    }
    claims = known.get(role)
    if claims is None:
        raise ConfigError(
            f"{hop.flag}: {hop.prefix}_role {role!r} is unknown; choose {', '.join(known)}"
        )
    plays = tuple(
        claim
        for claim, stage in (("producer", hop.sends), ("consumer", hop.takes))
        if stage in roles
    )
    if not plays:
        raise ConfigError(
            f"{hop.flag}: an instance of {'+'.join(roles) or 'no role'} has no part in this hop, "
            f"from {hop.sends} to {hop.takes}: drop it"
        )
    if plays != claims and len(claims) < 2:
        fits = next(name for name, claim in known.items() if claim == plays)
        raise ConfigError(
            f"{hop.flag}: {hop.prefix}_role {role} contradicts an instance of {'+'.join(roles)}, "
            f"which is {fits}"
        )
    return plays


def _connector(hop: Hop, name: Any) -> Connector:
    connector = hop.connectors.get(str(name))
    if remedy := REMEDIES.get(str(name), ""):
        raise ConfigError(f"{hop.flag}: connector {name!r} is not supported: {remedy}")
    if connector is None:
        known = (f"{theirs} ({c.transport})" for theirs, c in hop.connectors.items())
        raise ConfigError(
            f"{hop.flag}: connector {name!r} is not known{suggestion(str(name), hop.connectors)}; "
            f"there are {', '.join(known)}"
        )
    return connector


def _foreign(hop: Hop, name: Any, path: Any) -> Connector:
    """A factory of somebody else's module, which is looked for and not imported here."""
    transport = f"{path}:{name}"
    if not is_foreign(transport):
        raise ConfigError(
            f"{hop.flag}: {path!r} and {name!r} must be a module and what makes a connector in it, "
            "such as package.module and MyConnector"
        )
    try:
        found = importlib.util.find_spec(path)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ConfigError(
            f"{hop.flag}: there is no module {path}: install it, or name its directory in "
            "PYTHONPATH"
        )
    return Connector(transport, is_foreign=True)


def _done(its: _Read, key: str, value: Any) -> None:
    """Read before the others."""


def _extra(its: _Read, key: str, value: Any) -> None:
    hop, connector = its.hop, its.connector
    if not isinstance(value, dict):
        raise ConfigError(f"{hop.flag}: {key} must be an object")
    if connector.is_foreign:
        its.applied.put(hop, "transport_options", value)
        return
    for name, content in value.items():
        if name not in connector.extra:
            known = ", ".join(connector.extra) or "none"
            raise ConfigError(
                f"{hop.flag}: {key}.{name} is unknown{suggestion(name, connector.extra)}; this "
                f"connector has {known}"
            )
        for setting in connector.extra[name]:
            its.applied.put(hop, setting, content)


def _buffer_size(its: _Read, key: str, value: Any) -> None:
    number = _number(value)
    if number is None or number <= 0:
        raise ConfigError(f"{its.hop.flag}: {key} must be a number of bytes, not {value!r}")
    for claim in its.claims:
        its.applied.put(its.hop, its.hop.buffers[claim], number)


def _number(value: Any) -> int | None:
    """A whole number, also as a text such as "1e9": theirs are often written so; None: none."""
    try:
        number = float(value)
        is_whole = not isinstance(value, bool) and number == int(number)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(number) if is_whole else None


def _buffer_device(its: _Read, key: str, value: Any) -> None:
    """Without effect: what moves goes through host memory, whatever the engine computes on."""
    if value not in BUFFER_DEVICES:
        raise ConfigError(
            f"{its.hop.flag}: {key} must be one of {', '.join(BUFFER_DEVICES)}, not {value!r}"
        )


def _ip(its: _Read, key: str, value: Any) -> None:
    if its.applied.host not in ("", value):
        raise ConfigError(
            f"{its.hop.flag}: {key} is {value} and the other hop's {its.applied.host}: an instance "
            "listens at one address"
        )
    its.applied.host = str(value)


def _port(its: _Read, key: str, value: Any) -> None:
    port = _number(value)
    if port is None or not 0 < port < 65536:
        raise ConfigError(f"{its.hop.flag}: {key} must be a port, not {value!r}")
    if its.applied.port not in ("", str(port)):
        raise ConfigError(
            f"{its.hop.flag}: {key} is {port} and the other hop's {its.applied.port}: both hops "
            "share the instance's endpoint"
        )
    its.applied.port = str(port)


def _rank(its: _Read, key: str, value: Any) -> None:
    """Without effect, as the size: instances are counted by joining the gateway."""
    rank, size = _number(value), _number(its.given.get(f"{its.hop.prefix}_parallel_size", 1))
    if rank is None or size is None or not 0 <= rank < size:
        raise ConfigError(
            f"{its.hop.flag}: {key} must be a number from 0 to below {its.hop.prefix}_parallel_size"
            f", not {value!r}; or drop both: instances are counted by joining the gateway"
        )


def _parallel_size(its: _Read, key: str, value: Any) -> None:
    size = _number(value)
    if size is None or size < 1:
        raise ConfigError(f"{its.hop.flag}: {key} must be a number above zero, not {value!r}")


def _load_failure_policy(its: _Read, key: str, value: Any) -> None:
    if value != "recompute":
        raise ConfigError(
            f"{its.hop.flag}: {key} {value!r} is not supported: what could not be moved is "
            'computed again; write "recompute", or drop it'
        )


def _engine_id(its: _Read, key: str, value: Any) -> None:
    if its.applied.instance_id not in ("", value):
        raise ConfigError(f"{its.hop.flag}: {key} {value!r} differs from the other hop's")
    its.applied.instance_id = str(value)
