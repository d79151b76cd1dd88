"""`--ec-transfer-config` and `--kv-transfer-config`: JSON as vLLM spells it, in our words.

`connector_names` has all connectors.  A key with a meaning here becomes a setting; one that can
have none is checked and has no effect (`_check_rest`).  Everything else is refused by name, with
the choices or a remedy.  A role that the instance does not play is refused as well."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from epd.cli.configure.connector_names import BUFFER_DEVICES, EC, KV, REMEDIES, Connector, Hop
from epd.cli.configure.settings import check_send_ring, checked, flatten, nested
from epd.cli.parser import json_object, suggestion
from epd.config import ConfigError, Settings
from epd.transport.backends import is_foreign

KEYS = (  # behind the prefix of their hop
    "connector", "role", "connector_extra_config", "buffer_size", "buffer_device", "ip", "port",
    "rank", "parallel_size", "connector_module_path",
)  # fmt: skip


@dataclass(slots=True)
class Applied:
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
        """Raises ConfigError if the other hop has another value."""
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
    """The settings with those of the connectors.  Raises ConfigError if a flag differs."""
    default, own = flatten(Settings()), flatten(settings)
    for key, value in applied.values.items():
        if own[key] not in (default[key], value):
            flag = applied.origins.get(key, "the connector")
            raise ConfigError(
                f"{key} is {own[key]!r} by a setting or flag and {value!r} by {flag}: drop one of "
                "them"
            )
    result = msgspec.convert(nested(own | applied.values), Settings)
    if applied.sends_rows:
        check_send_ring(result)
    return result


def _read(hop: Hop, text: str, roles: tuple[str, ...], applied: Applied) -> None:
    given = _keys(hop, text)
    claims = _claims(hop, str(given["role"]), roles)
    name, path = given["connector"], given.get("connector_module_path")
    connector = _connector(hop, name) if path is None else _foreign(hop, name, path)
    applied.transports.append(connector.transport)
    applied.sends_rows |= hop is EC and "producer" in claims
    _take_extra(hop, connector, given.get("connector_extra_config"), applied)
    if (size := given.get("buffer_size")) is not None:
        if (number := _number(size)) is None or number <= 0:
            raise _refused(hop, "buffer_size", f"must be a number of bytes, not {size!r}")
        for claim in claims:
            applied.put(hop, hop.buffers[claim], number)
    _take_place(hop, given, applied)
    _check_rest(hop, given)


def _keys(hop: Hop, text: str) -> dict[str, Any]:
    """What is given and not null, without the hop's prefix.  Raises ConfigError."""
    given = json_object(hop.flag, text, f'{{"{hop.prefix}_connector": ...}}')
    known = {f"{hop.prefix}_{key}": key for key in KEYS} | {"engine_id": "engine_id"}
    if hop is KV:
        known["kv_load_failure_policy"] = "load_failure_policy"
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{hop.flag}: {name} is unknown{suggestion(name, known)}; known are "
                f"{', '.join(known)}"
            )
    found = {known[name]: value for name, value in given.items() if value is not None}
    for key in ("connector", "role"):
        if key not in found:
            raise ConfigError(f"{hop.flag} has no {hop.prefix}_{key}: give one")
    return found


def _refused(hop: Hop, key: str, why: str) -> ConfigError:
    return ConfigError(f"{hop.flag}: {hop.prefix}_{key} {why}")


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


def _take_extra(hop: Hop, connector: Connector, extra: Any, applied: Applied) -> None:
    key = "connector_extra_config"
    for name in connector.needs:
        if not isinstance(extra, dict) or not extra.get(name):
            raise _refused(hop, key, f"lacks {name}")
    if not isinstance(extra, dict | None):
        raise _refused(hop, key, "must be an object")
    if connector.is_foreign and extra is not None:
        applied.put(hop, "transport_options", extra)
        return
    for name, content in (extra or {}).items():
        if name not in connector.extra:
            known = ", ".join(connector.extra) or "none"
            hint = suggestion(name, connector.extra)
            why = f"is unknown{hint}; this connector has {known}"
            raise _refused(hop, f"{key}.{name}", why)
        for setting in connector.extra[name]:
            applied.put(hop, setting, content)


def _take_place(hop: Hop, given: Mapping[str, Any], applied: Applied) -> None:
    """Name and endpoint: both hops share the instance's."""
    port = None if "port" not in given else _number(given["port"])
    if "port" in given and (port is None or not 0 < port < 65536):
        raise _refused(hop, "port", f"must be a port, not {given['port']!r}")
    if applied.host and given.get("ip", applied.host) != applied.host:
        why = f"is {given['ip']} and the other hop's {applied.host}: an instance listens at one"
        raise _refused(hop, "ip", f"{why} address")
    if applied.port and port is not None and applied.port != str(port):
        why = f"is {port} and the other hop's {applied.port}: both hops share the instance's"
        raise _refused(hop, "port", f"{why} endpoint")
    name = str(given.get("engine_id", applied.instance_id))
    if applied.instance_id not in ("", name):
        raise ConfigError(f"{hop.flag}: engine_id {name!r} differs from the other hop's")
    applied.instance_id = name
    applied.host = str(given.get("ip", applied.host))
    applied.port = applied.port if port is None else str(port)


def _check_rest(hop: Hop, given: Mapping[str, Any]) -> None:
    """What has no effect: what moves goes through host memory, whatever the engine computes on,
    and instances are counted by joining the gateway."""
    device = given.get("buffer_device", BUFFER_DEVICES[0])
    if device not in BUFFER_DEVICES:
        why = f"must be one of {', '.join(BUFFER_DEVICES)}, not {device!r}"
        raise _refused(hop, "buffer_device", why)
    size = _number(given.get("parallel_size", 1))
    if "rank" in given:
        rank = _number(given["rank"])
        if rank is None or size is None or not 0 <= rank < size:
            raise _refused(
                hop, "rank",
                f"must be a number from 0 to below {hop.prefix}_parallel_size, not "
                f"{given['rank']!r}; or drop both: instances are counted by joining the gateway",
            )  # fmt: skip
    if size is None or size < 1:
        why = f"must be a number above zero, not {given['parallel_size']!r}"
        raise _refused(hop, "parallel_size", why)
    policy = given.get("load_failure_policy", "recompute")
    if policy != "recompute":
        raise _refused(
            hop, "load_failure_policy",
            f"{policy!r} is not supported: what could not be moved is computed again; write "
            '"recompute", or drop it',
        )  # fmt: skip


def _number(value: Any) -> int | None:
    """A whole number, also as a text such as "1e9": theirs are often written so; None: none."""
    try:
        number = float(value)
        is_whole = not isinstance(value, bool) and number == int(number)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(number) if is_whole else None
