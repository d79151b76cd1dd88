"""The walk through MP4 and QuickTime: boxes within boxes, and tables of samples (F67).

Kept are the boxes with the places and the coding of the pictures.  All else becomes `skip`: sound,
metadata, other tracks, indexes, compressed headers, references to other files.  Edit lists are
applied here (`FilmHeader.shown`): FFmpeg would copy the samples once for each edit.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain, islice, pairwise, repeat
from typing import NamedTuple

from epd.errors import MediaError
from epd.media_files.film_header import FilmHeader, Walk

_KEPT = {
    parent: frozenset(kinds.split())
    for parent, kinds in {
        b"": b"ftyp moov moof mdat free skip wide",
        b"moov": b"mvhd trak mvex",
        b"trak": b"tkhd mdia edts",
        b"edts": b"elst",
        b"mdia": b"mdhd hdlr minf",
        b"minf": b"stbl",
        b"stbl": b"stsd stts ctts stss stsc stsz stz2 stco co64",
        b"stsd": b"avcC hvcC lhvC vvcC av1C vpcC esds d263 glbl jp2h colr fiel gama dvc1 strf",
        b"mvex": b"trex",
        b"moof": b"mfhd traf",
        b"traf": b"tfhd tfdt trun",
    }.items()
}
_SEVERAL = frozenset(b"mdat free skip wide trak trex moof traf trun".split())
_ENTRIES = {
    b"stts": ">2I",
    b"ctts": ">Ii",
    b"stss": ">I",
    b"stsc": ">3I",
    b"stco": ">I",
    b"co64": ">Q",
}
_SAMPLE_ENTRY_NBYTES = 86  # of pictures, before the boxes in it
MAX_ENTRIES = 16  # ways in which one track is coded
MAX_EDITS = 1000


class _Box(NamedTuple):
    kind: bytes
    at: int
    begin: int  # of its contents
    end: int


_Found = dict[bytes, _Box]


def read_isom(walk: Walk) -> FilmHeader:
    """Raises MediaError, a sentence without its subject; struct.error: cut off."""
    children = _boxes(walk, b"", 0, len(walk.data))
    top = [box for box in children if box.kind in (b"moov", b"moof")]
    moov = next((box for box in top if box.kind == b"moov"), None)
    if moov is None:
        raise MediaError("has no header (moov); send a whole file")
    movie = _Movie(walk, moov)
    for box in top:
        if box.kind == b"moof":
            movie.add_fragment(box)
    return movie.header()


def _boxes(walk: Walk, parent: bytes, begin: int, end: int) -> Iterator[_Box]:
    """The children that are kept; the others are hidden."""
    seen: set[bytes] = set()
    while end - begin >= 8:
        nbytes, kind = struct.unpack_from(">I4s", walk.data, begin)
        head = 8
        if nbytes == 1:
            (nbytes,) = struct.unpack_from(">Q", walk.data, begin + 8)
            head = 16
        elif not nbytes:
            nbytes = end - begin
        walk.held(begin + head, nbytes - head, end)
        walk.count()
        box = _Box(kind, begin, begin + head, begin + nbytes)
        if kind not in _KEPT[parent] or kind in seen:
            _hide(walk, box)
        else:
            yield box
        if kind not in _SEVERAL:
            seen.add(kind)
        begin += nbytes


def _hide(walk: Walk, box: _Box) -> None:
    walk.hide(box.at + 4, b"skip")


class _Movie:
    """The first track of pictures."""

    def __init__(self, walk: Walk, moov: _Box) -> None:
        self._walk = walk
        self._data = walk.data
        self._movie_scale = 1
        self._found: _Found = {}
        trex: list[_Box] = []
        for box in _boxes(walk, b"moov", moov.begin, moov.end):
            if box.kind == b"mvhd":
                self._movie_scale = self._u32(box, 20 if self._version(box) else 12)
            elif box.kind == b"mvex":
                trex += _boxes(walk, b"mvex", box.begin, box.end)
            elif not self._is_taken(box):
                _hide(walk, box)
        if not self._found:
            raise MediaError("holds no video stream")
        tkhd, mdhd = self._needed(b"tkhd"), self._needed(b"mdhd")
        self._track_id = self._u32(tkhd, 20 if self._version(tkhd) else 12)
        self._time_scale = self._u32(mdhd, 20 if self._version(mdhd) else 12)
        self._defaults = (0, 0)  # duration and size of a fragment's sample
        for box in trex:
            if self._u32(box, 4) == self._track_id:
                self._defaults = (self._u32(box, 12), self._u32(box, 16))
        self._num_frames = self._nbytes = self._num_timed = self._duration = 0

    # --- boxes ------------------------------------------------------------------------------------

    def _is_taken(self, trak: _Box) -> bool:
        """Whether it is the first track of pictures."""
        if self._found:
            return False
        found: _Found = {}
        inner = [trak]
        while inner:
            parent = inner.pop()
            for box in _boxes(self._walk, parent.kind, parent.begin, parent.end):
                found[box.kind] = box
                if box.kind in (b"edts", b"mdia", b"minf", b"stbl"):
                    inner.append(box)
        hdlr = found.get(b"hdlr")
        if hdlr is None or self._bytes(hdlr, 8, 4) != b"vide" or b"stbl" not in found:
            return False
        self._found = found
        if b"edts" in found:
            _hide(self._walk, found[b"edts"])
        return True

    def _needed(self, kind: bytes) -> _Box:
        if kind not in self._found:
            raise MediaError(f"has no {kind.decode()} in its header; send a whole file")
        return self._found[kind]

    def _bytes(self, box: _Box, at: int, nbytes: int) -> bytes:
        self._walk.held(box.begin + at, nbytes, box.end)
        return bytes(self._data[box.begin + at : box.begin + at + nbytes])

    def _u32(self, box: _Box, at: int) -> int:
        return int.from_bytes(self._bytes(box, at, 4))

    def _version(self, box: _Box) -> int:
        return self._bytes(box, 0, 1)[0]

    def _table(self, box: _Box, at: int, form: str, count: int) -> Iterator[tuple[int, ...]]:
        """So many entries from `at` on, which must be there."""
        nbytes = count * struct.calcsize(form)
        begin = box.begin + at
        end = self._walk.held(begin, nbytes, box.end)
        return struct.iter_unpack(form, self._data[begin:end])

    def _entries(self, kind: bytes) -> list[tuple[int, ...]]:
        """Of one of the tables of samples; none where it is not there."""
        box = self._found.get(kind)
        if box is None:
            return []
        count = self._u32(box, 4)
        found = self._table(box, 8, _ENTRIES[kind], count)
        self._walk.count(count)
        return list(found)

    # --- samples ----------------------------------------------------------------------------------

    def header(self) -> FilmHeader:
        width, height = self._size()
        shown: tuple[tuple[float, float], ...] = ()
        count = self._num_samples()
        durations = self._entries(b"stts")
        self._num_timed += sum(number for number, _ in durations)
        self._duration += sum(number * duration for number, duration in durations)
        offsets = self._entries(b"ctts")
        for table in (durations, offsets):
            if sum(number for number, *_ in table) > count + MAX_EDITS:
                raise MediaError("has times for more frames than there are; encode it again")
        self._entries(b"stss")
        if edits := self._edits() if count else []:
            times = self._times(count, durations, offsets)
            inside = sum(_is_inside(time, edits) for time in times)
            if inside < count:
                late = max(0, -min((offset for _, offset in offsets), default=0))
                shown = tuple((begin + late, end + late) for begin, end in edits)
                count = inside
        fps = self._num_timed * self._time_scale / self._duration if self._duration else 0.0
        return FilmHeader(
            width, height, self._num_frames + count, fps, self._quarter_turns(), shown
        )

    def _size(self) -> tuple[int, int]:
        """Width and height, which all ways of coding must share."""
        stsd = self._needed(b"stsd")
        count = self._u32(stsd, 4)
        if not 0 < count <= MAX_ENTRIES:
            raise MediaError(f"is coded in {count} ways; at most {MAX_ENTRIES} are read")
        sizes = set()
        at = stsd.begin + 8
        for _ in range(count):
            self._walk.held(at, _SAMPLE_ENTRY_NBYTES, stsd.end)
            (nbytes,) = struct.unpack_from(">I", self._data, at)
            end = self._walk.held(at, max(nbytes, _SAMPLE_ENTRY_NBYTES), stsd.end)
            sizes.add(struct.unpack_from(">2H", self._data, at + 32))
            begin = at + _SAMPLE_ENTRY_NBYTES
            for _ in _boxes(self._walk, b"stsd", begin + self._palette_nbytes(at, end), end):
                pass
            at = end
        if len(sizes) > 1:
            raise MediaError("has frames of several sizes; encode it again")
        return sizes.pop()

    def _palette_nbytes(self, at: int, end: int) -> int:
        """Of colours that stand in front of the boxes, where FFmpeg looks for some."""
        depth, table = struct.unpack_from(">2H", self._data, at + 82)
        if depth not in (2, 4, 8) or table:
            return 0
        self._walk.held(at + 86, 8, end)
        first, _, last = struct.unpack_from(">I2H", self._data, at + 86)
        if not first <= last <= 255:
            raise MediaError("has a damaged palette; encode it again")
        return 8 + 8 * int(last - first + 1)

    def _num_samples(self) -> int:
        """Frames that have bytes and a place."""
        if b"stz2" in self._found:
            box = self._found[b"stz2"]
            bits, count = self._u32(box, 4) & 0xFF, self._u32(box, 8)
            if bits not in (4, 8, 16):
                raise MediaError("has a damaged table of sizes; encode it again")
            self._walk.held(box.begin + 12, (count * bits + 7) // 8, box.end)
            empty = 0
        else:
            box = self._needed(b"stsz")
            nbytes, count = self._u32(box, 4), self._u32(box, 8)
            empty = 0
            if nbytes:
                self._add_bytes(nbytes * count)
            else:
                sizes = [size for (size,) in self._table(box, 12, ">I", count)]
                self._add_bytes(sum(sizes))
                empty = sizes.count(0)
        self._walk.count(count)
        chunks = len(self._entries(b"stco") or self._entries(b"co64"))
        runs = [(first, number) for first, number, _ in self._entries(b"stsc")]
        placed = sum(
            max(0, min(following, chunks + 1) - first) * number
            for (first, number), (following, _) in pairwise([*runs, (chunks + 1, 0)])
        )
        return max(0, min(count, placed) - empty)

    def _add_bytes(self, nbytes: int) -> None:
        self._nbytes = self._walk.held(self._nbytes, nbytes, len(self._data))

    def add_fragment(self, moof: _Box) -> None:
        for traf in _boxes(self._walk, b"moof", moof.begin, moof.end):
            if traf.kind != b"traf":
                continue
            boxes = list(_boxes(self._walk, b"traf", traf.begin, traf.end))
            head = next((box for box in boxes if box.kind == b"tfhd"), None)
            if head is None or self._u32(head, 4) != self._track_id:
                _hide(self._walk, traf)
                continue
            flags = self._u32(head, 0)
            at = 8 + 8 * bool(flags & 1) + 4 * bool(flags & 2)
            duration, nbytes = self._defaults
            if flags & 8:
                duration, at = self._u32(head, at), at + 4
            if flags & 16:
                nbytes = self._u32(head, at)
            for box in boxes:
                if box.kind == b"trun":
                    self._add_run(box, duration, nbytes)

    def _add_run(self, trun: _Box, duration: int, nbytes: int) -> None:
        flags, count = self._u32(trun, 0), self._u32(trun, 4)
        self._walk.count(count)
        at = 8 + 4 * bool(flags & 1) + 4 * bool(flags & 4)
        fields = [bit for bit in (0x100, 0x200, 0x400, 0x800) if flags & bit]
        entries = list(self._table(trun, at, f">{len(fields)}I", count)) if fields else []
        sizes: Iterable[int] = repeat(nbytes, count)
        durations: Iterable[int] = repeat(duration, count)
        if 0x100 in fields:
            durations = [entry[0] for entry in entries]
        if 0x200 in fields:
            sizes = [entry[fields.index(0x200)] for entry in entries]
        taken = [size for size in sizes if size]
        self._add_bytes(sum(taken))
        self._num_frames += len(taken)
        self._num_timed += count
        self._duration += sum(durations)

    # --- how it is shown --------------------------------------------------------------------------

    def _edits(self) -> list[tuple[float, float]]:
        """Begin and end of what is shown, in units of the track, in order and apart."""
        elst = self._found.get(b"elst")
        if elst is None:
            return []
        count = self._u32(elst, 4)
        if count > MAX_EDITS:
            raise MediaError(f"has more than {MAX_EDITS} edits; encode it again")
        form = ">QqI" if self._version(elst) else ">IiI"
        merged: list[tuple[float, float]] = []
        spans = [
            (float(at), at + math.ceil(length * self._time_scale / max(1, self._movie_scale)))
            for length, at, _ in self._table(elst, 8, form, count)
            if at >= 0
        ]
        for begin, end in sorted(spans):
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((begin, end))
        return [(begin, end if end > begin else math.inf) for begin, end in merged]

    @staticmethod
    def _times(
        count: int, durations: list[tuple[int, ...]], offsets: list[tuple[int, ...]]
    ) -> Iterator[int]:
        """When each sample is shown, in units of the track."""
        steps = chain.from_iterable(repeat(step, number) for number, step in durations)
        begins = chain((0,), accumulate(chain(steps, repeat(0))))
        lates = chain(
            chain.from_iterable(repeat(late, number) for number, late in offsets), repeat(0)
        )
        return (begin + late for begin, late in islice(zip(begins, lates, strict=False), count))

    def _quarter_turns(self) -> int:
        """Counterclockwise, from the matrix of the track; a mirrored one is turned, too."""
        tkhd = self._needed(b"tkhd")
        at = 52 if self._version(tkhd) else 40
        m = struct.unpack(">9i", self._bytes(tkhd, at, 36))
        a, b = math.hypot(m[0], m[3]), math.hypot(m[1], m[4])
        if not a or not b:
            return 0
        return round(-math.degrees(math.atan2(m[1] / b, m[0] / a)) / 90) % 4


def _is_inside(time: float, spans: list[tuple[float, float]]) -> bool:
    at = bisect_right(spans, (time, math.inf)) - 1
    return at >= 0 and time < spans[at][1]
