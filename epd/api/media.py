"""Pictures from a request: fetched under policy, known by their header, never decoded here.

`data:` URLs and http(s) only.  An http(s) URL is a way into the operator's network, so the address
that is really connected to must be public (unless configured otherwise), for the first URL and for
every redirect: names are resolved by a resolver that drops other addresses, so that a name which
changes between check and connection gains nothing.  Sizes are bounded before decoding and while
streaming.  From the bytes only the header is read: format, size, orientation, animation.  Limits on
pixels and sides come before anybody decodes (fault F46).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import ipaddress
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes, urljoin, urlsplit

from epd.api.errors import ApiError, bad_request
from epd.config import Limits

if TYPE_CHECKING:
    import aiohttp

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_STILL = ("JPEG", "MPO", "BMP")
_WITH_EARLY_EXIF = ("JPEG", "MPO", "WEBP", "TIFF")
_ORIENTATION = 0x0112
CHUNK_NBYTES = 64 << 10


def read_size(data: bytes, limits: Limits, param: str) -> tuple[int, int]:
    """Width and height as they will be after EXIF rotation, from the header alone.

    Raises ApiError for what is no picture, animated, too large or too thin.
    """
    from PIL import Image, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # our own limit follows; Pillow's is a warning or another text
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise bad_request(
            f"{param} is not a picture in a known format; send one of {', '.join(FORMATS)}", param
        ) from None
    except Exception as error:  # a hostile header can trip any parser
        raise bad_request(f"{param} cannot be read as a picture: {error}", param) from None
    width, height = image.size
    if width * height > limits.max_pixels:
        raise bad_request(
            f"{param} is {width} x {height} pixels; at most {limits.max_pixels} pixels are taken",
            param,
        )
    if max(width, height) > limits.max_side_ratio * min(width, height):
        raise bad_request(
            f"{param} is {width} x {height} pixels; one side may be at most "
            f"{limits.max_side_ratio} times the other",
            param,
        )
    if image.format not in _STILL and getattr(image, "n_frames", 1) > 1:
        raise bad_request(f"{param} is animated; send one frame as PNG or JPEG", param)
    return (height, width) if _is_turned(image) else (width, height)


def _is_turned(image: Any) -> bool:
    """EXIF orientations 5 to 8 swap the sides."""
    if image.format not in _WITH_EARLY_EXIF and "exif" not in image.info:
        return False  # asking would decode the pixels
    try:
        return int(image.getexif().get(_ORIENTATION, 1)) in (5, 6, 7, 8)
    except Exception:  # broken EXIF is no reason to refuse; the worker ignores it too
        return False


def read_data_url(url: str, limits: Limits, param: str) -> bytes:
    """The bytes of a `data:` URL.  Raises ApiError."""
    head, comma, body = url.partition(",")
    if not comma:
        raise bad_request(f"{param} is a data: URL without a comma before its data", param)
    if not head.endswith(";base64"):
        data = unquote_to_bytes(body)
        _check_nbytes(len(data), limits, param)
        return data
    _check_nbytes(len(body) * 3 // 4 - 2, limits, param)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request(f"{param} holds invalid base64: {error}", param) from None


def _check_nbytes(nbytes: int, limits: Limits, param: str) -> None:
    if nbytes > limits.max_image_nbytes:
        raise bad_request(
            f"{param} has more than {limits.max_image_nbytes} bytes, the limit for one picture",
            param,
        )


def is_public(address: str) -> bool:
    """Whether the internet may be meant by it: no loopback, private, link-local, reserved ones."""
    ip = ipaddress.ip_address(address.split("%", 1)[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    ip = mapped or ip
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


class MediaFetcher:
    """Gets the bytes behind an image_url."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, url: str, param: str) -> bytes:
        """The compressed picture.  Raises ApiError naming `param`."""
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            return read_data_url(url, self._limits, param)
        if scheme not in ("http", "https"):
            raise bad_request(f"{param} has the scheme {scheme[:20]!r}; use data:, http: or https:", param)
        try:
            async with asyncio.timeout(self._limits.fetch_timeout_s):
                return await self._download(url, param)
        except TimeoutError:
            raise bad_request(
                f"{param} could not be fetched within {self._limits.fetch_timeout_s:g} s", param
            ) from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _download(self, url: str, param: str) -> bytes:
        import aiohttp

        session = self._open()
        for _ in range(self._limits.max_redirects + 1):
            self._check_host(url, param)
            try:
                async with session.get(url, allow_redirects=False) as response:
                    if response.status in (301, 302, 303, 307, 308):
                        url = urljoin(url, response.headers.get("Location", ""))
                        continue
                    if response.status != 200:
                        raise bad_request(
                            f"{param} could not be fetched: HTTP status {response.status}", param
                        )
                    return await self._read(response, param)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                cause = getattr(error, "os_error", None) or error
                text = str(cause) or type(cause).__name__
                raise bad_request(f"{param} could not be fetched: {text}", param) from None
        raise bad_request(
            f"{param} redirects more than {self._limits.max_redirects} times", param
        )

    async def _read(self, response: aiohttp.ClientResponse, param: str) -> bytes:
        data = bytearray()
        async for chunk in response.content.iter_chunked(CHUNK_NBYTES):
            data += chunk
            _check_nbytes(len(data), self._limits, param)
        return bytes(data)

    def _check_host(self, url: str, param: str) -> None:
        """Schemes of redirects, and literal addresses, which no resolver sees."""
        try:
            parts = urlsplit(url)
            host = parts.hostname or ""
        except ValueError:
            raise bad_request(f"{param} is not a valid URL", param) from None
        if parts.scheme not in ("http", "https") or not host:
            raise bad_request(f"{param} leads to {url[:100]!r}, which is not http(s)", param)
        if self._limits.allow_private_networks:
            return
        try:
            public = is_public(host)
        except ValueError:
            return  # a name: the resolver judges
        if not public:
            raise bad_request(f"{param} leads to a private or local address: {host}", param)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            allow = self._limits.allow_private_networks
            resolver = None if allow else _public_resolver()
            connector = aiohttp.TCPConnector(resolver=resolver, limit=64, ttl_dns_cache=30)
            self._session = aiohttp.ClientSession(
                connector=connector, trust_env=False, headers={"User-Agent": "epd"}
            )
        return self._session


def _public_resolver() -> Any:
    """The system's resolver, with every address dropped that is not public."""
    from aiohttp.abc import AbstractResolver, ResolveResult
    from aiohttp.resolver import ThreadedResolver

    class PublicResolver(AbstractResolver):
        def __init__(self) -> None:
            self._inner = ThreadedResolver()

        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> list[ResolveResult]:
            found = await self._inner.resolve(host, port, family)
            public = [entry for entry in found if is_public(entry["host"])]
            if not public:
                raise OSError(f"{host} is a private or local address")
            return public

        async def close(self) -> None:
            await self._inner.close()

    return PublicResolver()


__all__ = ["ApiError", "MediaFetcher", "is_public", "read_data_url", "read_size"]
