"""The server that a command talks to, and the key that it is asked with."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from epd.cli.ask.client import connected
from epd.cli.ask.question import AskSampling, user_message
from epd.cli.ask.temporary import Running, server_of
from epd.cli.configure.options import settings_of
from epd.cli.parser import Parser
from epd.cli.start.ports import any_free, settle_port
from epd.cli.verbs import ask, chat, demo
from epd.config import ConfigError, Settings
from tests.cli.openai_fake import ended, serving

URL = "http://127.0.0.1:8000"


def server_for(verb: str, *flags: str) -> Running:
    module, first = (ask, ["What?"]) if verb == "ask" else (chat, [])
    parser = Parser(f"epd {verb}", module.DESCRIPTION, module.EXAMPLES)
    module.add_arguments(parser)
    server = server_of(parser.parse([*first, "--url", f"{URL}/v1/", *flags]))
    assert isinstance(server, Running)
    return server


@pytest.mark.parametrize("verb", ["ask", "chat"])
def test_the_key_is_a_flag_a_setting_or_of_the_environment(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EPD_API_KEY", raising=False)
    assert server_for(verb) == (URL, "", None)
    monkeypatch.setenv("EPD_API_KEY", ",one,two")
    assert server_for(verb)[:2] == (URL, "one")
    file = tmp_path / "epd.toml"
    file.write_text('[access]\napi_keys = ["three", "four"]\n')
    assert server_for(verb, "--config", str(file))[:2] == (URL, "three")
    assert server_for(verb, "--config", str(file), "--api-key", "five")[:2] == (URL, "five")


def planned(*flags: str) -> int:
    """The port of the temporary server that `epd demo`, like the others, would start."""
    parser = Parser("epd demo", demo.DESCRIPTION, demo.EXAMPLES)
    demo.add_arguments(parser)
    args = parser.parse(list(flags))
    return settle_port(settings_of(args), wanted=args.port).port


def test_a_temporary_server_has_a_port_of_its_own_unless_one_is_asked_for() -> None:
    default = Settings().port
    chosen = {planned() for _ in range(8)}
    assert len(chosen) > 1 and default not in chosen
    free = str(any_free("127.0.0.1"))
    assert {planned("--port", free), planned("--set", f"port={free}")} == {int(free)}
    assert planned("--port", "0") not in (0, default)


def test_what_a_temporary_server_cannot_have_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for flags in (("--port", port), ("--set", f"port={port}")):
            with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
                planned(*flags)
    with pytest.raises(ConfigError, match="no address of this host"):
        planned("--host", "203.0.113.7")


@pytest.mark.parametrize(("key", "sent"), [("secret", "Bearer secret"), ("", "")])
async def test_every_request_brings_the_key(key: str, sent: str) -> None:
    async with serving(["fine", *ended()]) as server, connected(server.url, key) as client:
        assert (await client.ask([user_message("?")], AskSampling())).text == "fine"
    assert server.keys == [sent, sent]
