"""The checksum of the data plane: CRC-32 of bytes in order, as zlib computes it.

zlib-ng's gives the same values with vector instructions, so that a sum costs less than the copy
beside it.  Both let go of the interpreter lock.

Policy (`engine.checksums`).  `auto`: writes that leave this host's memory (tcp, mooncake, file,
foreign transports) are summed by the writer and checked by the reader before a row is published.
Copies within it (local, shm) are not: they have no medium that could lose or turn bits without a
machine check.  A wrong writer or a wrong time is excluded without reading a byte.  A descriptor
names one life of its owner, slots are leased to one room until it is terminal, and memory in doubt
waits for a fence.  `always` sums everywhere, `never` nowhere.  Whatever the policy, a commit has
the number of bytes, and a reader checks each sum that the writer has computed: only writers need to
agree."""

from __future__ import annotations

from collections.abc import Iterable

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # a platform without its wheel: the same values, more slowly
    from zlib import crc32

STEP_NBYTES = 1 << 20  # between two looks at other threads that want to run


def is_summed(policy: str, *, leaves_host: bool) -> bool:
    """Whether writes carry a checksum; `policy`: `engine.checksums`."""
    return policy == "always" or (policy == "auto" and leaves_host)


def checksum_of(views: Iterable[memoryview], so_far: int = 0) -> int:
    """CRC-32 of flat byte views, concatenated, after bytes whose sum is `so_far`."""
    for view in views:
        for start in range(0, view.nbytes, STEP_NBYTES):
            so_far = crc32(view[start : start + STEP_NBYTES], so_far)
    return so_far


__all__ = ["checksum_of", "crc32", "is_summed"]
