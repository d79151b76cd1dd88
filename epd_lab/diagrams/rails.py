"""A graph drawn as a rail map: legible for any number of edges, without a layout engine.

Nodes are stations, one below the other.  Edges out of a node are the labelled lines to the right of
its station.  Each runs to the *rail* of its target, a vertical line in the target's colour that
ends in an arrow at the target's station.  Edges are merged per (source, target), and edges with a
common target merge visually.  Nothing can overlap: labels sit on lines of their own, and only lines
cross lines, with a gap in the lower one.

Reading: find the state on the left, read its lines, follow the colour.
"""

from __future__ import annotations

from dataclasses import dataclass

from epd_lab.diagrams import svg
from epd_lab.diagrams.edges import Graph, GraphEdge, GraphNode, Label

CARD_X, MIN_CARD_WIDTH, LABEL_GAP = 44.0, 272.0, 10.0
NAME_SIZE, EVENT_SIZE, TARGET_SIZE, PROSE_SIZE, LINE = 13.5, 11.5, 10.5, 11.0, 15.0
RAIL_PITCH, TOP, STATION_GAP = 17.0, 76.0, 20.0
MIN_LABEL_WIDTH = 290.0

BY_TIME = f"{svg.TIME} slanted"
STAYS = "\u21bb"


@dataclass(slots=True)
class Exit:
    """One merged edge out of a station: its label in lines, and the height of its line."""

    edge: GraphEdge
    lines: list[list[Label]]
    y: float = 0.0


@dataclass(slots=True)
class Station:
    """A node with its texts broken into lines."""

    node: GraphNode
    prose: list[str]
    held: list[str]
    stays: list[list[Label]]
    exits: list[Exit]
    colour: str
    y: float = 0.0
    height: float = 0.0

    @property
    def port_y(self) -> float:
        """Where the rail arrives."""
        return self.y + 17.0


def in_lines(labels: tuple[Label, ...], width: float) -> list[list[Label]]:
    """Labels, comma-separated, in lines of at most `width` pixels."""
    lines: list[list[Label]] = [[]]
    used = 0.0
    for label in labels:
        needed = svg.mono_width(label.text + ", ", EVENT_SIZE)
        if lines[-1] and used + needed > width:
            lines.append([])
            used = 0.0
        lines[-1].append(label)
        used += needed
    return lines


def spans(labels: list[Label], more: bool) -> list[tuple[str, str]]:
    """A line of labels as styled text; `more`: another line follows."""
    parts: list[tuple[str, str]] = []
    for index, label in enumerate(labels):
        parts.append((label.event, BY_TIME if label.by_time else ""))
        if label.guard:
            parts.append((f" [{label.guard}]", svg.SOFT))
        if more or index < len(labels) - 1:
            parts.append((", ", ""))
    return parts


class RailMap:
    """Positions of everything, then the drawing."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        stays: list[float] = []
        leaves: list[float] = []
        for edge in graph.edges:
            widths = [svg.mono_width(label.text + ", ", EVENT_SIZE) for label in edge.labels]
            (stays if edge.source == edge.target else leaves).extend(widths)
        self._label_width = max([MIN_LABEL_WIDTH, *leaves])
        self.card_width = max([MIN_CARD_WIDTH, *(width + 40 for width in stays)])
        self.stations = {n.name: self._station(n, i) for i, n in enumerate(graph.nodes)}
        self._place()
        names = max(svg.mono_width(node.name, TARGET_SIZE) for node in graph.nodes)
        self._names_x = self._cards_end + LABEL_GAP + self._label_width + 18 + names
        self._assign_rails()

    @property
    def _cards_end(self) -> float:
        return CARD_X + self.card_width

    def _station(self, node: GraphNode, index: int) -> Station:
        out = [e for e in self.graph.edges if e.source == node.name != e.target]
        stays = [x for e in self.graph.edges if e.source == e.target == node.name for x in e.labels]
        inner = self.card_width - 24
        return Station(
            node,
            svg.wrap(node.prose, inner, PROSE_SIZE),
            svg.wrap(f"held: {node.held}", inner, PROSE_SIZE) if node.held else [],
            in_lines(tuple(stays), inner - 16) if stays else [],
            [Exit(e, in_lines(e.labels, self._label_width)) for e in out],
            svg.PALETTE[index % len(svg.PALETTE)],
        )

    def _place(self) -> None:
        y = TOP
        for station in self.stations.values():
            station.y = y
            text = len(station.prose) + len(station.held) + len(station.stays)
            card = 30 + LINE * text + (4 if station.stays else 0) + 8
            down = y + 24
            for out in station.exits:
                down += LINE * len(out.lines) + 7
                out.y = down - 3
            station.height = max(card, down - y + 6)
            y += station.height + STATION_GAP
        self._bottom = y

    def span_of(self, target: str) -> tuple[float, float] | None:
        """From the highest to the lowest point of a rail; None for what nothing leads to."""
        exits = [out for station in self.stations.values() for out in station.exits]
        ends = [out.y for out in exits if out.edge.target == target]
        if not ends:
            return None
        ends.append(self.stations[target].port_y)
        return min(ends), max(ends)

    def _assign_rails(self) -> None:
        """A track per target: short rails inside, long ones outside; disjoint ones share."""
        spans = [(name, span) for name in self.stations if (span := self.span_of(name)) is not None]
        spans.sort(key=lambda item: item[1][1] - item[1][0])
        tracks: list[list[tuple[float, float]]] = []
        self.rails: dict[str, float] = {}
        for target, (low, high) in spans:
            free = (
                i
                for i, track in enumerate(tracks)
                if all(high + 8 < a or low - 8 > b for a, b in track)
            )
            index = next(free, len(tracks))
            if index == len(tracks):
                tracks.append([])
            tracks[index].append((low, high))
            self.rails[target] = self._names_x + 18 + RAIL_PITCH * index
        self._right = self._names_x + 18 + RAIL_PITCH * len(tracks)

    # --- drawing ----------------------------------------------------------------------------------

    def draw(self) -> str:
        """An image of its own."""
        return self._drawn().render(*self._extent)

    def draw_part(self) -> str:
        """For a page that has its own colours."""
        extent = svg.extent(*self._extent)
        return f'<svg data-machine="{self.graph.name}" {extent}>\n{self._drawn().body()}\n</svg>\n'

    @property
    def _extent(self) -> tuple[float, float]:
        return self._right + 12, self._bottom + 34

    def _drawn(self) -> svg.Canvas:
        canvas = svg.Canvas(f"{self.graph.name}: {self.graph.subtitle}")
        canvas.text(CARD_X, 34, self.graph.name, 20, "mono strong")
        canvas.text(CARD_X, 53, self.graph.subtitle.replace("`", ""), 12.5, f"sans {svg.SOFT}")
        for station in self.stations.values():
            self._draw_card(canvas, station)
            for out in station.exits:
                self._draw_exit(canvas, out)
        for target in self.rails:
            self._draw_rail(canvas, self.stations[target])
        self._draw_legend(canvas)
        return canvas

    def _draw_card(self, canvas: svg.Canvas, station: Station) -> None:
        x, y, colour, node = CARD_X, station.y, station.colour, station.node
        look = f"card {colour}{' held' if node.held else ''}"
        named = f' stroke-width="2" data-state="{node.name}"'
        canvas.rect(x, y, self.card_width, station.height, look, named)
        if node.terminal:
            canvas.rect(x + 4, y + 4, self.card_width - 8, station.height - 8, colour, radius=4)
        if node.initial:
            canvas.dot(x - 28, station.port_y, svg.INK, 6)
            canvas.line([(x - 28, station.port_y), (x - 6, station.port_y)], svg.INK)
            canvas.arrowhead(x, station.port_y, svg.INK, to_left=False)
        canvas.text(x + 12, y + 22, node.name, NAME_SIZE, f"mono strong {colour}")
        down = y + 39
        for lines, fill in ((station.prose, svg.INK), (station.held, svg.TIME)):
            for line in lines:
                canvas.text(x + 12, down, line, PROSE_SIZE, f"sans {fill}")
                down += LINE
        down += 4
        if station.stays:
            canvas.text(x + 12, down, STAYS, EVENT_SIZE + 1, f"sans {svg.SOFT}")
        for index, labels in enumerate(station.stays):
            more = index < len(station.stays) - 1
            canvas.text(x + 28, down + LINE * index, spans(labels, more), EVENT_SIZE)

    def _draw_exit(self, canvas: svg.Canvas, out: Exit) -> None:
        target = self.stations[out.edge.target]
        left, rail = self._cards_end, self.rails[out.edge.target]
        named = f' data-source="{out.edge.source}" data-target="{out.edge.target}"'
        canvas.line([(left, out.y), (rail, out.y)], target.colour, halo=True, more=named)
        canvas.dot(rail, out.y, target.colour)
        top = out.y - 5 - LINE * (len(out.lines) - 1)
        for index, labels in enumerate(out.lines):
            more = index < len(out.lines) - 1
            at = top + LINE * index
            canvas.text(left + LABEL_GAP, at, spans(labels, more), EVENT_SIZE, layer=3)
        look = f"mono right {target.colour}"
        canvas.text(self._names_x, out.y - 5, target.node.name, TARGET_SIZE, look, layer=3)

    def _draw_rail(self, canvas: svg.Canvas, station: Station) -> None:
        x, port, colour = self.rails[station.node.name], station.port_y, station.colour
        low, high = self.span_of(station.node.name) or (port, port)
        canvas.line([(x, low), (x, high)], colour, 2.4, layer=0)
        left = self._cards_end
        canvas.line([(x, port), (left + 7, port)], colour, 2.4, halo=True)
        canvas.dot(x, port, colour, 1.2)
        canvas.arrowhead(left, port, colour, to_left=True)

    def _draw_legend(self, canvas: svg.Canvas) -> None:
        samples = {
            "event": ("Event", ""),
            "message": ("Message", ""),
            "time": ("Event", BY_TIME),
            "guard": ("[guard]", svg.SOFT),
            "stays": (STAYS, ""),
            "prose": ("", ""),
        }
        parts: list[tuple[str, str]] = []
        for kind, meaning in self.graph.legend:
            sample, style = samples[kind]
            parts += [(sample, style), (f" {meaning}\u2003 ", svg.SOFT)]
        canvas.text(CARD_X, self._bottom + 14, parts, EVENT_SIZE, "sans")
