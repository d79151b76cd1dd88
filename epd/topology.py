"""The short names of topologies: `2e1pd` is two encoders and one instance of prefill and decode.

A number counts instances; the letters behind it are the roles that each of them has. So `1e1p1d`
are three instances, `1epd` is one with all three roles, and `2epd` are two replicas of it.
"""

from __future__ import annotations

import re

from epd.config import ConfigError

ROLE_OF_LETTER = {"e": "encode", "p": "prefill", "d": "decode"}
ROLES = tuple(ROLE_OF_LETTER.values())  # in the order in which a request meets them
MAX_INSTANCES = 64
EXAMPLES = "1e1p1d, 1e1pd, 2epd"

Roles = tuple[str, ...]

_GROUP = re.compile(r"(\d+)([a-z]+)")


def parse_topology(text: str) -> list[Roles]:
    """One tuple of roles per instance, in the order of the text: "1e1pd" gives
    [("encode",), ("prefill", "decode")].

    Raises ConfigError when the text is no topology or could not serve a request.
    """
    groups = _GROUP.findall(text)
    if not groups or "".join(count + letters for count, letters in groups) != text:
        raise ConfigError(
            f"topology {text!r} cannot be read: write counts and letters, such as {EXAMPLES}"
        )
    instances: list[Roles] = []
    for count, letters in groups:
        instances += [_roles(text, letters)] * _count(text, count, letters)
    if len(instances) > MAX_INSTANCES:
        raise ConfigError(
            f"topology {text!r} has {len(instances)} instances; at most {MAX_INSTANCES} are run by "
            "one command: start more of them on other hosts with --join"
        )
    for role in ("prefill", "decode"):
        if not any(role in roles for roles in instances):
            raise ConfigError(
                f"topology {text!r} has no {role} instance and could answer nothing: add 1{role[0]}"
            )
    return instances


def parse_roles(text: str) -> Roles:
    """Roles joined by `+`, in any order: "decode+prefill" gives ("prefill", "decode").

    Raises ConfigError.
    """
    names = text.split("+")
    unknown = [name for name in names if name not in ROLES]
    if unknown or len(set(names)) != len(names):
        raise ConfigError(
            f"role {text!r} is unknown: write gateway, all, or some of {', '.join(ROLES)} joined "
            "by +, such as prefill+decode"
        )
    return tuple(role for role in ROLES if role in names)


def name_instances(instances: list[Roles]) -> list[tuple[str, Roles]]:
    """An id for each instance, by its letters and a number: e0, e1, pd0."""
    named = []
    serials: dict[str, int] = {}
    for roles in instances:
        letters = "".join(role[0] for role in roles)
        serial = serials.get(letters, 0)
        serials[letters] = serial + 1
        named.append((f"{letters}{serial}", roles))
    return named


def _roles(text: str, letters: str) -> Roles:
    for letter in letters:
        if letter not in ROLE_OF_LETTER:
            raise ConfigError(
                f"topology {text!r}: {letter!r} is no role; e is encode, p is prefill, d is decode"
            )
        if letters.count(letter) > 1:
            raise ConfigError(
                f"topology {text!r}: {letters!r} names {letter!r} twice in one instance; for two "
                f"instances write 2{letter}"
            )
    return tuple(role for letter, role in ROLE_OF_LETTER.items() if letter in letters)


def _count(text: str, count: str, letters: str) -> int:
    if len(count) > 4 or int(count) == 0:
        raise ConfigError(
            f"topology {text!r}: {count}{letters} counts {count} instances; give 1 to "
            f"{MAX_INSTANCES}"
        )
    return int(count)
