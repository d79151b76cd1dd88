"""The command line as a client of HTTPS: whom it trusts, and what it says without an answer."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from epd.cli.ask import tls
from epd.cli.ask.client import connected
from epd.cli.ask.question import AskSampling, user_message
from epd.cli.ask.temporary import running_of, server_of
from epd.cli.boundary import CommandFailed
from epd.cli.look import doctor
from epd.cli.main import parser_of
from epd.cli.parser import UsageError
from epd.config import AccessConfig
from epd.frontend import Readiness
from tests.api.fakes import FakeFrontend, said, serving

LOOKING = ("top", "list", "story", "snapshot")
CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@pytest.fixture(scope="module")
def own_ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory: ca.pem, and leaf.pem with key.pem, which it has signed for 127.0.0.1."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("makes its certificates with openssl")
    where = tmp_path_factory.mktemp("ca")
    of_ca = ("-x509", "-subj", "/CN=own CA", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
    of_leaf = ("-subj", "/CN=leaf", "-addext", "subjectAltName=IP:127.0.0.1")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-copy_extensions", "copy")
    for command in (
        ("req", *CURVE, *of_ca),
        ("req", *CURVE, *of_leaf, "-keyout", "key.pem", "-out", "leaf.csr"),
        ("x509", "-req", "-in", "leaf.csr", *signed, "-days", "2", "-out", "leaf.pem"),
    ):
        subprocess.run([openssl, *command], cwd=where, check=True, capture_output=True)
    return where


def access(own_ca: Path) -> AccessConfig:
    return AccessConfig(ssl_certfile=str(own_ca / "leaf.pem"), ssl_keyfile=str(own_ca / "key.pem"))


async def told(url: str, trusted: ssl.SSLContext | None = None) -> str:
    """The sentence of a command that gets no answer there."""
    with pytest.raises(CommandFailed) as failure:
        async with connected(url, trusted=trusted):
            pass
    return str(failure.value)


@pytest.mark.parametrize("by", ["flag", "environment", "the certificate itself", "our own server"])
async def test_who_knows_the_ca_is_answered(
    by: str, own_ca: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "environment":
        monkeypatch.setenv("SSL_CERT_FILE", str(own_ca / "ca.pem"))
    make: dict[str, Callable[[], ssl.SSLContext]] = {
        "flag": lambda: tls.trusting(str(own_ca / "ca.pem")),
        "environment": tls.trusting,
        "the certificate itself": lambda: tls.trusting(str(own_ca / "leaf.pem")),
        "our own server": lambda: tls.pinned(str(own_ca / "leaf.pem")),
    }
    script = [said("h"), said("i", "stop")]
    async with serving(FakeFrontend(script), access=access(own_ca)) as (server, _, _):
        host = "localhost" if by == "our own server" else "127.0.0.1"
        url = f"https://{host}:{server.port}"
        async with connected(url, trusted=make[by]()) as client:
            assert (await client.ask([user_message("?")], AskSampling())).text == "hi"


async def test_what_is_wrong_is_said_with_its_remedy(own_ca: Path) -> None:
    known = tls.trusting(str(own_ca / "ca.pem"))
    async with serving(access=access(own_ca)) as (server, _, _):
        at = f"127.0.0.1:{server.port}"
        strange = await told(f"https://{at}", tls.trusting())
        assert "certificate is not trusted here" in strange and "--cacert FILE" in strange
        assert "another name" in await told(f"https://localhost:{server.port}", known)
        assert await told(f"http://{at}") == f"{at} speaks HTTPS: write --url https://{at}"
    async with serving() as (server, _, _):
        at = f"127.0.0.1:{server.port}"
        wrong = await told(f"https://{at}", known)
        assert wrong == f"{at} speaks plain HTTP: write --url http://{at}"
    assert "is the server up?" in await told(f"http://{at}")
    assert "is the server up?" in await told(f"https://{at}", known)


async def test_who_must_show_a_certificate_is_told_so(own_ca: Path) -> None:
    ca = str(own_ca / "ca.pem")
    asking = msgspec.structs.replace(access(own_ca), ssl_ca_certs=ca)
    async with serving(access=asking) as (server, _, _):
        found = await told(f"https://127.0.0.1:{server.port}", tls.trusting(ca))
    assert "does it want a client's certificate" in found


@pytest.mark.parametrize("verb", ["ask", "chat", "doctor", *LOOKING])
def test_every_client_takes_a_ca(verb: str, tmp_path: Path) -> None:
    first = {"ask": ["?"], "list": ["requests"], "story": ["key"]}.get(verb, [])
    make = {"ask": server_of, "chat": server_of}.get(verb, running_of)
    if verb == "doctor":
        assert parser_of(verb).parse(["--cacert", "ca.pem"]).cacert == "ca.pem"
        return
    args = parser_of(verb).parse([*first, "--url", "https://h", "--cacert", str(tmp_path / "none")])
    with pytest.raises(UsageError, match=r"--cacert .*none cannot be used"):
        make(args)
    args = parser_of(verb).parse([*first, "--url", "https://h"])
    assert make(args).trusted is not None  # type: ignore[union-attr]
    if make is server_of:
        with pytest.raises(UsageError, match="--cacert is for a running server"):
            make(parser_of(verb).parse([*first, "--cacert", "ca.pem"]))


async def test_the_doctor_looks_through_tls(own_ca: Path) -> None:
    async with serving(access=access(own_ca)) as (server, frontend, _):
        frontend.readiness = Readiness(True, "", [{"instance": "e0"}])
        where = ("127.0.0.1", server.port)
        strange = await asyncio.to_thread(doctor.check_tls, *where, "")
        assert not strange.ok and "--cacert FILE" in strange.remedy
        known = await asyncio.to_thread(doctor.check_tls, *where, str(own_ca / "ca.pem"))
        assert known.ok and "is good until" in known.detail
        assert await asyncio.to_thread(doctor._instances, *where) == [{"instance": "e0"}]
    async with serving() as (server, _, _):
        plain = await asyncio.to_thread(doctor.check_tls, "127.0.0.1", server.port, "")
        assert plain.ok and plain.detail.startswith("none is spoken at")
