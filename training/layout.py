"""Decides a picture's texts and their places: lines of text, receipts, forms, labels, meters.

A layout is geometry only: spans of text, each with its pen position (px, the top left corner of the
em box), and boxes around or under them. `painter` turns it into pixels.
"""

from dataclasses import dataclass, field
from typing import Literal

from training import fonts
from training.dice import Dice
from training.text import TextSource, is_allowed

Scene = Literal["lines", "fields", "meter", "table", "plate"]

SHOPS = ("Fresh Mart", "Corner Shop", "City Cafe", "Book Store", "Green Deli", "Super Save",
         "Daily Foods", "Pizza House", "Tea Room", "Hardware", "Bakery", "Pharmacy", "Receipt",
         "Invoice", "Ticket", "Order")  # fmt: skip
GOODS = ("Milk", "Bread", "Eggs", "Butter", "Cheese", "Apples", "Rice", "Pasta", "Soup", "Salad",
         "Coffee", "Tea", "Juice", "Water", "Sugar", "Salt", "Pizza", "Burger", "Fries", "Cake",
         "Cookie", "Honey", "Fish", "Beef", "Soap", "Paper", "Pen", "Book", "Lamp", "Cable",
         "Mouse", "Card")  # fmt: skip
FORM_KEYS = {
    "Date": "date", "Time": "time", "Name": "name", "Order": "number", "Table": "number",
    "Phone": "phone", "City": "word", "Code": "code", "Ref": "code", "Room": "number",
    "Gate": "code", "Seat": "code", "Flight": "code", "Qty": "number", "Tax": "price",
    "Subtotal": "price", "Cash": "price", "Change": "price", "Tip": "price", "Weight": "decimal",
    "Price": "price", "Model": "code", "Serial": "code", "Lot": "code", "Color": "word",
    "Bus": "number", "Train": "number", "Floor": "number", "Page": "number", "Score": "number",
    "Temp": "decimal", "Speed": "number", "Level": "number", "Discount": "percent",
    "Rate": "percent", "User": "name",
}  # fmt: skip
TOTALS = ("Total", "TOTAL", "Total", "total")
METERS = (("Water", "m3"), ("Gas", "m3"), ("Power", "kWh"), ("Energy", "kWh"), ("Heat", "MWh"),
          ("Meter", "kWh"), ("Speed", "km/h"), ("Pressure", "bar"), ("Weight", "kg"),
          ("Temp", "C"))  # fmt: skip
TIGHTEST = 1.15  # line height of the closest lines, in ems


@dataclass(frozen=True, slots=True)
class Page:
    """The room there is and how hard the text may be."""

    width: int  # px
    height: int  # px
    difficulty: float = 1.0  # 0: one short line; 1: everything
    smallest: int = 10  # px, em size
    largest: float = 40  # px, em size
    dense: bool = False  # fill the page


@dataclass(frozen=True, slots=True)
class Span:
    text: str
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in px: a frame around text, or an area in which ink and paper change places."""

    left: int
    top: int
    right: int
    bottom: int
    inverse: bool


@dataclass(frozen=True, slots=True)
class Content:
    """The picture's texts, for questions."""

    lines: tuple[str, ...]
    fields: dict[str, str] = field(default_factory=dict)
    is_receipt: bool = False
    reading: str | None = None  # of a meter

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def total(self) -> str | None:
        return next((v for k, v in self.fields.items() if k.lower() == "total"), None)


@dataclass(frozen=True, slots=True)
class Layout:
    spans: tuple[Span, ...]
    face: fonts.Face
    content: Content
    boxes: tuple[Box, ...] = ()


class Typesetter:
    """Lays out one picture at a time."""

    def __init__(self, dice: Dice, text: TextSource, faces: tuple[str, ...]) -> None:
        self.dice = dice
        self.text = text
        self.faces = faces

    def lay_out(self, scene: Scene, page: Page) -> Layout:
        """A layout of the scene; plain lines where the scene does not fit the page."""
        layout = None
        if scene == "fields":
            layout = self.fields(page)
        elif scene == "meter":
            layout = self.meter(page)
        return layout or self.lines(page)

    # -- lines of text ---------------------------------------------------------------------------

    def lines(self, page: Page) -> Layout:
        """Free text: one to five lines, or as many as fit on a dense page."""
        dice = self.dice
        size, largest = page.smallest, page.largest
        if page.dense:
            largest = min(largest, max(page.smallest + 4, page.height / 2.2))
        largest = max(size + 1, min(largest, page.height * 0.72, page.width * 0.42))
        share = dice.random() if dice.random() < 0.5 else dice.random() ** 2
        size = round(size + (largest - size) * share)
        name = dice.pick(self.faces)
        fitting = max(1, int((page.height - 2) / (size * dice.span(TIGHTEST, 1.6))))
        count = self._line_count(page, fitting)
        lines: list[str] = []
        while len(lines) < count:
            line, size = self._line(page, name, size, shrink=not lines)
            if not line:
                break
            lines.append(line)
        if not lines:
            size = page.smallest
            lines = [self.text.token(max(1, int((page.width - 4) / (size * 0.8))))]
        spacing = size * dice.span(TIGHTEST, 1.6)
        if spacing * len(lines) > page.height:
            spacing = size * TIGHTEST
        lines = lines[: max(1, int(page.height / spacing))]
        return self._place_block(page, fonts.face(name, size), spacing, lines)

    def _line_count(self, page: Page, fitting: int) -> int:
        if page.dense:
            return fitting
        if page.difficulty < 0.15:
            return 1
        return min(fitting, 1 + int(4 * page.difficulty * self.dice.random() ** 1.5))

    def _line(self, page: Page, name: str, size: int, shrink: bool) -> tuple[str, int]:
        """One line that fits the width, and the em size, smaller if the first token needs it."""
        dice = self.dice
        max_chars = 2 + round(22 * page.difficulty)
        if page.dense or page.difficulty >= 0.9:
            max_chars = 40
        tokens = 9 if page.dense else 1 if dice.random() < 0.45 else dice.between(2, 5)
        line, width = "", 0.0
        for _ in range(tokens):
            for _ in range(4):
                gap = " " if line else ""
                room = int((page.width - 4 - width) / (size * 0.5))
                room = min(room, max_chars - len(line) - len(gap), 12)
                fits = room >= (3 if line else 1)
                if fits:
                    longer = line + gap + self.text.token(room)
                    longer_width = fonts.face(name, size).width(longer)
                    if longer_width <= page.width - 4:
                        line, width = longer, longer_width
                        break
                if not line and shrink and size > page.smallest:
                    size = max(page.smallest, int(size * 0.85))
                elif not fits:
                    break
        return line, size

    def _place_block(
        self, page: Page, face: fonts.Face, spacing: float, lines: list[str]
    ) -> Layout:
        dice = self.dice
        widths = [face.width(line) for line in lines]
        block_width, block_height = max(widths), spacing * len(lines)
        left = dice.span(1, max(1.01, page.width - block_width - 1))
        top = dice.span(0, max(0.01, page.height - block_height))
        align = dice.random()
        shift = 0.0 if align < 0.6 else 0.5 if align < 0.85 else 1.0
        spans = tuple(
            Span(line, left + (block_width - width) * shift, top + row * spacing)
            for row, (line, width) in enumerate(zip(lines, widths, strict=True))
        )
        boxes: tuple[Box, ...] = ()
        if page.difficulty > 0.5 and not page.dense and dice.random() < 0.12:
            boxes = self._frame(page, left, top, block_width, block_height, face.size)
        return Layout(spans, face, Content(tuple(lines)), boxes)

    # -- boxes -----------------------------------------------------------------------------------

    def _frame(
        self, page: Page, left: float, top: float, width: float, height: float, size: int,
        inverse: bool | None = None,
    ) -> tuple[Box, ...]:  # fmt: skip
        """A box with a margin around a block of text; none where the page has no room for one."""
        margin = max(2.0, size * self.dice.span(0.15, 0.45))
        box = Box(
            int(left - margin), int(top - margin * 0.5), int(left + width + margin),
            int(top + max(height, size * 1.2) + margin * 0.5),
            self.dice.random() < 0.4 if inverse is None else inverse,
        )  # fmt: skip
        inside = box.left >= 0 and box.top >= 0
        inside = inside and box.right < page.width and box.bottom < page.height
        return (box,) if inside else ()

    # -- receipts, forms, labels -----------------------------------------------------------------

    def fields(self, page: Page) -> Layout | None:
        """A receipt or a form: lines of a key and a value."""
        dice = self.dice
        is_receipt = dice.random() < 0.6
        name = dice.pick(self.faces)
        largest = max(page.smallest + 0.5, min(page.largest, page.width / 9, page.height / 3.2))
        size = round(dice.span(page.smallest, largest))
        for _ in range(12):
            face = fonts.face(name, size)
            spacing = size * dice.span(TIGHTEST, 1.45)
            count = min(int((page.height - 2) / spacing), 6)
            if count >= 2:
                rows = self._receipt_rows(count) if is_receipt else self._form_rows(count)
                joint = dice.pick([": ", " "])
                widest = max(face.width(_join(row, joint)) for row in rows)
                if widest <= page.width - 4 and len(rows) >= 2:
                    return self._place_rows(page, face, spacing, rows, joint, is_receipt)
            size = max(page.smallest, size - 2)
        return None

    def _receipt_rows(self, count: int) -> list[tuple[str, str]]:
        """Rows (name, price), the total last; a header row has no value."""
        dice = self.dice
        head: list[tuple[str, str]] = []
        if count >= 3 and dice.random() < 0.6:
            head.append((dice.pick(SHOPS), ""))
        if count - len(head) >= 4 and dice.random() < 0.5:
            head.append(("Date", self.text.token(kind="date")))
        names: list[str] = []
        wanted = dice.between(1, max(1, count - len(head) - 1))
        while len(names) < wanted:
            name = dice.pick(GOODS) if dice.random() < 0.6 else self.text.token(7, "name")
            if name not in names and name.isalpha():
                names.append(name)
        cents = [dice.between(10, 1999) for _ in names]
        currency = dice.pick(["$", "", ""])
        prices = [f"{currency}{cent // 100}.{cent % 100:02d}" for cent in cents]
        total = f"{currency}{sum(cents) // 100}.{sum(cents) % 100:02d}"
        if dice.random() < 0.5 or not is_allowed(total, self.text.split):
            total = self.text.token(kind="price")  # it is to be read, not to be added up
        rows = [*head, *zip(names, prices, strict=True), (dice.pick(TOTALS), total)]
        return rows[-count:]

    def _form_rows(self, count: int) -> list[tuple[str, str]]:
        keys = self.dice.sample(list(FORM_KEYS), self.dice.between(2, count))
        rows = [(key, self.text.token(9, FORM_KEYS[key])) for key in keys]
        if self.dice.random() < 0.25:
            rows[-1] = ("Total", self.text.token(kind="price"))
        return rows

    def _place_rows(
        self, page: Page, face: fonts.Face, spacing: float, rows: list[tuple[str, str]],
        joint: str, is_receipt: bool,
    ) -> Layout:  # fmt: skip
        dice = self.dice
        widths = [face.width(_join(row, joint)) for row in rows]
        width, height = max(widths), spacing * len(rows)
        in_columns = joint == " " and dice.random() < 0.7
        left = dice.span(1, max(1.01, (page.width - width - 1) * (0.3 if in_columns else 1)))
        top = dice.span(0, max(0.01, page.height - height))
        right = dice.span(left + width, page.width - 1)
        spans: list[Span] = []
        for row, (key, value) in enumerate(rows):
            y = top + row * spacing
            if not value:
                indent = dice.span(0, width - widths[row]) if in_columns else 0.0
                spans.append(Span(key, left + indent, y))
            elif in_columns:
                spans.append(Span(key, left, y))
                spans.append(Span(value, right - face.width(value), y))
            else:
                spans.append(Span(_join((key, value), joint), left, y))
        boxes: tuple[Box, ...] = ()
        if page.difficulty > 0.5 and dice.random() < 0.2:
            block = (right - left) if in_columns else width
            boxes = self._frame(page, left, top, block, height, face.size)
        content = Content(
            lines=tuple(_join(row, joint) for row in rows),
            fields={key: value for key, value in rows if value},
            is_receipt=is_receipt,
        )
        return Layout(tuple(spans), face, content, boxes)

    # -- meters ----------------------------------------------------------------------------------

    def meter(self, page: Page) -> Layout | None:
        """A display with a reading, its unit beside it, a caption above."""
        dice = self.dice
        caption, unit = dice.pick(METERS)
        caption = caption.upper() if dice.random() < 0.3 else caption
        reading = self.text.token(kind="reading")
        name = dice.pick(self.faces)
        largest = max(page.smallest + 0.5, min(page.largest, page.height / 3.2))
        size = round(dice.span(page.smallest, largest))
        while True:
            face = fonts.face(name, size)
            margin = size * 0.5
            display, tail = face.width(reading), margin + face.width(" " + unit)
            width, height = margin * 2 + max(display + tail, face.width(caption)), size * 3.4
            if width <= page.width - 4 and height <= page.height - 2:
                break
            if size <= page.smallest:
                return None
            size -= 1
        left = dice.span(1 + margin, page.width - width - 1 + margin)
        top = dice.span(1, page.height - height)
        y = top + size * 1.75
        spans = (
            Span(caption, left, top),
            Span(reading, left, y),
            Span(unit, left + display + tail - face.width(unit), y),
        )
        boxes = self._frame(page, left, y, display, size, size, dice.random() < 0.7)
        shown = f"{reading} {unit}"
        content = Content(lines=(caption, shown), reading=shown)
        return Layout(spans, face, content, boxes)


def _join(row: tuple[str, str], joint: str) -> str:
    """The row as one line of text; a header row has no value."""
    key, value = row
    return key + joint + value if value else key
