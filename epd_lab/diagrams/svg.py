"""A few words of SVG: enough to draw boxes, lines and text of computed width.

Identifiers are set in a monospaced face, which advances 0.6 em per letter on every platform, so a
layout can measure them.  Prose is set in a sans face and measured generously.  Colours are names of
classes.  An image of its own has their values and paints its own background, so it reads the same
on light and dark pages.  A page that holds the drawing gives them its own.  Numbers are rounded and
nothing depends on time or on hash order, so equal input gives equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SANS = "-apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
INK = "ink"
SOFT = "soft"
TIME = "time"

# Distinct on white, for readers with colour-blindness too (after Okabe and Ito, darkened).
_HUES = (
    "#0072b2", "#d55e00", "#009e73", "#b5478f", "#7a5195", "#8a6d00",
    "#2f7f9e", "#c0392b", "#4b7f2b", "#5c5cd6", "#a0522d", "#446070",
)  # fmt: skip
PALETTE = tuple(f"c{number}" for number in range(len(_HUES)))
_COLOURS = {
    INK: "#1f2933",
    SOFT: "#5f6c7b",
    TIME: "#b45309",
    **dict(zip(PALETTE, _HUES, strict=True)),
}
_STYLE = (
    "".join(f".{name}{{color:{colour}}}" for name, colour in _COLOURS.items())
    + f"svg{{color:{_COLOURS[INK]}}} .mono{{font-family:{MONO}}} .sans{{font-family:{SANS}}} "
    "text,tspan,circle,polygon{fill:currentColor} .strong{font-weight:700} "
    ".slanted{font-style:italic} .right{text-anchor:end} "
    "rect,polyline{fill:none;stroke:currentColor;stroke-linejoin:round} "
    ".halo,.paper{fill:#fff;stroke:none} .paper{stroke:#d5dbe1} .card{fill:#f8fafc} "
    ".held{stroke-dasharray:7 3}"
)


def mono_width(text: str, size: float) -> float:
    return 0.602 * size * len(text)


def sans_width(text: str, size: float) -> float:
    return 0.56 * size * len(text)


def wrap(text: str, width: float, size: float) -> list[str]:
    """Prose in lines that fit `width` pixels."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and sans_width(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def num(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


class Canvas:
    """Elements in drawing order; `layer` is drawn bottom up."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._layers: dict[int, list[str]] = {}

    def add(self, element: str, layer: int = 1) -> None:
        self._layers.setdefault(layer, []).append(element)

    def rect(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        classes: str,
        more: str = "",
        radius: float = 6,
    ) -> None:
        """`more`: attributes."""
        box = f'x="{num(x)}" y="{num(y)}" width="{num(w)}" height="{num(h)}" rx="{num(radius)}"'
        self.add(f'<rect {box} class="{classes}"{more}/>')

    def line(
        self,
        points: Iterable[tuple[float, float]],
        colour: str,
        width: float = 1.8,
        layer: int = 1,
        halo: bool = False,
        more: str = "",
    ) -> None:
        """A polyline; with `halo` a level line passes visibly over what it crosses."""
        corners = list(points)
        path = " ".join(f"{num(x)},{num(y)}" for x, y in corners)
        if halo:
            (x, y), (end, _) = sorted((corners[0], corners[-1]))
            box = f'x="{num(x + 3)}" y="{num(y - width / 2 - 2)}" width="{num(end - x - 8)}"'
            self.add(f'<rect {box} height="{num(width + 4)}" class="halo"/>', layer)
        stroke = f'class="{colour}" stroke-width="{num(width)}"'
        self.add(f'<polyline points="{path}" {stroke}{more}/>', layer)

    def dot(self, x: float, y: float, colour: str, radius: float = 3.4, layer: int = 1) -> None:
        self.add(f'<circle cx="{num(x)}" cy="{num(y)}" r="{num(radius)}" class="{colour}"/>', layer)

    def arrowhead(self, x: float, y: float, colour: str, to_left: bool, layer: int = 1) -> None:
        """A head with its tip at (x, y)."""
        back = 9 if to_left else -9
        tips = f"{num(x)},{num(y)} {num(x + back)},{num(y - 4.5)} {num(x + back)},{num(y + 4.5)}"
        self.add(f'<polygon points="{tips}" class="{colour}"/>', layer)

    def text(
        self,
        x: float,
        y: float,
        spans: str | Iterable[tuple[str, str]],
        size: float = 12,
        classes: str = "mono",
        layer: int = 2,
    ) -> None:
        """Text at a baseline; `spans` are (text, classes) pairs."""
        parts = [(spans, "")] if isinstance(spans, str) else list(spans)
        inner = "".join(
            f'<tspan class="{named}">{escape(part)}</tspan>' if named else escape(part)
            for part, named in parts
        )
        where = f'x="{num(x)}" y="{num(y)}" class="{classes}" font-size="{num(size)}"'
        self.add(f"<text {where}>{inner}</text>", layer)

    def body(self) -> str:
        return "\n".join(e for layer in sorted(self._layers) for e in self._layers[layer])

    def render(self, width: float, height: float) -> str:
        """An image of its own."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {extent(width, height)} role="img">\n'
            f"<title>{escape(self.title)}</title>\n"
            f"<style>{_STYLE}</style>\n"
            '<rect width="100%" height="100%" rx="10" class="paper"/>\n'
            f"{self.body()}\n</svg>\n"
        )


def extent(width: float, height: float) -> str:
    wide, high = num(width), num(height)
    return f'width="{wide}" height="{high}" viewBox="0 0 {wide} {high}"'
