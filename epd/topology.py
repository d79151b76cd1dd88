"""The short names of topologies: `2e1pd` is two encoders and one instance of prefill and decode.

A number counts instances; the letters behind it are the roles that each of them has. So `1e1p1d`
are three instances, `1epd` is one with all three roles, and `2epd` are two replicas of it.

`:tpN` behind the letters makes each of these instances a group of N ranks, processes that share its
language model and its images. `1e1pd:tp2` is one encoder and a group of two ranks. More may follow
behind a comma: `1pd:tp2,1e`."""

from __future__ import annotations

import re

from epd.config import ConfigError

ROLE_OF_LETTER = {"e": "encode", "p": "prefill", "d": "decode"}
ROLES = tuple(ROLE_OF_LETTER.values())  # in the order in which a request meets them
MAX_INSTANCES = 64
EXAMPLES = "1e1p1d, 1e1pd, 2epd"
MAX_RANKS = 64  # of an instance

Roles = tuple[str, ...]


def natural(name: str) -> list[tuple[int, str]]:
    """A key to sort names by: e2 comes before e10."""
    return [(int(run) if run.isdecimal() else -1, run) for run in re.split("([0-9]+)", name) if run]


_PART = re.compile(r"(\d+)([a-z]+)(?::tp(\d+)(?:,(?=.)|$))?")


def parse_topology(text: str) -> list[Roles]:
    """One tuple of roles per instance, in the order of the text: "1e1pd" gives
    [("encode",), ("prefill", "decode")].

    Raises ConfigError when the text is no topology, could not serve a request, or has groups.
    """
    instances = parse_groups(text)
    if any(num_ranks > 1 for _, num_ranks in instances):
        raise ConfigError(f"topology {text!r}: :tp is for epd run; here every instance is one rank")
    return [roles for roles, _ in instances]


def parse_groups(text: str, num_ranks: int = 1, *, whole: bool = True) -> list[tuple[Roles, int]]:
    """The roles and the number of ranks of each instance, in the order of the text: "1e1pd:tp2"
    gives [(("encode",), 1), (("prefill", "decode"), 2)].

    `num_ranks`: of instances with prefill or decode that have none in the text.  Not `whole`: the
    rest is on other hosts.  Raises ConfigError as `parse_topology`, and where ranks cannot share
    what an instance does."""
    parts = _PART.findall(text)
    if not parts or "".join(found[0] for found in _PART.finditer(text)) != text:
        raise ConfigError(
            f"topology {text!r} cannot be read: write counts and letters, such as {EXAMPLES}; "
            ":tpN behind letters makes groups of N ranks, such as 1e1pd:tp2 or 1pd:tp2,1e"
        )
    groups: list[tuple[Roles, int]] = []
    for count, letters, told in parts:
        roles = _roles(text, letters)
        ranks = int(told[:4]) if told else num_ranks_of(roles, num_ranks)
        check_ranks(f"topology {text!r}: {count}{letters}", roles, ranks)
        groups += [(roles, ranks)] * _count(text, count, letters)
    instances = [roles for roles, _ in groups]
    if len(instances) > MAX_INSTANCES:
        raise ConfigError(
            f"topology {text!r} has {len(instances)} instances; at most {MAX_INSTANCES} are run by "
            "one command: start more of them on other hosts with --join"
        )
    for role in ("prefill", "decode"):
        if whole and not any(role in roles for roles in instances):
            raise ConfigError(
                f"topology {text!r} has no {role} instance and could answer nothing: add 1{role[0]}"
            )
    return groups


def num_ranks_of(roles: Roles, num_ranks: int) -> int:
    """Of an instance where so many were asked for: an encoder has one, if the text has none."""
    return 1 if roles == ("encode",) else num_ranks


def check_ranks(what: str, roles: Roles, num_ranks: int) -> None:
    """Raises ConfigError if an instance of these roles cannot have so many ranks."""
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ConfigError(f"{what} has {num_ranks} ranks; give 1 to {MAX_RANKS}")


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
