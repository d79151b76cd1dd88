"""The seven evaluation tasks, each an endless supply of fresh pictures with right answers.

Every string of four or more characters in them is held out from training. A sample depends on
nothing but (task, seed, its number): two machines with the same Pillow paint the same pixels.
"""

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image

from training import fonts
from training.dice import Dice
from training.layout import Page, Scene
from training.painter import Painter, Picture
from training.questions import LONGEST_READ_ALL, read_all_answer

Message = dict[str, Any]

READ = "What does the image say?"
DEFAULT_SEED = 1234


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation that ends in a question, and the answer to it."""

    task: str
    images: list[Image.Image]  # in the order of their first mention
    messages: list[Message]  # OpenAI's shape; image_url.url is "image:0", "image:1", ...
    answer: str

    @property
    def question(self) -> str:
        """The text of the last message."""
        return "".join(part.get("text", "") for part in self.messages[-1]["content"])

    def openai_messages(self) -> list[Message]:
        """The messages with each picture in place, as a PNG in a data URL."""
        urls = {f"image:{number}": data_url(image) for number, image in enumerate(self.images)}
        return [
            {
                "role": message["role"],
                "content": [
                    {"type": "image_url", "image_url": {"url": urls[part["image_url"]["url"]]}}
                    if part["type"] == "image_url"
                    else part
                    for part in message["content"]
                ],
            }
            for message in self.messages
        ]


def data_url(image: Image.Image) -> str:
    """The picture as a PNG in a data URL: no loss."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def image_part(number: int) -> Message:
    """The content part that stands for picture `number`, counted from 0."""
    return {"type": "image_url", "image_url": {"url": f"image:{number}"}}


def turn(role: str, text: str, images: range = range(0)) -> Message:
    """A message: the pictures first, then the text."""
    parts = [image_part(number) for number in images]
    return {"role": role, "content": [*parts, {"type": "text", "text": text}]}


class Studio:
    """Paints what the tasks need, from one seed."""

    def __init__(self, dice: Dice, faces: tuple[str, ...]) -> None:
        self.dice = dice
        self.painter = Painter(dice, "test", faces)

    def lines(
        self, width: int, height: int, smallest: int, largest: float, noise: float | None = None
    ) -> Picture:
        return self._paint("lines", Page(width, height, 1.0, smallest, largest), noise)

    def fields(self, width: int, height: int) -> Picture:
        return self._paint("fields", Page(width, height, 1.0, 11, 22), None)

    def meter(self, width: int, height: int) -> Picture:
        return self._paint("meter", Page(width, height, 1.0, 12, 30), None)

    def _paint(self, scene: Scene, page: Page, noise: float | None) -> Picture:
        return self.painter.paint(scene, page, noise=noise, resize=False)


def _about(task: str, pictures: list[Picture], question: str, answer: str) -> Sample:
    images = [picture.image for picture in pictures]
    return Sample(task, images, [turn("user", question, range(len(images)))], answer)


def single(studio: Studio) -> Sample:
    """One picture of any size, not only multiples of the patch."""
    between = studio.dice.between
    picture = studio.lines(between(64, 256), between(32, 192), 11, 36)
    return _about("single", [picture], READ, picture.content.text)


def two(studio: Studio) -> Sample:
    """Two pictures of one size, and a question about the text of one."""
    between = studio.dice.between
    width, height = 16 * between(4, 12), 16 * between(2, 8)
    pictures = [studio.lines(width, height, 11, 36) for _ in range(2)]
    chosen = between(0, 1)
    question = f"What does image {chosen + 1} say?"
    return _about("two", pictures, question, pictures[chosen].content.text)


def total(studio: Studio) -> Sample:
    """The total of a receipt or form of at least three lines."""
    between = studio.dice.between
    while True:
        picture = studio.fields(between(128, 256), between(80, 224))
        amount = picture.content.total
        if amount is not None and len(picture.content.lines) >= 3:
            return _about("total", [picture], "What is the total?", amount)


def small(studio: Studio) -> Sample:
    """Text of 10 to 12 px under heavy noise."""
    dice = studio.dice
    noise = dice.span(12, 24)
    picture = studio.lines(dice.between(96, 256), dice.between(32, 128), 10, 12.4, noise)
    return _about("small", [picture], READ, picture.content.text)


def four_all(studio: Studio) -> Sample:
    """Four small pictures, all to be read."""
    between = studio.dice.between
    while True:
        pictures = [studio.lines(16 * between(4, 8), 16 * between(2, 4), 11, 28) for _ in range(4)]
        answer = read_all_answer([picture.content for picture in pictures])
        if len(answer) < LONGEST_READ_ALL:
            return _about("four_all", pictures, "Read all the images.", answer)


def lines(studio: Studio) -> Sample:
    """Three or more lines of text."""
    between = studio.dice.between
    while True:
        picture = studio.lines(between(128, 256), between(64, 224), 11, 20)
        if len(picture.content.lines) >= 3 and len(picture.content.text) <= 100:
            return _about("lines", [picture], READ, picture.content.text)


def turn2(studio: Studio) -> Sample:
    """A second turn about a picture of the first."""
    between = studio.dice.between
    pictures = [studio.lines(16 * between(4, 12), 16 * between(2, 8), 11, 36) for _ in range(2)]
    messages = [
        turn("user", "What does image 1 say?", range(2)),
        turn("assistant", pictures[0].content.text),
        turn("user", "What does image 2 say?"),
    ]
    images = [picture.image for picture in pictures]
    return Sample("turn2", images, messages, pictures[1].content.text)


def meter(studio: Studio) -> Sample:
    """The reading of a meter with a display."""
    between = studio.dice.between
    while True:
        picture = studio.meter(between(112, 256), between(64, 160))
        if picture.content.reading is not None:
            return _about("meter", [picture], "What does the meter read?", picture.content.reading)


TASKS: dict[str, Callable[[Studio], Sample]] = {
    "single": single, "two": two, "total": total, "small": small, "four_all": four_all,
    "lines": lines, "turn2": turn2, "meter": meter,
}  # fmt: skip


def fresh_samples(
    task: str,
    count: int,
    seed: int = DEFAULT_SEED,
    faces: tuple[str, ...] = fonts.BUILT_IN_ONLY,
) -> list[Sample]:
    """The first `count` samples of a task under a seed."""
    paint = TASKS[task]
    return [paint(Studio(Dice(f"{task}/{seed}/{number}"), faces)) for number in range(count)]


def exact_match(answer: str, expected: str) -> bool:
    """Equal but for blanks at the ends, which a chat template may add or strip."""
    return answer.strip() == expected.strip()


def edit_distance(answer: str, expected: str) -> int:
    """Insertions, deletions and substitutions of characters from one to the other."""
    row = list(range(len(expected) + 1))
    for i, char in enumerate(answer, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(expected, 1):
            diagonal, row[j] = (
                row[j],
                min(row[j] + 1, row[j - 1] + 1, diagonal + (char != other)),
            )
    return row[-1]
