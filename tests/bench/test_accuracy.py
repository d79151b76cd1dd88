"""`epd bench accuracy`: published rules, pairs, and painted pictures over several topologies."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from epd.cli.boundary import CommandFailed
from epd.cli.main import main
from epd_lab.bench.accuracy import Question, ask, mcnemar, read_questions, report_of, table
from epd_lab.bench.serve import Target
from training.ocrbench import write


@pytest.mark.parametrize(
    ("question", "said", "is_right"),
    [
        (Question("?", ("is total 4.20",)), "It is\nTOTAL 4.20.", True),
        (Question("?", ("total 4.21", "4.22")), "It is\nTOTAL 4.20.", False),
        (Question("?", ("x ^ 2",), is_formula=True), "$x^2$", True),
        (Question("?", ("X",), is_formula=True), "x", False),
        (Question("?", (" 1,234",), is_number=True), "3 + ... = $1234.", True),
        (Question("?", ("7",), is_number=True), "#### 7\nI am sure of 8", False),
        (Question("?", ("7",), is_number=True), "none", False),
        (Question("?", ("-5",), is_number=True), "so -5", True),
    ],
)
def test_answers_are_scored_as_published(question: Question, said: str, is_right: bool) -> None:
    assert question.is_right(said) == is_right


def test_p_is_that_of_the_exact_binomial() -> None:
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1.0
    assert mcnemar(5, 0) == mcnemar(0, 5) == 2 / 32
    assert math.isclose(mcnemar(1, 9), 2 * 11 / 1024)
    assert mcnemar(3000, 2000) < 1e-9


async def test_servers_are_asked_the_same_and_compared(tmp_path: Path) -> None:
    file = write(tmp_path, 5)
    questions = read_questions(file)
    asked: list[str] = []

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def chat(request: web.Request) -> web.Response:
        text = (await request.json())["messages"][0]["content"][1]["text"]
        asked.append(text)
        answer = next(q.answers[0] for q in questions if q.text == text)
        return web.json_response({"choices": [{"message": {"content": answer}}]})

    app = web.Application(client_max_size=1 << 24)
    app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", chat)])
    async with TestServer(app) as server:
        said = await ask(Target("a", url=str(server.make_url("/v1"))), questions, 2, 8)
    assert sorted(asked) == sorted(question.text for question in questions)
    worse = ["?", *said[1:]]
    report = report_of(["a", "b"], questions, [said, worse])
    right = sum(q.is_right(text) for q, text in zip(questions, said, strict=True))
    assert report["pairs"] == [
        {"servers": ["a", "b"], "texts_differ": 1, "only_first": 1, "only_second": 0, "p": 1.0}
    ]
    assert f"{right} of 5 right" in table(report) and "McNemar's p = 1" in table(report)


@pytest.mark.parametrize("line", ["{]", "[]", '{"question": "?", "answer": "4"}', '{"answer": 1}'])
def test_lines_of_neither_kind_are_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(line)
    with pytest.raises(CommandFailed, match="holds no questions"):
        read_questions(file)


@pytest.mark.long
def test_topologies_give_the_same_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, 200)
    servers = ("1epd", "1e1p1d", "1e1p1d:tp2")
    assert main(["bench", "accuracy", str(file), *servers, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [pair["texts_differ"] for pair in report["pairs"]] == [0, 0]
    assert all(one["accuracy"] > 0.5 for one in report["servers"])
