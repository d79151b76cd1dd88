"""`epd bench accuracy`: published rules, pairs, and painted pictures over several topologies."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from epd.cli.boundary import CommandFailed
from epd.cli.main import main
from epd_lab.bench.servers.accuracy import (
    BenchQuestion,
    ask,
    mcnemar,
    read_questions,
    report_of,
    table,
)
from epd_lab.bench.servers.serve import Target
from tests.e2e.client import Body
from training.ocrbench import write


@pytest.mark.parametrize(
    ("answers", "said", "is_right"),
    [
        (["is total 4.20"], "It is\nTOTAL 4.20.", True),  # neither case nor the end of a line
        (["Is\nTotal"], " is total ", True),
        (["total 4.21", "4.22"], "It is total 4.20.", False),
        ("4.20", "4.20", True),  # a single answer need be no list
        (["4. 20"], "4.20", False),  # a blank is one
        (["Ünal"], "ÜNAL", True),
    ],
)
def test_ocrbench_is_scored_by_its_script(answers: object, said: str, is_right: bool) -> None:
    assert _read({"image_path": __file__, "answers": answers}).is_right(said) == is_right


@pytest.mark.parametrize(
    ("said", "is_right"),
    [
        (r"\frac { X }{ 2 }", True),
        ("it is \\frac{X}\n{2}", True),  # neither blanks nor ends of lines
        (r"\frac{x}{2}", False),  # but case
    ],
)
def test_hme100k_has_a_rule_of_its_own(said: str, is_right: bool) -> None:
    line = {"image_path": __file__, "answers": [r" \frac {X} {2}"], "dataset_name": "HME100k"}
    assert _read(line).is_right(said) == is_right


@pytest.mark.parametrize(
    ("answer", "said", "is_right"),
    [
        ("12 * 2 = $24\n#### 24", "The final answer is 24", True),
        ("#### 24", "The final answer is $24.", True),
        ("#### 24", "**24**", True),
        ("#### 1,234", "3 + ... = $1234.", True),
        ("#### $1234", "it is 1,234", True),
        ("#### 24", "#### 24", True),
        ("#### 24", "#### 24\nI am sure of 8", False),  # the last number counts
        ("#### 24", "24.00", False),  # compared as text
        ("#### 24", "24.,", True),  # commas go ahead of a last dot
        ("#### 24", "so 24 ...", False),  # dots alone are the last "number"
        ("#### 24", "twenty-four", False),
        ("#### 5", "5 - 10 = -5", False),
        ("#### -5", "5 - 10 = -5", True),
        ("#### 5", "x-5", False),
        ("#### 0.5", ".5", False),
        ("#### 1 #### 2", "2", True),  # behind the last mark
        ("#### ", "none", False),
    ],
)
def test_gsm8k_is_scored_as_flexible_extract_does(answer: str, said: str, is_right: bool) -> None:
    assert _read({"answer": answer}).is_right(said) == is_right


def _read(item: dict[str, object]) -> BenchQuestion:
    with tempfile.NamedTemporaryFile("w+") as file:
        file.write(json.dumps({"question": "?"} | item))
        file.flush()
        (question,) = read_questions(Path(file.name))
    return question


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [  # scipy 1.17's binomtest(only_first, only_first + only_second).pvalue
        (0, 0, 1.0),
        (4, 3, 1.0),
        (5, 0, 0.0625),
        (1, 9, 0.021484375),
        (9, 1, 0.021484375),
        (10, 12, 0.8318119049072266),
        (25, 9, 0.00904118549078703),
        (40, 70, 0.005447429511444476),
    ],
)
def test_p_is_that_of_the_exact_binomial(only_first: int, only_second: int, p: float) -> None:
    assert math.isclose(mcnemar(only_first, only_second), p)


async def test_servers_are_asked_the_same_and_compared(tmp_path: Path) -> None:
    file = write(tmp_path, 5)
    lines = [*file.read_text().splitlines(), '{"question": "How many\u2028?", "answer": "#### 4"}']
    file.write_text("[" + ",\n".join(lines) + "]")  # as OCRBench.json is
    questions = read_questions(file)
    file.write_text("\n".join(lines))
    assert read_questions(file) == questions
    asked: list[str] = []

    def answer(body: Body) -> object:
        content = body["messages"][0]["content"]
        assert body["temperature"] == 0 and body["max_tokens"] == 8
        if isinstance(content, list):
            asked.append(content[1]["text"])
        else:
            assert content == "Question: How many\u2028?\nAnswer:" and "Question:" in body["stop"]
            asked.append(content[10:-8])
        text = next(q.answers[0] for q in questions if q.text == asked[-1])
        return {"choices": [{"message": {"content": text}}]}

    said = await _said(questions, answer)
    assert sorted(asked) == sorted(question.text for question in questions)
    worse = ["?", *said[1:]]
    report = report_of(["a", "b"], questions, [said, worse])
    right = sum(q.is_right(text) for q, text in zip(questions, said, strict=True))
    assert report["pairs"] == [
        {"servers": ["a", "b"], "differ": [1], "only_first": 1, "only_second": 0, "p": 1.0}
    ]
    assert f"{right} of 6 right" in table(report) and "McNemar's p = 1" in table(report)
    assert "a and b: 1 texts (of questions 1) differ" in table(report)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"question": "?", "answer": "#### 4"}\n\n{]', r"question 2 of .* is none \(JSONDecode"),
        ("3", "question 1 of .* is none"),
        ('[{"question": "?", "answer": "4"}]', "no '#### ' stands ahead"),
        ('{"answer": "#### 4"}', "KeyError: 'question'"),
        ('{"question": "?", "image_path": "x.png", "answers": ["4"]}', "no picture .*x.png"),
        ('{"question": "?", "image_path": "questions.jsonl"}', "KeyError: 'answers'"),
        (" \n", "is empty"),
        ("[]", "is empty"),
    ],
)
def test_lines_of_neither_kind_are_refused(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(text)
    with pytest.raises(CommandFailed, match=sentence):
        read_questions(file)
    with pytest.raises(CommandFailed, match="cannot be read"):
        read_questions(tmp_path)


@pytest.mark.parametrize("reply", [{"choices": []}, ["?"], "?"])
async def test_a_server_with_other_replies_is_named(reply: object) -> None:
    with pytest.raises(CommandFailed, match=r"http://127.0.0.1\S* (sent no chat|does not answer)"):
        await _said([BenchQuestion("?", ("#### 4",))], lambda body: reply)


async def _said(questions: list[BenchQuestion], answer: Callable[[Body], object]) -> list[str]:
    """By a server that answers in this way."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def chat(request: web.Request) -> web.Response:
        return web.json_response(answer(await request.json()))

    app = web.Application(client_max_size=1 << 24)
    app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", chat)])
    async with TestServer(app) as server:
        return await ask(Target("a", url=str(server.make_url("/v1"))), questions, 2, 8)


@pytest.mark.long
def test_topologies_give_the_same_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, 200)
    servers = ("1epd", "1e1p1d", "1e1p1d:tp2")
    assert main(["bench", "accuracy", str(file), *servers, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [pair["differ"] for pair in report["pairs"]] == [[], []]
    assert all(one["accuracy"] > 0.5 for one in report["servers"])
