"""TLS from the client's side: whom the command line trusts, and what to do where no answer came."""

from __future__ import annotations

import asyncio
import ssl
from urllib.parse import urlsplit

from epd.cli.parser import UsageError

PROBE_TIMEOUT_S = 5.0
_ANOTHER_NAME = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_NOT_NOW = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_SPOKEN = {"http": "plain HTTP", "https": "HTTPS"}


def trusting(cacert: str = "") -> ssl.SSLContext:
    """The CAs of a PEM file, else those of this host, which SSL_CERT_FILE in the environment names.

    Raises UsageError.
    """
    try:
        context = ssl.create_default_context(cafile=cacert or None)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--cacert {cacert} cannot be used ({error}); give a PEM file of CA certificates"
        ) from None
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # also the server's own certificate
    return context


def pinned(certfile: str) -> ssl.SSLContext:
    """This certificate alone, whatever names it holds: of a server of our own.  Raises OSError."""
    context = trusting(certfile)
    context.check_hostname = False
    return context


def unverified() -> ssl.SSLContext:
    """To look what is there; nothing secret may be sent."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def distrust(error: ssl.SSLCertVerificationError) -> str:
    """Why a certificate is not taken, and the remedy."""
    why = error.verify_message
    if error.verify_code in _ANOTHER_NAME:
        return f"its certificate is of another name ({why}); ask by a name that it holds"
    if error.verify_code in _NOT_NOW:
        return f"its certificate is not valid now ({why}); renew it at the server"
    return (
        f"its certificate is not trusted here ({why}); name its CA: --cacert FILE, or "
        "SSL_CERT_FILE in the environment"
    )


async def why_silent(url: str, error: Exception) -> str:
    """A sentence with the remedy: why a request to this URL got no answer."""
    import aiohttp

    cause = getattr(error, "certificate_error", error)
    parts = urlsplit(url)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"{parts.scheme}://{parts.netloc}: {distrust(cause)}"
    other = "http" if parts.scheme == "https" else "https"
    if await _speaks(other, url):
        return f"{parts.netloc} speaks {_SPOKEN[other]}: write --url {other}://{parts.netloc}"
    hint = "is the server up?"
    if parts.scheme == "https" and isinstance(error, aiohttp.ServerDisconnectedError):
        hint = "does it want a client's certificate (--ssl-ca-certs)? curl can show one"
    return f"{url} does not answer ({error}); {hint}"


async def _speaks(scheme: str, url: str) -> bool:
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    context = unverified() if scheme == "https" else None
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context)
            try:
                writer.write(b"GET /health HTTP/1.0\r\n\r\n")
                return await reader.readexactly(5) == b"HTTP/"
            finally:
                writer.close()
    except (OSError, EOFError):  # TimeoutError is one
        return False
