"""Request bodies: bounded before anything is walked, and never a weight on the loop (fault F52).

Theory of operation
-------------------
A body of 60 MB is either media in base64 or an attack, so the two are separated while it arrives.
The data of a long base64 `data:` URL, or of a field `data`, is decoded piece by piece (`data_url`)
and leaves a mark in its place.  All else is the body's text, which has a bound of its own.  From
that beginning to the next quote is the inside of a JSON string, so nothing but the characters of a
string is ever taken out of the text.  Data where no medium belongs (in an argument of a call)
becomes text again, and has that text's bound.

The text is not parsed before its values have been counted, by a few passes that run in C.  Parsing,
and validation after it, run on a thread if the text is long: Python lets the loop in between two of
their steps.  A step in C does not, so the bounds keep each short.

The bytes of all bodies, of those that still arrive too, come from one budget.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

import msgspec

from epd.api.http.data_url import DataUrl
from epd.api.http.errors import ApiError, bad_request
from epd.api.http.turns import Turns
from epd.api.http.unknown import Unknown
from epd.config import Limits
from epd.frontend import JsonObject, Metric

T = TypeVar("T")

NUM_THREADS = 2
MAX_JSON_VALUES = 65_536  # none needs so many members, beside the ids of a prompt
INLINE_NBYTES = 64 << 10  # shorter is read at once: cheaper than a trip to a thread, or a turn
SHORT_NBYTES = 4 << 10  # of data: shorter stays in the text, whoever it is meant for
# of a string: a quote behind a backslash stands inside one, as in JSON or HTML that is a text
_HEAD = re.compile(rb'"(?<!\\")(?:data:[\w.+/;=\\-]{0,100};base64,|data"\s{0,9}:\s{0,9}")')
_DATA = re.compile(rb"[A-Za-z0-9+/=,\\]*")  # what it begins with: JSON's escapes, too, no sentence
_HEAD_NBYTES = 128  # at most, so that one that is cut is looked for in so many last bytes only
_MEDIA_FIELDS = ("url", "video", "image_url", "video_url")


class Intake:
    """What all bodies of one gateway share."""

    def __init__(self, limits: Limits, max_context: int, unknown: Unknown | None = None) -> None:
        self.limits = limits
        self.unknown = unknown or Unknown()
        self.max_context = max_context
        self.nbytes = 0  # of bodies that arrive, or whose requests are open
        self.threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="epd-read")
        self.turns = Turns()

    def samples(self) -> Iterator[Metric]:
        """For /metrics."""
        yield Metric("epd_open_body_bytes", self.nbytes, help="bodies of requests that are open")
        yield self.unknown.sample()

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)


class Body:
    """One request's body: `read` it, `parse` it once, `close` it when the request has ended."""

    def __init__(self, intake: Intake, announced_nbytes: int = 0) -> None:
        """Raises ApiError 413 or 429 for a length that cannot be taken."""
        self._intake = intake
        self._limits = intake.limits
        self._nbytes = 0
        self._is_closed = False
        self._text = bytearray()
        self._tail = b""  # of the text, not looked at yet
        self._short: bytearray | None = None  # of a data: URL that may yet be a long one
        self._data: DataUrl | None = None  # the one that arrives
        self._found: dict[str, DataUrl] = {}
        self._nonce = secrets.token_hex(16)
        self._place = intake.turns.place()
        self.text_nbytes = 0  # once it is parsed: all but the data of media
        self.left_out: list[str] = []  # names that no API has, where these are ignored
        self._check_length(announced_nbytes)

    # --- arriving ---------------------------------------------------------------------------------

    async def read(self, chunk: bytes) -> None:
        """The next bytes; those of a long body when it is its turn.  Raises ApiError 413 or 429."""
        self._check_length(len(chunk))
        self._nbytes += len(chunk)
        self._intake.nbytes += len(chunk)
        if self._nbytes > INLINE_NBYTES:
            await self._intake.turns.come(self._place)
        self._feed(chunk)

    def _feed(self, chunk: bytes) -> None:
        buffer, at = self._tail + chunk, 0
        self._tail = b""
        while at < len(buffer):
            at = self._feed_text(buffer, at) if self._short is None else self._feed_data(buffer, at)
        if len(self._text) > self._limits.max_text_nbytes:
            raise self._too_much_text()

    def _too_much_text(self) -> ApiError:
        return ApiError(
            413,
            f"the request body has more than {self._limits.max_text_nbytes} bytes besides the "
            "base64 data of images and videos; send a shorter text",
            code="request_too_large",
        )

    def _check_length(self, more: int) -> None:
        limits = self._limits
        if self._nbytes + more > limits.max_body_nbytes:
            raise ApiError(
                413,
                f"the request body is larger than {limits.max_body_nbytes} bytes; "
                "send smaller or fewer images",
                code="request_too_large",
            )
        self._check_budget(more)

    def _check_budget(self, more: int) -> None:
        limits = self._limits
        if self._intake.nbytes + more > limits.max_inflight_nbytes:
            raise ApiError(
                429,
                "the bodies of open requests, and what was fetched for them, fill the "
                f"gateway's {limits.max_inflight_nbytes} bytes for them; try again later",
                code="overloaded",
            )

    def _feed_text(self, buffer: bytes, at: int) -> int:
        head = _HEAD.search(buffer, at)
        if head is not None and not head.start() and self._text[-1:] == b"\\":
            head = _HEAD.search(buffer, 1)
        if head is not None:
            self._text += buffer[at : head.end()]
            self._short = bytearray()
            return head.end()
        cut = buffer.rfind(b'"', max(at, len(buffer) - _HEAD_NBYTES))
        cut = len(buffer) if cut < 0 else cut
        self._text += buffer[at:cut]
        self._tail = buffer[cut:]
        return len(buffer)

    def _feed_data(self, buffer: bytes, at: int) -> int:
        end = buffer.find(b'"', at)
        piece = buffer[at:] if end < 0 else buffer[at:end]
        if self._data is not None:
            self._data.feed(piece)
        else:
            assert self._short is not None
            self._short += piece
            if len(self._short) > SHORT_NBYTES:
                if not _DATA.fullmatch(self._short, 0, SHORT_NBYTES):
                    self._text += self._short
                    self._short = None
                    return len(buffer) if end < 0 else end
                self._data = DataUrl.begin(self._text, self._limits)
                self._data.feed(bytes(self._short))
        if end < 0:
            return len(buffer)
        self._end_data()
        return end

    def _end_data(self) -> None:
        """At a quote: leave a mark where the data was, or the data itself if it is short."""
        if self._data is None:
            assert self._short is not None
            self._text += self._short
        else:
            mark = f"{len(self._found)}-{self._nonce}"
            self._found[mark] = self._data
            # A quote behind a backslash does not end the string: it stays one that does not.
            self._text += mark.encode() + self._data.finish()
        self._data = self._short = None

    # --- arrived ----------------------------------------------------------------------------------

    async def parse(self) -> JsonObject:
        """The JSON object; long data: URLs in it are `DataUrl`s.  Raises ApiError 400 or 413."""
        if self._data is not None or self._short is not None:
            self._end_data()
        text = bytes(self._text) + self._tail
        self.text_nbytes = len(text)
        self._text.clear()
        self._is_small = len(text) <= INLINE_NBYTES
        return await self.work(self._read, text)

    async def work(self, function: Callable[..., T], *arguments: object) -> T:
        """Call it, on a thread if the text is long.  Raises ApiError."""
        try:
            if self._is_small:
                return function(*arguments)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._intake.threads, function, *arguments)
        except RecursionError:
            raise _invalid_json("nested too deeply") from None

    def count(self, nbytes: int) -> None:
        """What its request holds besides.  Raises ApiError 429."""
        self._check_budget(nbytes)
        if not self._is_closed:
            self._nbytes += nbytes
            self._intake.nbytes += nbytes

    def close(self) -> None:
        """The request has ended; idempotent."""
        self._is_closed = True
        self._intake.nbytes -= self._nbytes
        self._nbytes = 0
        self._found.clear()

    def _read(self, text: bytes) -> JsonObject:
        if not self._is_small:
            self._count(text)
        value = parse_object(text)
        if self._found:
            self._put_back(value)
        self.left_out = self._intake.unknown.leave_out(value)
        return value

    def _count(self, text: bytes) -> None:
        """Refuse more values than anybody means to send; those of a prompt of ids come on top."""
        limit = MAX_JSON_VALUES
        bare = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        strings = bare.count(b'"') // 2
        if strings <= 2 * limit:  # names and values
            bare = b"".join(bare.split(b'"')[::2])
            containers = bare.count(b"[") + bare.count(b"{")
            if containers <= limit and bare.count(b",") <= limit + self._intake.max_context:
                return
        raise ApiError(
            413,
            f"the request body holds more than {limit} values (objects, arrays and their members); "
            "send fewer, or longer texts in place of many short ones",
            code="request_too_large",
        )

    def _put_back(self, body: JsonObject) -> None:
        """Each DataUrl in the place of its mark.  Raises ApiError 400 or 413."""
        left: list[tuple[JsonObject | list[object], str, str]] = [(body, "", "")]
        while left:
            holder, path, name = left.pop()
            members = enumerate(holder) if isinstance(holder, list) else holder.items()
            for key, value in [*members]:
                if isinstance(key, int):
                    field, place = name, f"{path}[{key}]"
                elif self._nonce in key:
                    raise bad_request("a long data: URL cannot be the name of a field")
                else:
                    field, place = key, f"{path}.{key[:80]}".lstrip(".")
                if isinstance(value, list | dict):
                    left.append((value, place, field))
                elif isinstance(value, str) and self._nonce in value:
                    url = self._found.get(value.rpartition(",")[2])
                    if url is None:  # there was a quote in its data
                        url = DataUrl.broken(value, self._nonce)
                    source = holder.get("type") if isinstance(holder, dict) else None
                    is_source = key == "data" and source == "base64"
                    is_medium = is_source or field in _MEDIA_FIELDS
                    put = cast("dict[int | str, object]", holder)  # or a list, by number
                    put[key] = url if is_medium else self._as_text(url, place)

    def _as_text(self, url: DataUrl, param: str) -> str:
        """Of data that is no medium.  Raises ApiError 400 or 413."""
        if url.nbytes > self._limits.max_text_nbytes // 2:
            raise self._too_much_text()
        if (text := url.as_text()) is None:
            raise bad_request(f"{param} begins as base64 and does not go on so; send text", param)
        return text


def parse_object(body: bytes) -> JsonObject:
    """Decode a JSON object.  Raises ApiError 400 with the place of the fault."""
    if not body:
        raise _invalid_json("empty; send a JSON object")
    try:
        value = msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise _invalid_json(f"not valid UTF-8: {error.reason}") from error
    except msgspec.DecodeError as error:
        where = f" ({len(body)} bytes were read)" if "truncated" in str(error) else ""
        raise _invalid_json(f"not valid JSON: {error}{where}") from error
    except RecursionError as error:
        raise _invalid_json("nested too deeply") from error
    if not isinstance(value, dict):
        raise _invalid_json("not a JSON object")
    return value


def _invalid_json(what: str) -> ApiError:
    return bad_request(f"the body is {what}", code="invalid_json")
