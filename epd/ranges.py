"""What the numbers and texts of a message may be: a frame with another does not decode.

The bounds are wide.  They keep out what would break a reader: what overflows a device's integers,
takes memory without a limit, or is not a number.  Floats are finite, but for those with a remark.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

_MAX = 2**31 - 1

Count = Annotated[int, Meta(ge=0, le=_MAX)]
Positive = Annotated[int, Meta(ge=1, le=_MAX)]
Index = Annotated[int, Meta(ge=0, le=_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=_MAX)]
Offset = Annotated[int, Meta(ge=-_MAX, le=_MAX)]
Total = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # what is only ever counted up; an epoch
Signed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
NumBytes = Annotated[int, Meta(ge=0, le=2**50)]
Checksum = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]
Real = Annotated[float, Meta(ge=-1e30, le=1e30)]
Logprob = Annotated[float, Meta(le=1.0)]  # -inf of what may not be said

Name = Annotated[str, Meta(max_length=120)]  # of an instance, a transport, a machine, a counter
Id = Annotated[str, Meta(min_length=1, max_length=200)]  # of a request or a room
Hash = Annotated[str, Meta(max_length=64)]
Where = Annotated[str, Meta(max_length=1000)]  # an endpoint, a locator
Digits = Annotated[int, Meta(ge=-1, le=100)]  # log-probabilities that are wanted; -1: none
