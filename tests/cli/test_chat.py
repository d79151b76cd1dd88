"""A conversation at the command line: what is sent, what is shown, and how an answer is stopped."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import shutil
import signal
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from epd.cli.ask.chat import Chat, Conversation, ReadLine
from epd.cli.ask.client import connected
from epd.cli.ask.question import AskSampling
from epd.cli.boundary import CommandFailed
from epd.errors import FAILED, OK
from epd.tiny import SAMPLES
from tests.cli.openai_fake import MODEL, FakeServer, ended, serving

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
IMAGE = SAMPLES / "label.png"
Captured = pytest.CaptureFixture[str]


def lines(*texts: str) -> ReadLine:
    """What a person types, line by line."""
    left = iter(texts)

    async def read(prompt: str) -> str | None:
        return next(left, None)

    return read


async def converse(server: FakeServer, *texts: str, system: str = "") -> int:
    async with connected(server.url) as client:
        return await Chat(client, Conversation(system), AskSampling(seed=7)).run(lines(*texts))


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def asked(text: str) -> dict[str, object]:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


async def test_each_question_comes_with_what_was_said(capsys: Captured) -> None:
    async with serving(["on", "e", *ended()], ["two", *ended()], ["three", *ended()]) as server:
        status = await converse(
            server, f"/image '{IMAGE}'", "What?", "", "And?", "/reset", "So?", system="Be brief."
        )
    first, second, third = (body["messages"] for body in server.asked)
    image, question = first[1]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert (first[0], question) == (said("system", "Be brief."), {"type": "text", "text": "What?"})
    assert second == [*first, said("assistant", "one"), asked("And?")]
    assert third == [said("system", "Be brief."), asked("So?")]
    assert {(b["model"], b["seed"], b["stream"]) for b in server.asked} == {(MODEL, 7, True)}
    shown = capsys.readouterr()
    assert (status, shown.out) == (OK, "one\ntwo\nthree\n")
    assert "image goes with" in shown.err and "forgotten" in shown.err


def test_an_attachment_is_used_up_or_forgotten(tmp_path: Path) -> None:
    conversation = Conversation()
    conversation.command(f"/image {IMAGE}")
    conversation.command("/video https://example.org/v.mp4")
    assert conversation.prompt == "(2 attached) > "
    kinds = [part["type"] for part in conversation.question("?")["content"]]
    assert kinds == ["image_url", "video_url", "text"]
    assert conversation.prompt == "> "
    conversation.command(f"/image {IMAGE}")
    conversation.command("/reset")
    assert len(conversation.question("?")["content"]) == 1
    copy = shutil.copy(IMAGE, tmp_path)
    conversation.command(f"/image {copy}")
    Path(copy).unlink()
    with pytest.raises(FileNotFoundError):
        conversation.question("?")
    assert len(conversation.question("?")["content"]) == 1


def test_what_is_attached_is_sent_as_it_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "data:image/png;base64,AA//BB=="
    conversation = Conversation()
    conversation.command(f"/image {url}")
    monkeypatch.setenv("HOME", str(IMAGE.parent))
    conversation.command(f"/image ~/{IMAGE.name}")
    first, second, _ = conversation.question("?")["content"]
    assert first["image_url"]["url"] == url
    assert second["image_url"]["url"].startswith("data:image/png;base64,iVBOR")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/imagine x", "unknown command /imagine; did you mean /image"),
        ("/image", "/image needs a file"),
        ("/image /no/such.png", "/no/such.png does not exist"),
    ],
)
def test_a_wrong_command_says_what_to_write(line: str, words: str) -> None:
    with pytest.raises(CommandFailed, match=words):
        Conversation().command(line)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([400], "the server answered 400: no such thing, try another"),
        (["half", {"error": {"message": "worse"}}], "the answer broke off: worse"),
        (["half"], "the server ended the answer before its end"),
    ],
)
async def test_a_question_that_failed_is_forgotten(
    steps: list[object], words: str, capsys: Captured
) -> None:
    async with serving(steps, ["fine", *ended()]) as server:
        status = await converse(server, "bad", "good")
    assert server.asked[1]["messages"] == [asked("good")]
    shown = capsys.readouterr()
    assert status == FAILED and shown.out.endswith("\nfine\n") and words in shown.err


async def test_a_cut_answer_says_so(capsys: Captured) -> None:
    async with serving(["half a", *ended("length")]) as server:
        assert await converse(server, "long?") == OK
    assert "(cut at 128 tokens: --max-tokens)" in capsys.readouterr().err


async def test_a_stopped_answer_stays_as_far_as_it_was_said(capsys: Captured) -> None:
    async with serving(["He", asyncio.Event()], ["again", *ended()]) as server:
        async with connected(server.url) as client:
            talk = Chat(client, Conversation(), AskSampling())
            assert not talk.stop_answer()
            running = asyncio.create_task(talk.run(lines("first", "second")))
            await until(lambda: len(server.asked) == 1 and "He" in capsys.readouterr().out)
            assert talk.stop_answer()
            assert await running == OK
        await asyncio.wait_for(server.left.wait(), PATIENCE_S)
    assert server.asked[1]["messages"] == [asked("first"), said("assistant", "He"), asked("second")]
    assert "(stopped)" in capsys.readouterr().err


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():
            await asyncio.sleep(0.01)


async def test_a_whole_program_that_ends_ends_the_answer_too() -> None:
    """Not the answer alone is stopped: what cancels the conversation goes through."""
    async with serving([asyncio.Event()]) as server, connected(server.url) as client:
        running = asyncio.create_task(
            Chat(client, Conversation(), AskSampling()).run(lines("first", "second"))
        )
        await until(lambda: server.asked)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.wait_for(server.left.wait(), PATIENCE_S)
    assert len(server.asked) == 1


# --- real processes -------------------------------------------------------------------------------


async def start(*arguments: str, **streams: int) -> asyncio.subprocess.Process:
    environment = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "epd", *arguments, cwd=ROOT, env=environment, **streams
    )


async def test_a_pipe_gets_answers_and_nothing_else() -> None:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    async with serving(["one", *ended()], ["two", *ended()]) as server:
        process = await start("chat", "--url", server.url, **pipes)
        out, errors = await asyncio.wait_for(
            process.communicate(f"/image {IMAGE}\nWhat?\nAnd?".encode()), PATIENCE_S
        )
    assert (process.returncode, out) == (OK, b"one\ntwo\n"), errors
    assert len(server.asked[1]["messages"]) == 3


async def test_ask_prints_as_it_comes() -> None:
    go = asyncio.Event()
    async with serving(["He", go, "llo", *ended()], ["Hello", *ended()]) as server:
        process = await start("ask", "hi", "--url", server.url, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readexactly(2), PATIENCE_S) == b"He"
        go.set()
        assert await asyncio.wait_for(process.stdout.read(), PATIENCE_S) == b"llo\n"
        assert await process.wait() == OK
        flags = ("hi", "--json", "--url", server.url)
        process = await start("ask", *flags, stdout=asyncio.subprocess.PIPE)
        out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    found = json.loads(out)
    assert (found["answer"], found["finish_reason"]) == ("Hello", "stop")
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 2}
    assert found["timeline"] == []


class Terminal:
    """The other side of a terminal in which a program runs."""

    def __init__(self) -> None:
        self.own, self.its = pty.openpty()
        termios.tcsetwinsize(self.its, (24, 80))
        self.shown = ""
        os.set_blocking(self.own, False)
        asyncio.get_running_loop().add_reader(self.own, self._read)

    def _read(self) -> None:
        try:
            self.shown += os.read(self.own, 65536).decode(errors="replace")
        except OSError:  # the program has gone
            asyncio.get_running_loop().remove_reader(self.own)

    def type(self, text: str) -> None:
        os.write(self.own, text.encode())

    async def shows(self, words: str) -> None:
        """Wait for words, and forget all up to them."""
        try:
            await until(lambda: words in self.shown)
        except TimeoutError:
            raise AssertionError(f"{words!r} is not in {self.shown!r}") from None
        self.shown = self.shown.partition(words)[2]

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.own)
        os.close(self.own)
        os.close(self.its)


async def test_at_a_terminal() -> None:
    """Ctrl-C drops a line or stops an answer, never the program; Ctrl-D ends it."""
    terminal, process = Terminal(), None
    try:
        async with serving(["He", asyncio.Event()], ["again", *ended()]) as server:
            process = await start(
                "chat", "--url", server.url,
                stdin=terminal.its, stdout=terminal.its, stderr=terminal.its,
            )  # fmt: skip
            await terminal.shows(f"{MODEL} listens")
            await terminal.shows(">")
            terminal.type("half a li\x03")
            terminal.type("first\r")
            await terminal.shows("He")
            process.send_signal(signal.SIGINT)  # what the terminal makes of Ctrl-C
            await terminal.shows("(stopped)")
            await terminal.shows(">")
            terminal.type("second\r")
            await terminal.shows("again")
            await terminal.shows(">")
            terminal.type("\x04")
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == OK
        assert server.asked[0]["messages"] == [asked("first")]
        assert server.asked[1]["messages"][1] == said("assistant", "He")
    finally:
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
        terminal.close()
