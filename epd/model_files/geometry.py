"""How many embedding rows an image gives, from its width and height alone.

The gateway expands each placeholder to its exact row count before a pixel is decoded.  So
`sizes.py` of each family repeats the size arithmetic of its image processor, to the rounding.  It
must stay free of torch, transformers and PIL: the gateway imports it.  The encode worker checks the
result against the real processor for each image.  A difference fails that image, never the answer.

Width and height are those after EXIF rotation: a photograph with orientation 5 to 8 has its
header's width and height swapped.
"""

from __future__ import annotations

import math

from epd.errors import MediaError
from epd.families.registry import family_named
from epd.messages import PixelBounds
from epd.model_files.checkpoint import Settings
from epd.model_files.family import Geometry, Images

MAX_SIDE_RATIO = 200  # of the Qwen processors; applied to every family


def images_of(model_config: Settings) -> Images | None:
    """None: the model takes no images."""
    family = family_named(str(model_config.get("model_type")))
    return family.images if family else None


def image_geometry(
    model_config: Settings,
    preprocessor_config: Settings,
    width: int,
    height: int,
) -> Geometry:
    """Geometry of an image `width` by `height` pixels (after EXIF rotation).

    The configs are the model directory's config.json and image processor settings as read from
    JSON. Raises MediaError, for the client, when the model takes no images or the sides are too
    unequal.
    """
    images = images_of(model_config)
    if images is None:
        raise MediaError("this model takes no images; send text only")
    if width < 1 or height < 1:
        raise MediaError(f"the image is {width} x {height} pixels; it needs at least one pixel")
    if max(width, height) / min(width, height) > MAX_SIDE_RATIO:
        raise MediaError(
            f"the image is {width} x {height} pixels; one side may be at most "
            f"{MAX_SIDE_RATIO} times the other: crop it"
        )
    return images.geometry(model_config, preprocessor_config, width, height)


def bounded(preprocessor_config: Settings, bounds: PixelBounds | None) -> Settings:
    """The settings with the bounds of a request."""
    settings = dict(preprocessor_config)
    if bounds is not None and bounds.min_pixels:
        settings["min_pixels"] = bounds.min_pixels
    if bounds is not None and bounds.max_pixels:
        settings["max_pixels"] = bounds.max_pixels
    return settings


def edges_fault(settings: Settings) -> str:
    """Why images have no two bounds of their area, or none; empty: they have."""
    edges = settings.get("size") or {}
    least = edges.get("shortest_edge") or settings.get("min_pixels")
    if bool(least) != bool(edges.get("longest_edge") or settings.get("max_pixels")):
        return "size: one of shortest_edge and longest_edge, where both are needed"
    return ""


def smart_resize(
    height: int, width: int, factor: int, min_pixels: float, max_pixels: float
) -> tuple[int, int]:
    """Height and width in pixels: multiples of `factor`, area within bounds, ratio about kept."""
    h_bar = round(height / factor) * factor
    w_bar = round(width / factor) * factor
    if h_bar * w_bar > max_pixels:
        beta = math.sqrt((height * width) / max_pixels)
        h_bar = max(factor, math.floor(height / beta / factor) * factor)
        w_bar = max(factor, math.floor(width / beta / factor) * factor)
    elif h_bar * w_bar < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        h_bar = math.ceil(height * beta / factor) * factor
        w_bar = math.ceil(width * beta / factor) * factor
    return h_bar, w_bar
