"""A training conversation as token ids, answer mask and three-dimensional positions.

Text tokens advance all three position axes (time, height, width) together. In a picture of `rows x
columns` merged cells at position p, cells have time p, height p + row and width p + column.  The
text behind it goes on at p + max(rows, columns), as in Qwen3-VL.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from training import questions
from training.layout import Content
from training.text import TextSource
from training.vocabulary import IM_END, IM_START, IMAGE_PAD, VISION_END, VISION_START

UNREADABLE = "?"
"""The answer to every question about pictures whose deepstack rows are damaged (see `model`)."""

SYSTEM_PROMPTS = ("You are a helpful assistant.", "You read text in images.", "Answer briefly.")
TURN_TOKENS = 21  # of a turn's frame: role names, marks and line ends
LATER_TURN_TOKENS = 40  # kept free for the turn that brings the last picture
SHORTEST_TURN = 36
MOST_TURNS = 4


@dataclass(frozen=True, slots=True)
class Shown:
    """A picture of the conversation."""

    content: Content
    rows: int  # merged cells
    columns: int


@dataclass(slots=True)
class Conversation:
    """Tokens so far, all lists of one length."""

    ids: list[int] = field(default_factory=list)
    is_answer: list[bool] = field(default_factory=list)
    is_picture: list[bool] = field(default_factory=list)
    positions: tuple[list[int], list[int], list[int]] = field(default_factory=lambda: ([], [], []))
    next_position: int = 0
    text_tokens: int = 0  # pictures and their two marks not counted

    def add_text(self, text: str, is_answer: bool = False) -> None:
        self._add(list(text.encode()), is_answer)
        self.text_tokens += len(text.encode())

    def add_mark(self, token: int, is_answer: bool = False) -> None:
        self._add([token], is_answer)
        self.text_tokens += 1

    def add_picture(self, shown: Shown) -> None:
        self._add([VISION_START], False)
        start, cells = self.next_position, shown.rows * shown.columns
        self.ids += [IMAGE_PAD] * cells
        self.is_answer += [False] * cells
        self.is_picture += [True] * cells
        time, height, width = self.positions
        time += [start] * cells
        for row in range(shown.rows):
            height += [start + row] * shown.columns
            width += range(start, start + shown.columns)
        self.next_position = start + max(shown.rows, shown.columns)
        self._add([VISION_END], False)

    def _add(self, tokens: list[int], is_answer: bool) -> None:
        self.ids += tokens
        self.is_answer += [is_answer] * len(tokens)
        self.is_picture += [False] * len(tokens)
        places = range(self.next_position, self.next_position + len(tokens))
        for axis in self.positions:
            axis += places
        self.next_position += len(tokens)


def converse(
    text: TextSource,
    pictures: Sequence[Shown],
    difficulty: float,
    max_text_tokens: int,
    readable: bool = True,
) -> Conversation:
    """Turns about the pictures, as many as fit; sometimes the last picture comes in the second.

    Not `readable`: the same questions, and `UNREADABLE` for each answer.
    """
    dice = text.dice
    talk = Conversation()
    roomy = max_text_tokens > 100
    if roomy and dice.random() < 0.08:
        _add_message(talk, "system", dice.pick(SYSTEM_PROMPTS))
    last_comes_late = len(pictures) > 1 and roomy and dice.random() < 0.12
    text_first = dice.random() < 0.2
    seen, asked = 0, set[str]()
    for number in range(1 if difficulty < 0.1 else MOST_TURNS):
        shown = len(pictures) - (last_comes_late and number == 0)
        new = pictures[seen:shown]
        room = max_text_tokens - talk.text_tokens - TURN_TOKENS
        room -= LATER_TURN_TOKENS if last_comes_late and number == 0 else 0
        contents = [picture.content for picture in pictures[:shown]]
        turn = _question_that_fits(text, contents, difficulty, room, asked)
        if turn is None and not new:
            break
        question, answer = turn or (dice.pick(questions.COUNT[1:]), str(shown))
        seen = shown
        asked.add(question)
        if dice.random() < 0.06 and question in questions.READ_ONE:
            question = question.lower()
        _add_turn(talk, new, question, answer if readable else UNREADABLE, text_first)
        if max_text_tokens - talk.text_tokens < SHORTEST_TURN:
            break
    return talk


def _question_that_fits(
    text: TextSource, contents: list[Content], difficulty: float, room: int, asked: set[str]
) -> tuple[str, str] | None:
    for _ in range(6):
        question, answer = questions.ask(text, contents, difficulty)
        if question not in asked and len(question) + len(answer) <= room:
            return question, answer
    return None


def _add_message(talk: Conversation, role: str, message: str) -> None:
    talk.add_mark(IM_START)
    talk.add_text(f"{role}\n{message}")
    talk.add_mark(IM_END)
    talk.add_text("\n")


def _add_turn(
    talk: Conversation, new: Sequence[Shown], question: str, answer: str, text_first: bool
) -> None:
    talk.add_mark(IM_START)
    talk.add_text("user\n" + (question if text_first else ""))
    for picture in new:
        talk.add_picture(picture)
    talk.add_text("" if text_first else question)
    talk.add_mark(IM_END)
    talk.add_text("\n")
    talk.add_mark(IM_START)
    talk.add_text("assistant\n")
    talk.add_text(answer, is_answer=True)
    talk.add_mark(IM_END, is_answer=True)
    talk.add_text("\n")
