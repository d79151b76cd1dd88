"""Right answers to known questions: of one server, or of several to the same ones.

Two kinds of JSON lines are read, each scored by the rule of whoever published it:

OCRBench   {"image_path", "question", "answers"}: right if an answer is in what is said, without
           regard to case and line ends; of HME100k in its case, and without blanks (their script).
GSM8K      {"question", "answer"}, whose number stands behind ####: right if the last number that is
           said is that one, without commas, $ and a last dot (lm-eval's flexible-extract).

Whether one server is better is McNemar's test on the questions that only one of both answers
rightly: two-sided, exact.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import mimetypes
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from epd.cli.ask.client import connected
from epd.cli.boundary import CommandFailed
from epd.cli.configure.settings import keys_of_environment
from epd.errors import FAILED, OK
from epd.frontend import JsonObject
from epd_lab.bench.serve import Target

_NUMBER = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = re.compile(r",|\$|\.$")
GSM8K_PROMPT = "Question: {}\nAnswer:"
PROGRESS_EVERY = 20  # answers


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answers: tuple[str, ...]
    image: Path | None = None
    is_formula: bool = False  # of HME100k: blanks mean nothing
    is_number: bool = False  # of GSM8K

    @property
    def messages(self) -> list[JsonObject]:
        if self.image is None:
            text = GSM8K_PROMPT.format(self.text) if self.is_number else self.text
            return [{"role": "user", "content": text}]
        kind = mimetypes.guess_type(self.image.name)[0] or "image/png"
        url = f"data:{kind};base64," + base64.b64encode(self.image.read_bytes()).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": self.text}]}]

    def is_right(self, said: str) -> bool:
        if self.is_number:
            found = _NUMBER.findall(said)
            last = next(filter(None, found[-1])) if found else ""
            return _number(last) == _number(self.answers[0])
        return any(self._plain(answer) in self._plain(said) for answer in self.answers)

    def _plain(self, text: str) -> str:
        text = text.strip().replace("\n", " ")
        return text.replace(" ", "") if self.is_formula else text.lower()


def _number(text: str) -> str:
    return _IGNORED.sub("", text.strip())


def read_questions(file: Path) -> list[Question]:
    """Raises CommandFailed for a line that is of neither kind."""
    try:
        lines = file.read_text().splitlines()
        return [_question(json.loads(line), file.parent) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandFailed(
            f"{file} holds no questions ({type(error).__name__}: {error}); each line is a JSON "
            'object: {"image_path", "question", "answers"} or {"question", "answer": "... #### 4"}'
        ) from None


def _question(line: dict[str, object], directory: Path) -> Question:
    text, answers = str(line["question"]), line.get("answers", line.get("answer"))
    if "image_path" in line:
        image = directory / str(line["image_path"])
        if not image.is_file():
            raise ValueError(f"there is no picture {image}")
        given = tuple(map(str, answers)) if isinstance(answers, list) else (str(answers),)
        return Question(text, given, image, is_formula=line.get("dataset_name") == "HME100k")
    _, mark, number = str(answers).rpartition("####")
    if not mark:
        raise ValueError(f"no #### stands ahead of a number in {answers!r}")
    return Question(text, (number,), is_number=True)


async def ask(
    target: Target, questions: Sequence[Question], concurrency: int, max_tokens: int
) -> list[str]:
    """What a server says to each.  Raises CommandFailed with its own sentence."""
    turns = asyncio.Semaphore(concurrency)
    done = 0
    key = next(iter(keys_of_environment()), "")
    async with target.up() as url, connected(url.rstrip("/").removesuffix("/v1"), key) as client:

        async def one(question: Question) -> str:
            nonlocal done
            async with turns:
                body = {"messages": question.messages, "temperature": 0, "max_tokens": max_tokens}
                reply = await client.complete(body)
            done += 1
            if done % PROGRESS_EVERY == 0 or done == len(questions):
                print(f"{target.name}: {done}/{len(questions)}", file=sys.stderr, flush=True)
            return str(reply["choices"][0]["message"]["content"] or "")

        return await asyncio.gather(*map(one, questions))


def mcnemar(only_first: int, only_second: int) -> float:
    """The chance of so unequal numbers, or more so, where both sides are equally good."""
    total, least = only_first + only_second, min(only_first, only_second)
    ways = sum(math.comb(total, k) for k in range(least + 1))
    return min(1.0, float(Fraction(2 * ways, 2**total)))


def report_of(
    names: Sequence[str], questions: Sequence[Question], said: Sequence[Sequence[str]]
) -> JsonObject:
    right = [[q.is_right(text) for q, text in zip(questions, row, strict=True)] for row in said]
    pairs: list[JsonObject] = []
    for other in range(1, len(names)):
        both = list(zip(right[0], right[other], strict=True))
        only = both.count((True, False)), both.count((False, True))
        texts = zip(said[0], said[other], strict=True)
        pairs.append({
            "servers": [names[0], names[other]], "texts_differ": sum(a != b for a, b in texts),
            "only_first": only[0], "only_second": only[1], "p": mcnemar(*only),
        })  # fmt: skip
    servers = [
        {"name": name, "right": sum(row), "accuracy": sum(row) / len(row)}
        for name, row in zip(names, right, strict=True)
    ]
    return {"questions": len(questions), "servers": servers, "pairs": pairs}


def table(report: JsonObject) -> str:
    servers, pairs = report["servers"], report["pairs"]
    assert isinstance(servers, list)
    assert isinstance(pairs, list)
    lines = [
        f"{one['name']:24} {one['right']:5} of {report['questions']} right, {one['accuracy']:.1%}"
        for one in servers
    ]
    lines += [
        f"{' and '.join(one['servers'])}: {one['texts_differ']} texts differ; only the first is "
        f"right {one['only_first']} times, only the second {one['only_second']}; "
        f"McNemar's p = {one['p']:.3g}"
        for one in pairs
    ]
    return "\n".join(lines)


def run(
    targets: Sequence[Target], file: Path, concurrency: int, max_tokens: int, *, as_json: bool
) -> int:
    """Exit status 1 if a pair differs with a p below 0.05."""
    questions = read_questions(file)
    if not questions:
        raise CommandFailed(f"{file} is empty; a line is a question")
    said = [asyncio.run(ask(one, questions, concurrency, max_tokens)) for one in targets]
    report = report_of([one.name for one in targets], questions, said)
    print(json.dumps(report) if as_json else table(report))
    pairs = report["pairs"]
    assert isinstance(pairs, list)
    return FAILED if any(one["p"] < 0.05 for one in pairs) else OK
