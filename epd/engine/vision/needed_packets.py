"""Which packets of an H.264 film a decoder needs for the frames of a clip.

A frame that no other frame refers to (`nal_ref_idc` is 0) need not be decoded.  Nor does what lies
between the last frame of the clip and the next IDR picture, which refers to nothing before it.
Both are rules of H.264, so the frames of the clip are bit for bit those of the whole film.  A film
whose packets leave a frame's place uncertain is decoded as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from epd.media_files.film_header import FilmHeader

if TYPE_CHECKING:
    from av.container import InputContainer

_AVCC = 1  # first byte of parameters that lie apart from the packets
_SLICE, _IDR = 1, 5
_TAKEN = frozenset((_SLICE, _IDR, 6, 9, 12))  # besides: remarks, delimiters and filling
_MAX_UNITS = 256  # in a packet


class PacketNeed(Enum):
    SHOWN = "DEFAULT"
    REFERRED_TO = "NONREF"  # FFmpeg's word for what its decoder leaves out
    NOTHING = "ALL"


@dataclass(frozen=True, slots=True)
class NeededPackets:
    needs: list[PacketNeed]  # of each packet, in order
    times: list[int]  # of the clip's frames, in units of the track


def needed_packets(
    container: InputContainer, header: FilmHeader, frames: Sequence[int]
) -> NeededPackets | None:
    """Reads the film to its end, without decoding; None: all of it is needed."""
    stream = container.streams.video[0]
    parameters = bytes(stream.codec_context.extradata or b"")
    if stream.codec_context.name != "h264" or len(parameters) < 5 or parameters[0] != _AVCC:
        return None
    times: list[int] = []
    are_idr: list[bool] = []
    for packet in container.demux(stream):
        if not packet.size:
            continue
        units = _units(memoryview(packet), (parameters[4] & 3) + 1)
        if packet.pts is None or packet.is_discard or packet.is_corrupt or not units <= _TAKEN:
            return None
        times.append(packet.pts)
        are_idr.append(_IDR in units)
    shown = sorted(time for time in times if header.shows(time))
    if not shown or len(set(times)) < len(times) or frames[-1] >= len(shown):
        return None
    if not are_idr[0] or times[0] > min(times):
        return None
    of_clip = [shown[index] for index in frames]
    return NeededPackets(_needs(times, are_idr, set(of_clip)), of_clip)


def _needs(times: list[int], are_idr: list[bool], of_clip: set[int]) -> list[PacketNeed]:
    needs: list[PacketNeed] = []
    refers = False  # whether a frame of the clip follows before the next IDR picture
    for time, is_idr in zip(reversed(times), reversed(are_idr), strict=True):
        if time in of_clip:
            needs.append(PacketNeed.SHOWN)
            refers = True
        else:
            needs.append(PacketNeed.REFERRED_TO if refers else PacketNeed.NOTHING)
        refers = refers and not is_idr
    return needs[::-1]


def _units(packet: memoryview, length_nbytes: int) -> set[int]:
    """Types of its units; 0 besides, which is none of `_TAKEN`, where it is not well formed."""
    types: set[int] = set()
    at = 0
    for _ in range(_MAX_UNITS):
        if at == len(packet):
            return types
        begin = at + length_nbytes
        nbytes = int.from_bytes(packet[at:begin], "big")
        if not nbytes or begin + nbytes > len(packet):
            break
        types.add(packet[begin] & 31)
        at = begin + nbytes
    return types | {0}
