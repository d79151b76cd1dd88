"""Adapters that clients load and unload: vLLM's verbs, and what comes that should not."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from epd.api import adapters
from epd.api.server import ApiServer
from epd.config import AccessConfig, EngineConfig, LoraConfig
from epd.frontend import Adapter, Refused
from tests.api.fakes import FakeFrontend, serving
from tests.api.wire import HI, exchange, refused, request
from tests.model_files.test_lora import write

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class FakeDesk:
    """Does as it is told."""

    def __init__(self) -> None:
        self.offered: dict[str, Adapter] = {}
        self.paths: list[str] = []
        self.refusal: Refused | None = None

    def begin(self, held: dict[str, Adapter]) -> None:
        self.offered |= held

    async def load(self, adapter: Adapter, path: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.offered[adapter.name] = adapter
        self.paths.append(path)

    async def unload(self, name: str) -> None:
        if self.offered.pop(name, None) is None:
            raise Refused(404, f"no adapter {name} is loaded")


@asynccontextmanager
async def desk(tmp_path: Path, **other: Any) -> AsyncIterator[tuple[ApiServer, FakeDesk]]:
    root = tmp_path / "adapters"
    root.mkdir(exist_ok=True)
    write(root / "pirate")
    frontend = FakeFrontend()
    frontend.adapters = made = FakeDesk()
    engine = EngineConfig(
        lora=LoraConfig(enabled=True, max_lora_rank=2, runtime_dir=str(root.resolve()))
    )
    async with serving(frontend, engine=engine, **other) as (server, _, _):
        yield server, made


async def post(server: ApiServer, path: str, **body: Any) -> tuple[int, str]:
    status, _, told = await exchange(server, request(body, path=path))
    return status, told.decode()


async def test_an_adapter_comes_and_goes(tmp_path: Path) -> None:
    """As with vLLM, word for word."""
    async with desk(tmp_path) as (server, at):
        body = {"lora_name": "pirate", "lora_path": "pirate"}
        done = await post(server, LOAD, **body, load_inplace=False)
        assert done == (200, "Success: LoRA adapter 'pirate' added successfully.")
        assert at.paths == ["pirate"] and len(at.offered["pirate"].digest) == 32
        status, _, told = await exchange(server, request({**HI, "model": "pirate"}))
        assert (status, json.loads(told)["model"]) == (200, "pirate")
        listed = json.loads((await exchange(server, request(method="GET", path="/v1/models")))[2])
        assert [model["id"] for model in listed["data"]] == ["tiny", "pirate"]
        document = (await exchange(server, request(method="GET", path="/openapi.json")))[2]
        assert b'"pirate"' in document
        again = await refused(server, request(body, path=LOAD), 400)
        assert "pirate is taken" in again["message"] and again["param"] == "lora_name"
        done = await post(server, UNLOAD, lora_name="pirate")
        assert done == (200, "Success: LoRA adapter 'pirate' removed successfully.")
        await refused(server, request({**HI, "model": "pirate"}), 404)
        gone = await refused(server, request({"lora_name": "pirate"}, path=UNLOAD), 404)
        assert gone["type"] == "not_found_error"
        document = (await exchange(server, request(method="GET", path="/openapi.json")))[2]
        assert b'"pirate"' not in document


async def test_a_path_in_full_is_one_below_the_directory(tmp_path: Path) -> None:
    """Each instance has a directory of its own: it is sent what is below."""
    async with desk(tmp_path) as (server, at):
        path = str(tmp_path / "adapters" / "pirate")
        assert (await post(server, LOAD, lora_name="org/a:v1", lora_path=path))[0] == 200
        assert at.paths == ["pirate"]


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
async def test_where_no_directory_is_set_there_is_no_such_path(path: str) -> None:
    async with serving() as (server, _, _):
        error = await refused(server, request({"lora_name": "a"}, path=path), 404)
        assert "it takes --lora-runtime-dir" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "lora_name"),
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": "", "lora_path": "pirate"}, "lora_name"),
        ({"lora_name": "a\nb", "lora_path": "pirate"}, "lora_name"),
        ({"lora_name": "a\n", "lora_path": "pirate"}, "lora_name"),
        ({"lora_name": "a" * 201, "lora_path": "pirate"}, "lora_name"),
        ({"lora_name": ["a"], "lora_path": "pirate"}, "lora_name"),
        ({"lora_name": "tiny", "lora_path": "pirate"}, "lora_name"),
        ({"lora_name": "a", "lora_path": 7}, "lora_path"),
        ({"lora_name": "a", "lora_path": ""}, "lora_path"),
        ({"lora_name": "a", "lora_path": "x" * 1001}, "lora_path"),
        ({"lora_name": "a", "lora_path": "x" * 900}, "lora_path"),
        ({"lora_name": "a", "lora_path": "nowhere"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "."}, "lora_path"),
        ({"lora_name": "a", "lora_path": ".."}, "lora_path"),
        ({"lora_name": "a", "lora_path": "../outside"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "/etc"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "link"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "circle"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "a\0b"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "\ud800"}, None),
        ({"lora_name": "a", "lora_path": "pirate/adapter_config.json"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "empty"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "large"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "pirate", "load_inplace": True}, "load_inplace"),
        ({"lora_name": "a", "lora_path": "pirate", "other": 1}, "other"),
    ],
)
async def test_what_is_refused(body: dict[str, Any], param: str | None, tmp_path: Path) -> None:
    """By a sentence that has no path of this host."""
    write(tmp_path / "outside")
    async with desk(tmp_path) as (server, at):
        root = tmp_path / "adapters"
        (root / "empty").mkdir()
        (root / "link").symlink_to(tmp_path / "outside")
        (root / "circle").symlink_to(root / "circle")
        shapes = {"m.lora_A.weight": (3, 4), "m.lora_B.weight": (4, 3)}
        write(root / "large", shapes, r=3)
        error = await refused(server, request(body, path=LOAD), 400)
        assert error["param"] == param and str(tmp_path) not in error["message"]
        assert at.paths == []


async def test_what_instances_refuse_is_the_answer(tmp_path: Path) -> None:
    async with desk(tmp_path) as (server, at):
        body = {"lora_name": "a", "lora_path": "pirate"}
        for status in (400, 503):
            at.refusal = Refused(status, "d0 has other files")
            error = await refused(server, request(body, path=LOAD), status)
            assert error["message"] == "d0 has other files"


async def test_who_may_ask(tmp_path: Path) -> None:
    """A key, where there are some; and no stranger, where there is none."""
    body = {"lora_name": "a", "lora_path": "pirate"}
    async with desk(tmp_path, access=AccessConfig(api_keys=("key",))) as (server, _):
        await refused(server, request(body, path=LOAD), 401)
        await refused(server, request({"lora_name": "a"}, path=UNLOAD), 401)
        raw = request(body, path=LOAD, authorization="Bearer key")
        assert (await exchange(server, raw))[0] == 200
    async with desk(tmp_path, host="0.0.0.0") as (server, at):
        error = await refused(server, request(body, path=LOAD), 403)
        assert "API key" in error["message"]
        await refused(server, request({"lora_name": "a"}, path=UNLOAD), 403)
        assert at.paths == []


async def test_one_is_read_at_a_time_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that does not answer holds one thread, and no request."""
    goes_on, began = threading.Event(), threading.Event()
    read = adapters.read_below

    def slow(*facts: Any) -> Any:
        began.set()
        goes_on.wait()
        return read(*facts)

    monkeypatch.setattr(adapters, "read_below", slow)
    monkeypatch.setattr(adapters, "READ_TIMEOUT_S", 0.2)
    raw = request({"lora_name": "a", "lora_path": "pirate"}, path=LOAD)
    async with desk(tmp_path) as (server, at):
        first = asyncio.create_task(refused(server, raw, 504))
        await asyncio.to_thread(began.wait)
        assert "another adapter" in (await refused(server, raw, 429))["message"]
        assert "was not read within" in (await first)["message"]
        await refused(server, raw, 429)
        goes_on.set()
        async with asyncio.timeout(10):
            while (await exchange(server, raw))[0] != 200:
                await asyncio.sleep(0.01)
        assert at.paths == ["pirate"]


async def test_their_parameters_are_known_where_others_are_left_out(tmp_path: Path) -> None:
    async with desk(tmp_path, unknown_parameters="warn") as (server, at):
        body = {"lora_name": "a", "lora_path": "pirate", "other": 1}
        assert (await post(server, LOAD, **body))[0] == 200
        assert (await post(server, UNLOAD, lora_name="a", lora_int_id=None))[0] == 200
        assert at.offered == {}
