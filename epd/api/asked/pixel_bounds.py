"""Between which areas images are resized, where a request says it: `mm_processor_kwargs`."""

from __future__ import annotations

from collections.abc import Mapping

from epd.api.http import fields
from epd.api.http.errors import bad_request
from epd.config import Limits
from epd.messages import PixelBounds

PIXELS = ("min_pixels", "max_pixels")


def read_bounds(present: Mapping[str, object], limits: Limits) -> PixelBounds | None:
    """None: as the model's.  Raises ApiError 400."""
    name = "mm_processor_kwargs"
    asked = fields.mapping(present.get(name, {}), name)
    least, most = (
        0
        if asked.get(key) is None
        else fields.integer(asked[key], f"{name}.{key}", 1, limits.max_pixels)
        for key in PIXELS
    )
    if least and most and least > most:
        path = f"{name}.min_pixels"
        raise bad_request(f"{path} {least} is above max_pixels {most}", path, "out_of_range")
    return PixelBounds(min_pixels=least, max_pixels=most) if least or most else None
