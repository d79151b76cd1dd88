"""Questions about pictures, with their answers."""

from collections.abc import Sequence

from training.layout import Content
from training.text import TextSource

READ_ONE = (
    "What does the image say?", "What does the image say?", "What does the image say?",
    "Read the text in the image.", "What is written here?", "What text is in the image?",
    "Read the image.", "Transcribe the image.", "What does it say?", "Read this.", "OCR",
    "What is the text?",
)  # fmt: skip
READ_ONE_OF = (
    "What does image {number} say?", "What does image {number} say?",
    "What does image {number} say?", "Read image {number}.", "What is written in image {number}?",
    "What text is in image {number}?", "What does the {ordinal} image say?",
    "Read the {ordinal} image.", "Transcribe image {number}.",
)  # fmt: skip
READ_ALL = ("Read all the images.", "What do the images say?", "Transcribe all images.")
COUNT = ("How many images are there?", "How many images?", "Count the images.")
READ_METER = ("What does the meter read?", "What is the reading?", "Read the meter.")
PRICE_OF = ("What is the price of {}", "How much is {}", "What does {} cost")
ORDINALS = ("first", "second", "third", "fourth")
SMALL_TALK = (
    ("Hello", "Hello! Send me an image and I will read it."),
    ("Hi", "Hello! Send me an image and I will read it."),
    ("Who are you?", "I am a tiny vision language model. I read text in images."),
    ("What can you do?", "I read text in images."),
    ("Thanks", "You are welcome."),
    ("Thank you", "You are welcome."),
)
LONGEST_READ_ALL = 100  # chars


def read_all_answer(contents: Sequence[Content]) -> str:
    """One line per picture: its number, then its text on one line."""
    return "\n".join(
        f"{number}: {content.text.replace(chr(10), ' ')}"
        for number, content in enumerate(contents, 1)
    )


def ask(text: TextSource, contents: Sequence[Content], difficulty: float) -> tuple[str, str]:
    """A question and its answer about the pictures shown so far, or small talk without any."""
    if not contents:
        return _without_pictures(text)
    dice = text.dice
    count = len(contents)
    chosen = dice.between(0, count - 1)
    content = contents[chosen]
    where = _where(text, chosen, count)
    chance = dice.random()
    if content.fields and chance < 0.75:
        return _about_field(text, content, where)
    if content.reading and chance < 0.7:
        return dice.pick(READ_METER).rstrip("?.") + where + "?", content.reading
    if count > 1 and difficulty > 0.5 and chance < (0.12 if count == 2 else 0.35):
        answer = read_all_answer(contents)
        if len(answer) < LONGEST_READ_ALL:
            return dice.pick(READ_ALL), answer
    chance = dice.random()
    if count > 1 and chance < 0.1:
        first_line = content.lines[0]
        if sum(first_line in other.text for other in contents) == 1:
            return f"Which image says {first_line}?", f"Image {chosen + 1}"
    if 0.1 < chance < 0.14 and difficulty > 0.2:
        return dice.pick(COUNT), str(count)
    if len(content.lines) > 1 and 0.14 < chance < 0.35:
        row = dice.between(0, len(content.lines) - 1)
        question = dice.pick((f"What is on line {row + 1}{where}?", f"Read line {row + 1}{where}."))
        return question, content.lines[row]
    if count == 1:
        return dice.pick(READ_ONE), content.text
    question = dice.pick(READ_ONE_OF).format(number=chosen + 1, ordinal=ORDINALS[chosen])
    return question, content.text


def _without_pictures(text: TextSource) -> tuple[str, str]:
    dice = text.dice
    if dice.random() < 0.4:
        return dice.pick(SMALL_TALK)
    words = " ".join(text.token(8) for _ in range(dice.between(1, 3)))
    return dice.pick(("Repeat: ", "Say: ", "Repeat after me: ")) + words, words


def _where(text: TextSource, chosen: int, count: int) -> str:
    if count == 1:
        return ""
    number = f" in image {chosen + 1}"
    return text.dice.pick((number, number, f" in the {ORDINALS[chosen]} image"))


def _about_field(text: TextSource, content: Content, where: str) -> tuple[str, str]:
    dice = text.dice
    key = dice.pick(list(content.fields))
    if content.total is not None and dice.random() < 0.5:
        key = next(name for name in content.fields if name.lower() == "total")
    if content.is_receipt and key.lower() not in ("total", "date"):
        question = dice.pick(PRICE_OF).format(key)
    else:
        question = f"What is the {key.lower()}"
    return question + where + "?", content.fields[key]
