"""Questions about pictures that training has not seen, and how many are answered to the letter."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from PIL import Image

from training import fonts
from training.dice import Dice
from training.graft.pages import SheetPainter

KINDS = {
    "total": "receipt", "form": "form", "table": "table", "plate": "plate", "clock": "clock",
    "read": "lines",
}  # fmt: skip
LONGEST = 100  # chars of text to be read
MOST_TOKENS = 72


@dataclass(frozen=True, slots=True)
class Case:
    image: Image.Image
    question: str
    answer: str


def cases(task: str, count: int) -> Iterator[Case]:
    """The first pictures of a task, with strings that are held out from training."""
    for number in range(count):
        painter = SheetPainter(Dice(f"graft/{task}/{number}"), "test", fonts.BUILT_IN_ONLY)
        case = None
        while case is None:
            sheet = painter.sheet(KINDS[task])
            asked = sheet.transcription if task == "read" else sheet.asked[0]
            if task == "total":
                asked = next((one for one in sheet.asked if one[1].startswith("The total")), None)
            if task == "total" and len(sheet.picture.content.lines) < 3:
                continue
            if asked is not None and len(asked[1]) <= LONGEST:
                case = Case(sheet.picture.image, *asked)
        yield case


def accuracy(answer: Callable[[Sequence[Case]], list[str]], count: int) -> dict[str, float]:
    """By task, the share of `count` answers that are right as a whole."""
    found = {}
    for task in KINDS:
        asked = list(cases(task, count))
        said = answer(asked)
        right = sum(one.answer == text for one, text in zip(asked, said, strict=True))
        found[task] = right / count
        print(task, found[task], [(a.answer, t) for a, t in zip(asked, said, strict=True)][:3])
    return found
