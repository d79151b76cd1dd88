"""`data:` URLs: bytes in a text, bounded before they are decoded, or while they arrive.

The data of a long one never becomes a text: a body hands it over as it comes, and it is decoded
piece by piece (`DataUrl`).  To everybody but `read_data_url` such a URL is the text in front of its
data.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

import msgspec
import pybase64

from epd.api.http.errors import ApiError, bad_request
from epd.config import Limits

_ESCAPE_NBYTES = 6  # of a JSON escape, at most: \\u002b


@dataclass(frozen=True, slots=True)
class Bound:
    """How large a thing may be, and what it is called in a message."""

    what: str
    nbytes: int


def image_bound(limits: Limits) -> Bound:
    return Bound("image", limits.max_image_nbytes)


def video_bound(limits: Limits) -> Bound:
    return Bound("video", limits.max_video_nbytes)


class DataUrl(str):  # noqa: SLOT000 (few, and large)
    """A base64 URL whose data came as JSON and was decoded on its way.

    vLLM's form of a video has a comma between every two frames; `frames` are pieces of each.
    """

    def __init__(self, head: str) -> None:
        self.nbytes = 0
        self.is_broken = False
        self._is_undone = False  # what was decoded does not tell what was sent
        self.frames: list[list[bytes]] = [[]]
        self._raw = b""  # what may be the beginning of an escape
        self._run = 0  # of backslashes at the end
        self._chars = b""  # of a group of four
        self._last = b""  # whole group: several ends mean the same bytes
        self._max_nbytes = 0
        self._max_frames = 0

    @classmethod
    def begin(cls, text: bytes | bytearray, limits: Limits) -> DataUrl:
        """Of the text whose end is a string, and that the URL in front of its data."""
        head = bytes(text[text.rindex(b'"') + 1 :])
        made = cls(msgspec.json.decode(b'"' + head + b'"'))
        made._max_nbytes = max(limits.max_image_nbytes, limits.max_video_nbytes)
        made._max_frames = limits.max_video_frames + 1  # one more, which is refused by its number
        return made

    @classmethod
    def broken(cls, text: str, mark: str) -> DataUrl:
        """Of a text that is no URL: a quote is in its data."""
        made = cls(text.partition(mark)[0])
        made.is_broken = made._is_undone = True
        return made

    def feed(self, raw: bytes) -> None:
        """The next characters, as they stand in JSON."""
        run = len(raw) - len(raw.rstrip(b"\\"))
        self._run = run if run < len(raw) else self._run + run
        if self.is_broken or self.nbytes > self._max_nbytes:
            return
        raw = self._raw + raw
        last = raw.rfind(b"\\", max(0, len(raw) - _ESCAPE_NBYTES + 1))
        self._raw = b"" if last < 0 else raw[last:]
        self._decode(raw if last < 0 else raw[:last])

    def finish(self) -> bytes:
        """No more of it; gives the backslash at its end that belongs to what follows."""
        if not self._run:
            self._decode(self._raw)
        self._end_frame()
        if self._run:
            self.is_broken = self._is_undone = True
        return b"\\" * (self._run % 2)

    def under(self, head: str) -> DataUrl:
        """The same data behind another beginning."""
        named = DataUrl(head)
        named.frames, named.nbytes, named.is_broken = self.frames, self.nbytes, self.is_broken
        return named

    def each_frame(self) -> list[DataUrl]:
        """Of vLLM's form of a video: a URL per frame.  Faults are raised when it is read."""
        if self.is_broken or self.nbytes > self._max_nbytes:
            return [self]
        urls = []
        for pieces in self.frames:
            urls.append(DataUrl(self))
            urls[-1].frames = [pieces]
            urls[-1].nbytes = sum(map(len, pieces))
        return urls

    def as_text(self) -> str | None:
        """With its data, as it was sent; None if that was no base64, whole or cut off."""
        if self._is_undone or len(self.frames) > 1:
            return None
        text = pybase64.b64encode(self.take())[: -len(self._last) or None]
        return str(self) + (text + self._last + self._chars).decode()

    def take(self) -> bytes:
        """The data, once."""
        pieces, self.frames = self.frames[0], [[]]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _decode(self, raw: bytes) -> None:
        try:
            if b"\\" in raw:
                raw = msgspec.json.decode(b'"' + raw + b'"', type=str).encode("ascii")
            # To look for a comma takes a thirtieth of the time that splitting takes.
            more = self._max_frames - len(self.frames) + 1
            first, *others = raw.split(b",", more) if b"," in raw else [raw]
            self._add(first)
            for characters in others:
                self._end_frame()
                self._chars = b""
                self.frames.append([])
                self._add(characters)
        except (ValueError, msgspec.DecodeError):
            self._drop()
            self.is_broken = self._is_undone = True

    def _add(self, characters: bytes) -> None:
        if len(self.frames) > self._max_frames:
            return
        characters = self._chars + characters
        cut = len(characters) & ~3
        self._chars = characters[cut:]
        if not cut:
            return
        piece = pybase64.b64decode(characters[:cut], validate=True)
        pieces = self.frames[-1]
        if pieces and len(pieces[-1]) % 3:  # it had ended
            self.is_broken = self._is_undone = True
        pieces.append(piece)
        self._last = characters[cut - 4 : cut]
        self.nbytes += len(piece)
        if self.nbytes > self._max_nbytes:
            self._drop()

    def _end_frame(self) -> None:
        self.is_broken |= bool(self._chars)

    def _drop(self) -> None:
        for pieces in self.frames:
            pieces.clear()


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def data_nbytes(source: str | bytes) -> int:
    """About so many characters or bytes are to be read."""
    return source.nbytes if isinstance(source, DataUrl) else len(source)


def read_data_url(url: str, bound: Bound, param: str) -> bytes:
    """The bytes of a `data:` URL.  Raises ApiError."""
    if isinstance(url, DataUrl):
        if url.nbytes > bound.nbytes:
            raise too_large(bound, param)
        if url.is_broken or len(url.frames) > 1:
            raise _not_base64(param)
        return url.take()
    head, comma, body = url.partition(",")
    if not comma:
        raise bad_request(f"{param} is a data: URL without a comma before its data", param)
    if not head.lower().endswith(";base64"):
        if len(body) > 3 * bound.nbytes:
            raise too_large(bound, param)
        data = unquote_to_bytes(body)
    else:
        if len(body) * 3 // 4 - 2 > bound.nbytes:
            raise too_large(bound, param)
        try:
            data = pybase64.b64decode(body, validate=True)
        except ValueError:
            raise _not_base64(param) from None
    if len(data) > bound.nbytes:
        raise too_large(bound, param)
    return data


def _not_base64(param: str) -> ApiError:
    return bad_request(
        f"{param} holds invalid base64; encode the whole file, without line breaks", param
    )


def too_large(bound: Bound, param: str) -> ApiError:
    return bad_request(
        f"{param} has more than {bound.nbytes} bytes, the limit for one {bound.what}", param
    )
