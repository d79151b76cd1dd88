"""Names of gateways are looked up again and again; what answers is joined."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from epd.messages import Address
from epd.runtime import joins
from epd.runtime.joins import Joins

FOUR, SIX = socket.AF_INET, socket.AF_INET6


def answers(*addresses: str, family: int = FOUR) -> list[Any]:
    return [(family, 1, 6, "", (address, 7000)) for address in addresses]


def endpoints(found: Sequence[Address]) -> list[str]:
    return [address.endpoint for address in found]


async def first(given: str, *said: Any) -> list[Address]:
    loop = asyncio.get_running_loop()
    with mock.patch.object(loop, "getaddrinfo", mock.AsyncMock(side_effect=said)):
        return await Joins(given, "key").first()


@pytest.mark.parametrize(
    "given",
    ["tcp://10.0.0.1:7000", "tcp://[::1]:7000", "tcp://localhost:7000", "ipc:///run/gateway.sock"],
)
async def test_addresses_are_joined_as_they_are(given: str) -> None:
    (one,) = await first(given)
    assert one == Address("gateway", 0, given, "key")
    both = await first(f"{given},tcp://10.0.0.9:1")
    assert [address.instance_id for address in both] == [given, "tcp://10.0.0.9:1"]


async def test_a_name_stands_for_all_of_its_addresses_of_one_family() -> None:
    both = answers("fd00::1", family=SIX) + answers("10.0.0.2", "10.0.0.1")
    assert endpoints(await first("tcp://gateways:7000", both)) == [
        "tcp://10.0.0.1:7000",
        "tcp://10.0.0.2:7000",
    ]
    six = answers("fd00::1", family=SIX)
    assert endpoints(await first("tcp://gateways:7000", six)) == ["tcp://[fd00::1]:7000"]
    twice = await first("tcp://one:7000,tcp://two:7000", answers("10.0.0.1"), answers("10.0.0.1"))
    assert endpoints(twice) == ["tcp://10.0.0.1:7000"]


async def test_a_name_without_an_answer_yet_is_dialled_as_it_is() -> None:
    assert endpoints(await first("tcp://gateways:7000", OSError("no such name"))) == [
        "tcp://gateways:7000"
    ]


async def test_names_are_looked_up_again_and_keep_what_they_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joins, "LOOK_UP_EVERY_S", 0.0)
    said = [answers("10.0.0.1"), OSError("away"), answers("10.0.0.1", "10.0.0.2")]
    told: list[list[str]] = []
    with mock.patch.object(
        asyncio.get_running_loop(), "getaddrinfo", mock.AsyncMock(side_effect=said)
    ):
        made = Joins("tcp://gateways:7000", "")
        await made.first()
        with pytest.raises(StopAsyncIteration):  # nothing more is said
            await made.watch(lambda found: told.append(endpoints(found)))
    assert told == [["tcp://10.0.0.1:7000"], ["tcp://10.0.0.1:7000", "tcp://10.0.0.2:7000"]]


async def test_without_names_nothing_is_looked_up() -> None:
    await asyncio.wait_for(Joins("tcp://10.0.0.1:7000", "").watch(mock.Mock()), 1.0)
