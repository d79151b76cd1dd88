"""Public or not, in every spelling of an address."""

from __future__ import annotations

import socket

import pytest

from epd.api.prompts.addresses import is_public, public_socket


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
        ("192.0.0.192", False),  # Oracle's metadata
        ("::ffff:192.0.0.192", False),
        ("168.63.129.16", False),  # Azure's host
        ("fec0::1", False),  # site-local
        ("3fff::1", False),  # documentation
        ("2001:4860:4860::8888", True),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize(
    ("family", "host"),
    [
        (socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET, "169.254.169.254"),
        (socket.AF_INET6, "::1"),
        (socket.AF_INET6, "::ffff:10.0.0.1"),
        (socket.AF_INET6, "fe80::1%eth0"),
    ],
)
def test_no_socket_leads_inside(family: socket.AddressFamily, host: str) -> None:
    with pytest.raises(OSError, match="private or local") as refused:
        public_socket((family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, 80)))
    assert host not in str(refused.value)


def test_a_socket_to_a_public_address() -> None:
    made = public_socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 80)))
    assert made.family is socket.AF_INET
    made.close()
