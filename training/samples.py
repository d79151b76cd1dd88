"""The committed sample pictures: `python -m training.samples` paints them anew.

Six pictures that a person can check at a glance: two receipts, a form, a label, a meter, a noisy
line. `samples.json` has the questions; those in `DEMO` are what `epd demo` asks. Plain clean
scenes with strings chosen by hand, set by the same code that sets the training pictures.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from epd.tiny import SAMPLES
from epd.tiny.samples import INDEX, Entry, read_index
from training import fonts
from training.dice import Dice
from training.layout import Box, Content, Layout, Page, Span
from training.painter import draw_ink, noise_sheet
from training.tasks import Message, turn
from training.tasks import Sample as Question

Rgb = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Scene:
    """One sample picture: rows of (left text, right text), and how they look."""

    name: str
    width: int
    height: int
    size: int  # px, em
    rows: tuple[tuple[str, str], ...]
    paper: Rgb
    pen: Rgb
    framed: bool = False
    inverse_row: int | None = None
    noise: float = 0.0


SCENES = (
    Scene(
        "receipt-cafe", 208, 160, 16,
        (("City Cafe", ""), ("Date", "14/03/2026"), ("Coffee", "3.20"), ("Cake", "4.75"),
         ("Juice", "2.90"), ("Total", "10.85")),
        (252, 250, 244), (30, 30, 38),
    ),
    Scene(
        "receipt-market", 208, 144, 16,
        (("Fresh Mart", ""), ("Milk", "1.49"), ("Bread", "2.30"), ("Apples", "3.84"),
         ("TOTAL", "7.63")),
        (236, 240, 232), (24, 44, 92),
    ),
    Scene(
        "boarding-form", 192, 112, 17,
        (("Flight: KX407", ""), ("Gate: B12", ""), ("Seat: 31F", ""), ("Time: 18:45", "")),
        (214, 232, 250), (20, 36, 80),
    ),
    Scene(
        "label", 208, 96, 17,
        (("Model: TR-58K", ""), ("Serial: 9G4H7W", ""), ("Lot: M26", "")),
        (246, 214, 84), (32, 28, 20), framed=True,
    ),
    Scene(
        "meter", 192, 96, 24, (("Power", ""), ("04817.3", "kWh")),
        (206, 210, 214), (26, 30, 34), inverse_row=1,
    ),
    Scene(
        "sign", 208, 64, 26, (("Platform 7B", ""),), (20, 60, 140), (250, 250, 250), noise=14,
    ),
)  # fmt: skip


ENTRIES = (
    Entry("receipt-total", ["receipt-cafe.png"], "What is the total?", "10.85", demo=True),
    Entry("receipt-price", ["receipt-market.png"], "How much is Bread?", "2.30"),
    Entry("form-gate", ["boarding-form.png"], "What is the gate?", "B12"),
    Entry("label-serial", ["label.png"], "What is the serial?", "9G4H7W"),
    Entry("meter-reading", ["meter.png"], "What does the meter read?", "04817.3 kWh", demo=True),
    Entry("sign", ["sign.png"], "What does the image say?", "Platform 7B"),
    Entry(
        "two-receipts", ["receipt-cafe.png", "receipt-market.png"],
        "What is the total in image 2?", "7.63", demo=True,
    ),
)  # fmt: skip


def load_questions(demo_only: bool = False) -> list[Question]:
    """The questions of samples.json with their pictures, ready to ask."""
    return [
        Question(
            task=entry.name,
            images=[Image.open(SAMPLES / name).convert("RGB") for name in entry.images],
            messages=_messages(entry),
            answer=entry.answer,
        )
        for entry in read_index()
        if entry.demo or not demo_only
    ]


def _messages(entry: Entry) -> list[Message]:
    return [turn("user", entry.question, range(len(entry.images)))]


def paint(scene: Scene) -> Image.Image:
    """The picture of a scene; the same pixels on every machine with the same Pillow."""
    page = Page(scene.width, scene.height)
    mask, _ = draw_ink(_set_rows(scene), page)
    ink = np.asarray(mask, np.float32)[..., None] / 255
    paper, pen = np.array(scene.paper, np.float32), np.array(scene.pen, np.float32)
    image = paper + ink * (pen - paper)
    if scene.noise:
        top = Dice(scene.name).between(0, 512)
        grain = noise_sheet()[top : top + scene.height, : scene.width, None]
        image = image + grain * np.float32(scene.noise / 32)
    return Image.fromarray(np.clip(image, 0, 255).astype(np.uint8))


def _set_rows(scene: Scene) -> Layout:
    """Rows one below the other, the right texts flush right, in the middle of the page."""
    face = fonts.face(fonts.BUILT_IN, scene.size)
    spacing = scene.size * 1.4
    margin = 16
    top = (scene.height - spacing * len(scene.rows)) / 2
    spans, boxes = [], []
    for row, (left, right) in enumerate(scene.rows):
        y = top + row * spacing
        spans.append(Span(left, margin, y))
        if right:
            spans.append(Span(right, scene.width - margin - face.width(right), y))
        if row == scene.inverse_row:
            end = margin + face.width(left)
            boxes.append(
                Box(margin - 6, int(y), int(end) + 6, int(y + scene.size * 1.3), inverse=True)
            )
    if scene.framed:
        boxes.append(Box(5, 5, scene.width - 6, scene.height - 6, inverse=False))
    lines = tuple(f"{left} {right}".strip() for left, right in scene.rows)
    return Layout(tuple(spans), face, Content(lines), tuple(boxes))


def write(directory: Path = SAMPLES) -> None:
    """Paints all scenes and writes the index."""
    directory.mkdir(parents=True, exist_ok=True)
    for scene in SCENES:
        paint(scene).save(directory / f"{scene.name}.png", optimize=True)
    index = [asdict(entry) for entry in ENTRIES]
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def main() -> int:
    write()
    print(f"{len(SCENES)} pictures and {len(ENTRIES)} questions in {SAMPLES}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
