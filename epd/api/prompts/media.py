"""Images and videos of a request: their bytes, from URLs, under policy (F46).

Sizes are bounded while a download streams; a download has one time limit over all its redirects,
and each of these is checked like the first URL.  What is checked is the URL object that is then
connected to, never its text: `http://①②⑦.⓪.⓪.①` is a spelling of 127.0.0.1 to those who connect.  A
server's headers about its content are not used: `image` looks at the bytes.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from epd.api.http.data_url import Bound, too_large
from epd.api.http.errors import bad_request
from epd.api.http.exchange import count_fetched
from epd.api.prompts.addresses import public_socket
from epd.api.prompts.names import Lookups
from epd.config import Limits

if TYPE_CHECKING:
    import aiohttp
    import yarl

CHUNK_NBYTES = 64 << 10
MAX_CONNECTIONS, MAX_PER_HOST = 256, 64  # one that is silent leaves places to others
MAX_REDIRECTS = 3  # a shortener, https, and the place itself
REDIRECTS = (301, 302, 303, 307, 308)


class MediaFetcher:
    """Downloads what an http(s) URL points to."""

    def __init__(self, limits: Limits) -> None:
        importlib.import_module("aiohttp")  # now, not in the first request: it takes 0.3 s
        self._limits = limits
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, url: str, bound: Bound, param: str) -> bytes:
        """The compressed image or video.  Raises ApiError naming `param`."""
        if self._limits.allowed_local_media_path and url[:5].lower() == "file:":
            data = await asyncio.to_thread(self._read_file, url, bound, param)
            count_fetched(len(data))
            return data
        try:
            async with asyncio.timeout(self._limits.fetch_timeout_s):
                return await self._download(url, bound, param)
        except TimeoutError:
            raise bad_request(
                f"{param} could not be fetched within {self._limits.fetch_timeout_s:g} s; "
                f"send the {bound.what} as a data: URL",
                param,
            ) from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _download(self, text: str, bound: Bound, param: str) -> bytes:
        import aiohttp

        session = self._open()
        url = self._checked(_parsed(text, param), param)
        for _ in range(MAX_REDIRECTS + 1):
            try:
                async with session.get(url, allow_redirects=False) as response:
                    if response.status in REDIRECTS and "Location" in response.headers:
                        url = _parsed(response.headers["Location"], param, url)
                        url = self._checked(url, param)
                        continue
                    return await self._read(response, bound, param)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                cause = getattr(error, "os_error", None) or error
                text = getattr(cause, "strerror", None) or type(cause).__name__
                raise bad_request(f"{param} could not be fetched: {text}", param) from None
        raise bad_request(f"{param} redirects more than {MAX_REDIRECTS} times", param)

    def _checked(self, url: yarl.URL, param: str) -> yarl.URL:
        """Each URL on the way.  Raises ApiError."""
        domains = self._limits.allowed_media_domains
        if domains and url.host not in domains:
            raise bad_request(
                f"{param} leads to {str(url.host)[:100]!r}; images and videos are fetched from "
                f"{', '.join(domains)} only",
                param,
            )
        return url

    def _read_file(self, url: str, bound: Bound, param: str) -> bytes:
        """What a file: URL names, below the operator's directory.  Raises ApiError.

        The error for a path elsewhere does not reveal whether a file is there.
        """
        root = Path(self._limits.allowed_local_media_path).resolve()
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path)).resolve()
            if parts.netloc not in ("", "localhost") or not path.is_relative_to(root):
                raise FileNotFoundError
            # not waiting for the writer of a pipe
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            with open(os.open(path, flags), "rb") as file:
                # what was opened, for a link may have been made since, also of a directory
                opened = Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))
                is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
                if not is_file or not opened.is_relative_to(root):
                    raise FileNotFoundError
                data = file.read(bound.nbytes + 1)
        except (OSError, ValueError, RuntimeError):  # the last: links that go round
            raise bad_request(f"{param} is no file that may be read", param) from None
        if len(data) > bound.nbytes:
            raise too_large(bound, param)
        return data

    async def _read(self, response: aiohttp.ClientResponse, bound: Bound, param: str) -> bytes:
        if response.status != 200:
            raise bad_request(f"{param} could not be fetched: HTTP status {response.status}", param)
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":  # not asked for; a way to send a bomb
            raise bad_request(f"{param} could not be fetched: it is sent as {encoding!r}", param)
        data = bytearray()
        async for chunk in response.content.iter_chunked(CHUNK_NBYTES):
            count_fetched(len(chunk))
            data += chunk
            if len(data) > bound.nbytes:
                raise too_large(bound, param)
        return bytes(data)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            allow = self._limits.allow_private_networks
            connector = aiohttp.TCPConnector(
                socket_factory=None if allow else public_socket,
                limit=MAX_CONNECTIONS,
                limit_per_host=MAX_PER_HOST,
                resolver=aiohttp.ThreadedResolver(Lookups()),  # type: ignore[arg-type]
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,  # a proxy would connect for us, to whatever
                auto_decompress=False,
                headers={"User-Agent": "epd", "Accept-Encoding": "identity"},
            )
        return self._session


def _parsed(text: str, param: str, base: yarl.URL | None = None) -> yarl.URL:
    """A URL on the way, checked, as it will be connected to.  Raises ApiError."""
    import yarl

    try:
        url = yarl.URL(text) if base is None else base.join(yarl.URL(text))
        host, _ = url.host, url.port
    except ValueError:
        raise bad_request(f"{param} is not a valid URL", param) from None
    if url.scheme not in ("http", "https") or not host:
        raise bad_request(
            f"{param} leads to {text[:100]!r}; use a data:, http: or https: URL", param
        )
    if url.user is not None or url.password is not None:
        raise bad_request(f"{param} holds credentials; send a URL without them", param)
    return url
