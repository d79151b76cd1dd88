"""A few words of SVG: enough to draw boxes, lines and text whose width is known.

Identifiers are set in a monospaced face (each advances 0.6 em per letter on every platform), so a
layout can measure them; prose is set in a sans face and measured generously.  An image paints its
own background: it reads the same on light and dark pages.  Numbers are rounded and nothing depends
on time or on hash order, so equal input gives equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SANS = "-apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
PAPER = "#ffffff"
INK = "#1f2933"
SOFT = "#5f6c7b"
TIME = "#b45309"

# Distinct on white, for readers with colour-blindness too (after Okabe and Ito, darkened).
PALETTE = (
    "#0072b2", "#d55e00", "#009e73", "#b5478f", "#7a5195", "#8a6d00",
    "#2f7f9e", "#c0392b", "#4b7f2b", "#5c5cd6", "#a0522d", "#446070",
)  # fmt: skip


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
        self, x: float, y: float, w: float, h: float, style: str, radius: float = 6, layer: int = 1
    ) -> None:
        box = f'x="{num(x)}" y="{num(y)}" width="{num(w)}" height="{num(h)}" rx="{num(radius)}"'
        self.add(f"<rect {box} {style}/>", layer)

    def line(
        self,
        points: Iterable[tuple[float, float]],
        colour: str,
        width: float = 1.8,
        layer: int = 1,
        halo: bool = False,
    ) -> None:
        """A polyline; with `halo` a level line passes visibly over what it crosses."""
        corners = list(points)
        path = " ".join(f"{num(x)},{num(y)}" for x, y in corners)
        if halo:
            (x, y), (end, _) = sorted((corners[0], corners[-1]))
            box = f'x="{num(x + 3)}" y="{num(y - width / 2 - 2)}" width="{num(end - x - 8)}"'
            self.add(f'<rect {box} height="{num(width + 4)}" fill="{PAPER}"/>', layer)
        stroke = f'stroke="{colour}" stroke-width="{num(width)}" stroke-linejoin="round"'
        self.add(f'<polyline points="{path}" fill="none" {stroke}/>', layer)

    def dot(self, x: float, y: float, colour: str, radius: float = 3.4, layer: int = 1) -> None:
        self.add(f'<circle cx="{num(x)}" cy="{num(y)}" r="{num(radius)}" fill="{colour}"/>', layer)

    def arrowhead(self, x: float, y: float, colour: str, to_left: bool, layer: int = 1) -> None:
        """A head with its tip at (x, y)."""
        back = 9 if to_left else -9
        tips = f"{num(x)},{num(y)} {num(x + back)},{num(y - 4.5)} {num(x + back)},{num(y + 4.5)}"
        self.add(f'<polygon points="{tips}" fill="{colour}"/>', layer)

    def text(
        self,
        x: float,
        y: float,
        spans: str | Iterable[tuple[str, str]],
        size: float = 12,
        font: str = "mono",
        style: str = "",
        layer: int = 2,
    ) -> None:
        """Text at a baseline; `spans` are (text, attributes) pairs."""
        parts = [(spans, "")] if isinstance(spans, str) else list(spans)
        inner = "".join(
            f"<tspan {attributes}>{escape(part)}</tspan>" if attributes else escape(part)
            for part, attributes in parts
        )
        where = f'x="{num(x)}" y="{num(y)}" class="{font}" font-size="{num(size)}"'
        self.add(f'<text {where} {style} xml:space="preserve">{inner}</text>', layer)

    def render(self, width: float, height: float) -> str:
        wide, high = num(width), num(height)
        size = f'width="{wide}" height="{high}" viewBox="0 0 {wide} {high}"'
        faces = f".mono{{font-family:{MONO}}} .sans{{font-family:{SANS}}}"
        body = "\n".join(e for layer in sorted(self._layers) for e in self._layers[layer])
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n'
            f"<title>{escape(self.title)}</title>\n"
            f"<style>text{{fill:{INK}}} {faces}</style>\n"
            f'<rect width="100%" height="100%" rx="10" fill="{PAPER}" stroke="#d5dbe1"/>\n'
            f"{body}\n</svg>\n"
        )
