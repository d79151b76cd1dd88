"""The type faces to paint with.

Pillow has one outline font of its own (Aileron), so every machine can paint the samples and the
evaluation.  Training adds the DejaVu and STIX faces where it finds them, for variety.
"""

import functools
import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from PIL import ImageFont

NARROWEST_BLANK = 0.3  # ems
BUILT_IN = ""  # stands for Pillow's own font
SYSTEM_FOLDER = Path("/usr/share/fonts/truetype/dejavu")
MORE_FACES = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique",
    "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSerif",
    "DejaVuSerif-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBol",
    "STIXGeneralItalic",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Face:
    """One font at one size."""

    font: ImageFont.FreeTypeFont
    size: int  # px, the em square
    advance: dict[str, float]  # px that each printable ASCII character moves the pen

    def width(self, text: str) -> float:
        """Px that the text is wide (kerning left out)."""
        return sum(map(self.advance.__getitem__, text))


@functools.cache
def face(name: str, size: int) -> Face:
    """The face of a font file, or Pillow's own for `BUILT_IN`.

    Basic layout everywhere: the other engine needs a system library, and with it the same seed
    would paint other pixels on another machine.
    """
    if name == BUILT_IN:
        font = ImageFont.load_default(size)
        assert isinstance(font, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
        font = font.font_variant(layout_engine=ImageFont.Layout.BASIC)
    else:
        font = ImageFont.truetype(name, size, layout_engine=ImageFont.Layout.BASIC)
    advance = {chr(code): font.getlength(chr(code)) for code in range(32, 127)}
    # Hinted to whole px, a small blank may be no wider than the gap between two letters.
    advance[" "] = max(advance[" "], float(math.ceil(size * NARROWEST_BLANK)))
    return Face(font, size, advance)


BUILT_IN_ONLY = (BUILT_IN,)


def installed() -> tuple[str, ...]:
    """Every font there is to train with; Pillow's own counts for ten, as it is what
    the demo and the evaluation are painted with."""
    folders = [SYSTEM_FOLDER]
    matplotlib = find_spec("matplotlib")
    if matplotlib is not None and matplotlib.origin is not None:
        folders.insert(0, Path(matplotlib.origin).parent / "mpl-data" / "fonts" / "ttf")
    folder = next((one for one in folders if one.is_dir()), SYSTEM_FOLDER)
    found = (folder / f"{name}.ttf" for name in MORE_FACES)
    return (BUILT_IN,) * 10 + tuple(str(path) for path in found if path.is_file())
