"""Right answers to published questions: of one server, or of several to the same ones.

Two kinds of questions are read, each scored by its published rule.

- OCRBench, {"image_path", "question", "answers"}: right if an answer is in the reply, whatever the
  case and line ends.  Of HME100k in its case, and without blanks (the scripts of Yuliang-Liu's
  MultimodalOCR).
- GSM8K, {"question", "answer"}: right if the last number of the reply is that behind the answer's
  last ####, both without commas, $ and a last dot.  This is flexible-extract of gsm8k.yaml,
  version 3, of lm-evaluation-harness, with its prompt and its stops, and no example ahead.

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
from epd_lab.bench.machine import describe
from epd_lab.bench.servers.serve import Target

_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")  # one after the other
GSM8K_PROMPT = "Question: {}\nAnswer:"
GSM8K_STOP = ("Question:", "</s>", "<|im_end|>")
PROGRESS_EVERY = 20  # answers


@dataclass(frozen=True, slots=True)
class BenchQuestion:
    text: str
    answers: tuple[str, ...]
    image: Path | None = None  # of GSM8K there is none
    is_formula: bool = False  # of HME100k: blanks mean nothing

    @property
    def body(self) -> JsonObject:
        if self.image is None:
            text = GSM8K_PROMPT.format(self.text)
            return {"messages": [{"role": "user", "content": text}], "stop": GSM8K_STOP}
        kind = mimetypes.guess_type(self.image.name)[0] or "image/png"
        url = f"data:{kind};base64," + base64.b64encode(self.image.read_bytes()).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        content = [*parts, {"type": "text", "text": self.text}]
        return {"messages": [{"role": "user", "content": content}]}

    def is_right(self, said: str) -> bool:
        if self.image is None:
            found = _NUMBER.findall(said)
            return bool(found) and _number(found[-1]) == _number(self.answers[0])
        return any(self._plain(answer) in self._plain(said) for answer in self.answers)

    def _plain(self, text: str) -> str:
        text = text.strip().replace("\n", " ")
        return text.replace(" ", "") if self.is_formula else text.lower()


def _number(text: str) -> str:
    for ignored in _IGNORED:
        text = re.sub(ignored, "", text)
    return text


def read_questions(file: Path) -> list[BenchQuestion]:
    """Of JSON lines or one JSON array.  Raises CommandFailed for what is of neither kind."""
    found: list[BenchQuestion] = []
    try:
        text = file.read_text(encoding="utf-8").strip()
        # A string in JSON may have any other end of a line.
        lines = filter(str.strip, text.split("\n"))
        items = json.loads(text) if text.startswith("[") else map(json.loads, lines)
        found.extend(_question(item, file.parent) for item in items)
    except OSError as error:
        raise CommandFailed(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandFailed(
            f"question {len(found) + 1} of {file} is none ({type(error).__name__}: {error}); write "
            '{"image_path", "question", "answers"} or {"question", "answer": "... #### 4"}'
        ) from None
    if not found:
        raise CommandFailed(f"{file} is empty; a line is a question")
    return found


def _question(item: JsonObject, directory: Path) -> BenchQuestion:
    text = str(item["question"])
    if "image_path" not in item:
        answer = str(item["answer"])
        if "#### " not in answer:
            raise ValueError(f"no '#### ' stands ahead of a number in {answer!r}")
        return BenchQuestion(text, (answer,))
    image, answers = directory / str(item["image_path"]), item["answers"]
    if not image.is_file():
        raise ValueError(f"there is no picture {image}")
    given = tuple(map(str, answers)) if isinstance(answers, list) else (str(answers),)
    return BenchQuestion(text, given, image, is_formula=item.get("dataset_name") == "HME100k")


async def ask(
    target: Target, questions: Sequence[BenchQuestion], concurrency: int, max_tokens: int
) -> list[str]:
    """A server's answer to each.  Raises CommandFailed with the server's own sentence."""
    turns = asyncio.Semaphore(concurrency)
    done = 0
    key = next(iter(keys_of_environment()), "")
    async with target.up() as url, connected(url.rstrip("/").removesuffix("/v1"), key) as client:

        async def one(question: BenchQuestion) -> str:
            nonlocal done
            async with turns:
                fixed = {"temperature": 0, "max_tokens": max_tokens}
                reply = await client.complete(question.body | fixed)
            done += 1
            if done % PROGRESS_EVERY == 0 or done == len(questions):
                print(f"{target.name}: {done}/{len(questions)}", file=sys.stderr, flush=True)
            try:
                return str(reply["choices"][0]["message"]["content"] or "")
            except (LookupError, TypeError):
                raise CommandFailed(f"{url} sent no chat completion: {reply}") from None

        return await asyncio.gather(*map(one, questions))


def mcnemar(only_first: int, only_second: int) -> float:
    """The chance of so unequal numbers, or more so, where both sides are equally good."""
    total, least = only_first + only_second, min(only_first, only_second)
    ways = sum(math.comb(total, k) for k in range(least + 1))
    return min(1.0, float(Fraction(2 * ways, 2**total)))


def report_of(
    names: Sequence[str], questions: Sequence[BenchQuestion], said: Sequence[Sequence[str]]
) -> JsonObject:
    right = [[q.is_right(text) for q, text in zip(questions, row, strict=True)] for row in said]
    pairs: list[JsonObject] = []
    for other in range(1, len(names)):
        both = list(zip(right[0], right[other], strict=True))
        only = both.count((True, False)), both.count((False, True))
        texts = enumerate(zip(said[0], said[other], strict=True), 1)
        pairs.append({
            "servers": [names[0], names[other]], "differ": [n for n, (a, b) in texts if a != b],
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
        f"{' and '.join(one['servers'])}: {_counted(one['differ'])} differ; only the first is "
        f"right {one['only_first']} times, only the second {one['only_second']}; "
        f"McNemar's p = {one['p']:.3g}"
        for one in pairs
    ]
    return "\n".join(lines)


def _counted(questions: Sequence[int]) -> str:
    """Their number, and the first of them."""
    some = ", ".join(map(str, questions[:5])) + (", …" if questions[5:] else "")
    return f"{len(questions)} texts" + (f" (of questions {some})" if questions else "")


def run(
    targets: Sequence[Target], file: Path, concurrency: int, max_tokens: int, *, as_json: bool
) -> int:
    """Exit status 1 if a pair differs with a p below 0.05."""
    questions, machine = read_questions(file), describe()
    for one in targets:
        if one.url:  # a wrong one is known before the first has answered
            asyncio.run(ask(one, (), 1, 1))
    said = [asyncio.run(ask(one, questions, concurrency, max_tokens)) for one in targets]
    report = {"machine": machine} | report_of([one.name for one in targets], questions, said)
    print(json.dumps(report) if as_json else table(report))
    pairs = report["pairs"]
    assert isinstance(pairs, list)
    return FAILED if any(one["p"] < 0.05 for one in pairs) else OK
