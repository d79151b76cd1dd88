"""The walk through WebM and Matroska: elements of EBML, of which two may be of unknown size (F67).

Kept are the track of pictures and its blocks.  All else becomes `Void`: other tracks and their
blocks, indexes, tags, attachments, chapters.  Of what is kept, nothing may be compressed once more.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from epd.errors import MediaError
from epd.media_files.film_header import FilmHeader, Walk, usual_rate

MAX_DENOMINATOR = 1001  # of a rate, which is stored as whole nanoseconds of a frame
_LONG_HEAD_NBYTES = 9
_LENGTHS = tuple(9 - first.bit_length() for first in range(256))  # of a number, by its first byte
_SEGMENT, _CLUSTER, _INFO, _TRACKS, _TRACK = 0x18538067, 0x1F43B675, 0x1549A966, 0x1654AE6B, 0xAE
_HEAD, _VOID, _TIMESTAMP, _SIMPLE_BLOCK, _GROUP, _BLOCK = 0x1A45DFA3, 0xEC, 0xE7, 0xA3, 0xA0, 0xA1
_SCALE, _NUMBER, _TYPE, _FRAME_NS, _VIDEO, _ENCODINGS = 0x2AD7B1, 0xD7, 0x83, 0x23E383, 0xE0, 0x6D80
_WIDTH, _HEIGHT, _PROJECTION, _PROJECTION_TYPE, _ROLL = 0xB0, 0xBA, 0x7670, 0x7671, 0x7675
_CODEC, _PRIVATE, _UID = 0x86, 0x63A2, 0x73C5
_COLOUR, _INTERLACED, _FIELD_ORDER = 0x55B0, 0x9A, 0x9D
_DURATION, _REFERENCE, _DISCARD = 0x9B, 0xFB, 0x75A2
_IN_TRACK = frozenset((_NUMBER, _UID, _TYPE, _FRAME_NS, _CODEC, _PRIVATE, _VIDEO))
_IN_VIDEO = frozenset((_WIDTH, _HEIGHT, _COLOUR, _INTERLACED, _FIELD_ORDER))
_IN_GROUP = frozenset((_BLOCK, _DURATION, _REFERENCE, _DISCARD))


class _Element(NamedTuple):
    ident: int
    at: int
    begin: int  # of its contents
    end: int
    is_sized: bool = True


def read_matroska(walk: Walk) -> FilmHeader:
    """Raises MediaError, a sentence without its subject; struct.error, IndexError: cut off."""
    return _Film(walk).read()


class _Film:
    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._data = walk.data
        self._number = -1  # of the track of pictures
        self._size = (0, 0)
        self._turns = 0
        self._frame_ns = 0
        self._scale_ns = 1_000_000
        self._times: list[int] = []
        self._num_frames = 0

    def read(self) -> FilmHeader:
        head = self._element(0, len(self._data))
        segment = self._element(head.end, len(self._data))
        while segment.ident == _VOID:
            segment = self._element(segment.end, len(self._data))
        if head.ident != _HEAD or segment.ident != _SEGMENT:
            raise MediaError("is cut off or damaged; send a whole file")
        at, cluster_end, cluster_time = segment.begin, 0, 0
        while at < segment.end:
            found = self._element(at, cluster_end if at < cluster_end else segment.end)
            at = found.end
            if found.ident == _CLUSTER:
                at, cluster_end = found.begin, found.end if found.is_sized else 0
            elif not found.is_sized:
                raise MediaError("has parts of unknown size; send a whole file")
            elif found.ident == _TIMESTAMP:
                cluster_time = self._whole(found)
            elif found.ident in (_SIMPLE_BLOCK, _GROUP):
                self._add_block(found, cluster_time)
            elif found.ident == _INFO:
                for each in self._children(found, frozenset((_SCALE,))):
                    self._scale_ns = self._whole(each)
            elif found.ident == _TRACKS and self._number < 0:
                self._read_tracks(found)
            else:
                self._hide(found)
        if self._number < 0:
            raise MediaError("holds no video stream")
        if len(self._data) - segment.end > _LONG_HEAD_NBYTES:
            behind = _Element(_VOID, segment.end, segment.end + _LONG_HEAD_NBYTES, len(self._data))
            self._hide(behind)
        return FilmHeader(*self._size, self._num_frames, self._rate(), self._turns)

    def _rate(self) -> float:
        if self._frame_ns:
            return float(Fraction(10**9, self._frame_ns).limit_denominator(MAX_DENOMINATOR))
        return usual_rate([time * self._scale_ns / 1e9 for time in self._times])

    # --- elements ---------------------------------------------------------------------------------

    def _element(self, at: int, end: int) -> _Element:
        """IndexError: behind the end of the file."""
        self._walk.count()
        data = self._data
        begin = at + _LENGTHS[data[at]]
        length = _LENGTHS[data[begin]]
        contents = begin + length
        if begin - at > 4 or length > 8 or contents > end:
            raise MediaError("is cut off or damaged; send a whole file")
        ident = int.from_bytes(data[at:begin])  # its mark is a part of it
        nbytes = int.from_bytes(data[begin:contents]) - (1 << 7 * length)
        if nbytes == (1 << 7 * length) - 1:
            return _Element(ident, at, contents, end, is_sized=False)
        return _Element(ident, at, contents, self._walk.held(contents, nbytes, end))

    def _children(self, parent: _Element, kept: frozenset[int]) -> Iterator[_Element]:
        """Those that are kept; the others are hidden."""
        at = parent.begin
        while at < parent.end:
            found = self._element(at, parent.end)
            if not found.is_sized:
                raise MediaError("has parts of unknown size; send a whole file")
            if found.ident in kept:
                yield found
            else:
                self._hide(found)
            at = found.end

    def _whole(self, found: _Element) -> int:
        if found.end - found.begin > 8:
            raise MediaError("has a number of more than 8 bytes; encode it again")
        return int.from_bytes(self._data[found.begin : found.end])

    def _hide(self, found: _Element) -> None:
        """A Void of the same length; its size takes the place of what was there."""
        length = min(8, found.begin - found.at - 1)
        nbytes = found.end - found.at - 1 - length
        self._walk.hide(found.at, b"\xec" + (nbytes | 1 << 7 * length).to_bytes(length))

    # --- tracks and blocks ------------------------------------------------------------------------

    def _read_tracks(self, tracks: _Element) -> None:
        for track in self._children(tracks, frozenset((_TRACK,))):
            if self._number >= 0 or self._type(track) != 1:
                self._hide(track)
                continue
            kept = _IN_TRACK | {_ENCODINGS}
            for each in self._children(track, kept):
                if each.ident == _NUMBER:
                    self._number = self._whole(each)
                elif each.ident == _FRAME_NS:
                    self._frame_ns = self._whole(each)
                elif each.ident == _VIDEO:
                    self._read_video(each)
                elif each.ident == _ENCODINGS:
                    raise MediaError("is compressed or encrypted in its container; encode it again")

    def _type(self, track: _Element) -> int:
        """1: pictures."""
        at, kind = track.begin, 0
        while at < track.end:
            found = self._element(at, track.end)
            if found.ident == _TYPE:
                kind = self._whole(found)
            at = found.end
        return kind

    def _read_video(self, video: _Element) -> None:
        width = height = 0
        for each in self._children(video, _IN_VIDEO | {_PROJECTION}):
            if each.ident == _WIDTH:
                width = self._whole(each)
            elif each.ident == _HEIGHT:
                height = self._whole(each)
            elif each.ident == _PROJECTION:
                self._read_projection(each)
                self._hide(each)
            elif each.end - each.begin > 1000:
                self._hide(each)
        self._size = (width, height)

    def _read_projection(self, projection: _Element) -> None:
        kind, roll = 0, 0.0
        for each in self._children(projection, frozenset((_PROJECTION_TYPE, _ROLL))):
            if each.ident == _PROJECTION_TYPE:
                kind = self._whole(each)
            elif each.end - each.begin in (4, 8):
                form = ">f" if each.end - each.begin == 4 else ">d"
                (roll,) = struct.unpack_from(form, self._data, each.begin)
        if not kind and -360 <= roll <= 360:
            self._turns = round(roll / 90) % 4

    def _add_block(self, found: _Element, cluster_time: int) -> None:
        block: _Element | None = found
        if found.ident == _GROUP:
            blocks = [e for e in self._children(found, _IN_GROUP) if e.ident == _BLOCK]
            block = blocks[0] if len(blocks) == 1 else None
        if block is None or not self._is_ours(block):
            self._hide(found)
            return
        at = block.begin + _LENGTHS[self._data[block.begin]]
        self._walk.held(at, 3, block.end)
        time, flags = struct.unpack_from(">hB", self._data, at)
        count = 1
        if flags & 6:  # several frames
            self._walk.held(at + 3, 1, block.end)
            count += self._data[at + 3]
            self._walk.count(count)
        self._num_frames += count if block.end - at > 3 else 0
        self._times.append(cluster_time + time)

    def _is_ours(self, block: _Element) -> bool:
        behind = block.begin + _LENGTHS[self._data[block.begin]]
        marked = int.from_bytes(self._data[block.begin : behind])
        return marked == self._number | 1 << 7 * (behind - block.begin)
