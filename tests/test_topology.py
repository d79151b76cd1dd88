"""Topologies by name: what each gives, and one sentence for each that cannot be."""

from __future__ import annotations

import pytest

from epd.config import ConfigError
from epd.topology import name_instances, parse_groups, parse_roles, parse_topology

E, P, D = ("encode",), ("prefill",), ("decode",)
PD = ("prefill", "decode")
EPD = ("encode", "prefill", "decode")


@pytest.mark.parametrize(
    ("text", "instances"),
    [
        ("1e1p1d", [E, P, D]),
        ("1e1pd", [E, PD]),
        ("1epd", [EPD]),
        ("2epd", [EPD, EPD]),
        ("2e1p2d", [E, E, P, D, D]),
        ("1dp", [PD]),  # the order of letters means nothing
        ("1p1d", [P, D]),  # a text-only model needs no encoder
    ],
)
def test_a_topology_names_its_instances(text: str, instances: list[tuple[str, ...]]) -> None:
    assert parse_topology(text) == instances


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be read"),
        ("epd", "such as 1e1p1d"),
        ("1e1p1", "cannot be read"),
        ("1E1PD", "cannot be read"),
        ("1e 1pd", "cannot be read"),
        ("1x1pd", "'x' is no role"),
        ("1ee1pd", "write 2e"),
        ("0e1pd", "0e counts 0"),
        ("2e", "no prefill"),
        ("1e1p", "no decode"),
        ("65epd", "at most 64"),
        ("99999999epd", "give 1 to 64"),
    ],
)
def test_what_is_no_topology_is_said_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_topology(text)


def test_a_part_is_one_whose_rest_is_elsewhere() -> None:
    assert parse_groups("1e1p", whole=False) == [(E, 1), (P, 1)]
    assert parse_groups("1d:tp2", whole=False) == [(D, 2)]
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_groups("1e1", whole=False)


@pytest.mark.parametrize(
    ("text", "num_ranks", "groups"),
    [
        ("1epd:tp2", 1, [(EPD, 2)]),
        ("1e1pd:tp4", 1, [(E, 1), (PD, 4)]),
        ("2pd:tp2,1e", 1, [(PD, 2), (PD, 2), (E, 1)]),
        ("1e1pd", 2, [(E, 1), (PD, 2)]),  # --tensor-parallel-size 2
        ("1e1pd:tp4", 2, [(E, 1), (PD, 4)]),
        ("1e1p1d", 1, [(E, 1), (P, 1), (D, 1)]),
        ("1e1p1d", 2, [(E, 1), (P, 2), (D, 2)]),
        ("1e1p:tp4,1d:tp2", 1, [(E, 1), (P, 4), (D, 2)]),
        ("1pd:tp2,1pd", 1, [(PD, 2), (PD, 1)]),
        ("1e:tp1,1epd", 1, [(E, 1), (EPD, 1)]),
        ("1e:tp2,1pd", 1, [(E, 2), (PD, 1)]),
    ],
)
def test_a_topology_says_how_many_ranks_an_instance_has(
    text: str, num_ranks: int, groups: list[tuple[tuple[str, ...], int]]
) -> None:
    assert parse_groups(text, num_ranks) == groups


@pytest.mark.parametrize(
    ("text", "num_ranks", "said"),
    [
        ("1pd:tp21e", 1, "1pd:tp2,1e"),
        ("1pd:tp2,", 1, "cannot be read"),
        ("1pd:", 1, "cannot be read"),
        ("1pd:tp", 1, "cannot be read"),
        (":tp2", 1, "cannot be read"),
        ("1pd:tp0", 1, "give 1 to 64"),
        ("1pd:tp99999", 1, "give 1 to 64"),
    ],
)
def test_ranks_that_cannot_be_are_said_in_a_sentence(text: str, num_ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_groups(text, num_ranks)


def test_who_knows_no_groups_refuses_them() -> None:
    with pytest.raises(ConfigError, match="is for epd run"):
        parse_topology("1epd:tp2")


def test_instances_are_named_by_letters_and_number() -> None:
    named = name_instances(parse_topology("2e1pd1e"))
    assert [name for name, _ in named] == ["e0", "e1", "pd0", "e2"]


def test_roles_come_in_the_order_in_which_a_request_meets_them() -> None:
    assert parse_roles("decode+prefill") == PD
    assert parse_roles("encode+prefill+decode") == EPD


@pytest.mark.parametrize("text", ["", "encoder", "prefill+", "decode+decode", "prefill,decode"])
def test_unknown_roles_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="joined by"):
        parse_roles(text)
