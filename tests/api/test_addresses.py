"""Public or not, in every spelling of an address."""

from __future__ import annotations

import pytest

from epd.api.addresses import AddressRefused, check_host, is_public, public_resolver


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("2002:7f00:1::", False),  # 6to4 of 127.0.0.1
        ("64:ff9b::10.0.0.1", False),  # NAT64
        ("64:ff9b::8.8.8.8", True),
        ("2001:4860:4860::8888", True),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.0.0.1.", "127.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "0177.0.0.1",
        "0", "::1", "::ffff:10.0.0.1", "169.254.169.254", "example.1", "fe80::1%eth0",
    ],
)  # fmt: skip
def test_literal_addresses_are_read_strictly(host: str) -> None:
    with pytest.raises(AddressRefused):
        check_host(host)


@pytest.mark.parametrize("host", ["8.8.8.8", "example.com", "a1", "1.example", "2001:db8::1.com"])
def test_names_and_public_addresses_pass(host: str) -> None:
    if host == "2001:db8::1.com":
        with pytest.raises(AddressRefused):
            check_host(host)
    else:
        check_host(host)


async def test_a_name_that_leads_inside_is_not_resolved() -> None:
    resolver = public_resolver()
    with pytest.raises(OSError, match="private or local"):
        await resolver.resolve("localhost", 80)
    await resolver.close()
