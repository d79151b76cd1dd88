"""Pictures with questions about them that are answered in whole sentences.

Receipts, forms, meters and lines are those of the bundled model; tables, number plates and clocks
are painted here.
"""

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from training import fonts, questions
from training.dice import Dice
from training.layout import GOODS, Content, Layout, Page, Scene, Span, Typesetter
from training.painter import Painter, Picture
from training.text import CODE_ALPHABET, DIGITS, Split, is_allowed

Asked = tuple[str, str]  # a question and its answer

COLUMNS = {
    "Qty": "number", "Price": "price", "Code": "code", "Time": "time", "Weight": "decimal",
    "Date": "date", "Rate": "percent",
}  # fmt: skip
SHARES = {
    "receipt": 0.28, "form": 0.16, "table": 0.16, "plate": 0.08, "clock": 0.1, "meter": 0.07,
    "lines": 0.15,
}  # fmt: skip
TOTAL = (
    "What is the total?", "What is the total of the receipt?", "How much is it in total?",
    "What does it cost altogether?", "How much is to be paid?",
)  # fmt: skip
PLATE = ("What is on the plate?", "What does the plate say?", "Which plate is this?")
CLOCK = ("What time is it?", "What time does the clock show?", "Read the clock.")
SHOWS = ("What does the picture show?", "What is this?", "What kind of picture is this?")
SCENES: dict[str, Scene] = {
    "receipt": "fields", "form": "fields", "table": "table", "plate": "plate", "meter": "meter",
    "lines": "lines",
}  # fmt: skip
NAMES = {
    "receipt": "a receipt", "form": "a form", "table": "a table", "plate": "a number plate",
    "clock": "a clock", "meter": "a meter", "lines": "text",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sheet:
    """A picture, its kind (a key of SHARES), and questions: those of the kind come first."""

    kind: str
    picture: Picture
    asked: tuple[Asked, ...]
    transcription: Asked | None


class Sheets(Typesetter):
    """Lays out tables and number plates too."""

    def lay_out(self, scene: Scene, page: Page) -> Layout:
        layout = None
        if scene == "table":
            layout = self.table(page)
        elif scene == "plate":
            layout = self.plate(page)
        return layout or super().lay_out(scene, page)

    def table(self, page: Page) -> Layout | None:
        """A row of headings, then rows of a name and values; fields are "heading of name"."""
        dice = self.dice
        heads = dice.sample(list(COLUMNS), dice.between(1, 3))
        names = dice.sample(GOODS, dice.between(2, 5))
        rows = [("Item", *heads)]
        rows += [(name, *(self.text.token(5, COLUMNS[head]) for head in heads)) for name in names]
        face, widths, spacing = fonts.face(fonts.BUILT_IN, 10), [0.0], 0.0
        name, loose = dice.pick(self.faces), dice.span(1.2, 1.7)
        for size in range(round(dice.span(page.smallest, page.largest)), page.smallest - 2, -1):
            face, spacing = fonts.face(name, size), size * loose
            widths = [max(map(face.width, column)) for column in zip(*rows, strict=True)]
            width, height = sum(widths) + size * (len(widths) - 1), spacing * len(rows)
            if width <= page.width - 4 and height <= page.height - 2:
                break
        else:
            return None
        free = (page.width - 3 - sum(widths)) / len(widths)
        gap = dice.span(face.size, max(face.size, free))
        left = dice.span(1, max(1.01, page.width - 1 - sum(widths) - gap * (len(widths) - 1)))
        top = dice.span(0, max(0.01, page.height - spacing * len(rows)))
        flush = dice.pick((0.0, 1.0))
        spans = [
            Span(
                text,
                left + sum(widths[:i]) + gap * i + (flush if i else 0) * (width - face.width(text)),
                top + number * spacing,
            )
            for number, row in enumerate(rows)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        fields = {
            f"{head} of {row[0]}": value
            for row in rows[1:]
            for head, value in zip(heads, row[1:], strict=True)
        }
        return Layout(tuple(spans), face, Content(tuple(" ".join(row) for row in rows), fields))

    def plate(self, page: Page) -> Layout | None:
        """Letters and digits in a frame."""
        dice = self.dice
        while True:
            parts = [
                "".join(dice.pick(alphabet) for _ in range(dice.between(*count)))
                for alphabet, count in ((CODE_ALPHABET[:24], (1, 3)), (DIGITS, (2, 4)))
            ] + ["".join(dice.pick(CODE_ALPHABET[:24]) for _ in range(dice.pick((0, 0, 1, 2))))]
            shown = dice.pick((" ", " ", "-")).join(part for part in parts if part)
            if is_allowed(shown, self.text.split):
                break
        name = dice.pick(self.faces)
        for size in range(min(48, int(page.height * dice.span(0.3, 0.6))), 13, -1):
            face = fonts.face(name, size)
            if (width := face.width(shown)) <= page.width - 2 * size:
                break
        else:
            return None
        left, top = dice.span(size, page.width - width - size), (page.height - size * 1.2) / 2
        boxes = self._frame(page, left, top, width, size * 1.2, size, dice.random() < 0.3)
        return Layout((Span(shown, left, top),), face, Content((shown,), reading=shown), boxes)


class SheetPainter(Painter):
    """Paints every kind of sheet from one seed and one split of the strings."""

    def __init__(self, dice: Dice, split: Split, faces: tuple[str, ...]) -> None:
        super().__init__(dice, split, faces)
        self.typesetter = Sheets(dice, self.text, faces)
        self._kinds, self._shares = list(SHARES), list(SHARES.values())

    def sheet(self, kind: str | None = None, difficulty: float = 1.0) -> Sheet:
        """Of a kind, or of one by chance."""
        dice, wanted = self.dice, kind or self.dice.choices(self._kinds, self._shares)[0]
        while True:
            found, picture = self._paint(wanted, difficulty)
            if kind is None or found == kind:
                break
        content = picture.content
        asked = [
            *_asked(dice, found, content),
            (dice.pick(SHOWS), f"The picture shows {NAMES[found]}."),
        ]
        row = dice.between(0, max(0, len(content.lines) - 1))
        if len(content.lines) > 1:
            asked.append(
                (f"What is on line {row + 1}?", f"Line {row + 1} says: {content.lines[row]}")
            )
        reading = (dice.pick(questions.READ_ONE), content.text) if content.lines else None
        return Sheet(found, picture, tuple(asked), reading)

    def dense(self, difficulty: float) -> Picture:
        """A page full of text, to learn to see from."""
        between = self.dice.between
        page = Page(between(128, 256), between(80, 224), difficulty, 10, 24, dense=True)
        return self.paint("lines", page)

    def _paint(self, kind: str, difficulty: float) -> tuple[str, Picture]:
        """The kind that is painted: a page may have no room for the kind asked for."""
        between = self.dice.between
        if kind == "clock":
            return kind, self.clock(Page(between(96, 224), between(96, 224), difficulty))
        size = (between(128, 256), between(80, 224))
        if kind in ("plate", "meter"):
            size = (between(112, 256), between(64, 160))
        largest = 30 if kind == "meter" else 22
        picture = self.paint(SCENES[kind], Page(*size, difficulty, 11, largest))
        content = picture.content
        if content.is_receipt:
            return "receipt", picture
        if content.reading is not None:
            return kind, picture
        if content.fields:
            return ("table" if kind == "table" else "form"), picture
        return "lines", picture

    def clock(self, page: Page) -> Picture:
        """A dial with two hands, at a multiple of five minutes."""
        dice = self.dice
        hour, minute = dice.between(1, 12), 5 * dice.between(0, 11)
        mask = Image.new("L", (page.width, page.height), 0)
        draw = ImageDraw.Draw(mask)
        radius = min(page.width, page.height) * dice.span(0.35, 0.48)
        x = dice.span(radius, page.width - radius)
        y = dice.span(radius, page.height - radius)

        def hand(turn: float, start: float, end: float, width: float) -> None:
            ahead, up = math.sin(turn * math.tau) * radius, -math.cos(turn * math.tau) * radius
            ends = (x + ahead * start, y + up * start, x + ahead * end, y + up * end)
            draw.line(ends, 255, max(1, round(width * radius)))

        draw.ellipse((x - radius, y - radius, x + radius, y + radius), outline=255, width=2)
        for tick in range(12):
            hand(tick / 12, 0.86 if tick % 3 else 0.78, 0.95, 0.03)
        hand((hour + minute / 60) / 12, -0.08, dice.span(0.42, 0.52), dice.span(0.06, 0.09))
        hand(minute / 60, -0.1, dice.span(0.7, 0.82), dice.span(0.03, 0.05))
        ink = np.asarray(mask, np.float32) / 255
        content = Content((), reading=f"{hour}:{minute:02d}")
        return Picture(self._colour(ink, page, 0.5 * page.difficulty, None), content, ())


def _asked(dice: Dice, kind: str, content: Content) -> list[Asked]:
    """All that a sheet is asked about its fields or its reading, in any order."""
    if kind == "clock":
        return [(dice.pick(CLOCK), f"The clock shows {content.reading}.")]
    if kind == "plate":
        return [(dice.pick(PLATE), f"The plate says {content.reading}.")]
    if kind == "meter":
        return [(dice.pick(questions.READ_METER), f"The meter reads {content.reading}.")]
    asked = [_field(dice, kind, key, value) for key, value in content.fields.items()]
    dice.shuffle(asked)
    return asked


def _field(dice: Dice, kind: str, key: str, value: str) -> Asked:
    if key.lower() == "total":
        of = " of the receipt" if kind == "receipt" else ""
        return dice.pick(TOTAL), f"The total{of} is {value}."
    if kind == "receipt" and key != "Date":
        return dice.pick(questions.PRICE_OF).format(key) + "?", f"{key} costs {value}."
    name = key[0].lower() + key[1:]
    return f"What is the {name}?", f"The {name} is {value}."
