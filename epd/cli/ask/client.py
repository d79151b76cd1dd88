"""A small OpenAI client for the command line: one streamed answer at a time."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from epd.api.watching.cluster_view import ClusterView
from epd.cli.ask.question import AskSampling
from epd.cli.ask.tls import why_silent
from epd.cli.boundary import CommandFailed

if TYPE_CHECKING:
    import aiohttp

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 300.0  # between two pieces of an answer
LINE_NBYTES = 1 << 20  # of an event: a timeline may be long


@dataclass(slots=True)
class ClientAnswer:
    """What has come back so far; `timeline`: machine, state, ms since the request's head."""

    text: str = ""
    finish_reason: str = ""
    usage: dict[str, int] = field(default_factory=dict)
    timeline: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> str:
        found = asdict(self)
        return json.dumps({"answer": found.pop("text"), **found})


class Client:
    """One OpenAI server; `connected` makes it."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, api_key: str) -> None:
        self._session = session
        self._base_url = base_url
        self._headers = {"X-EPD-Timeline": "1"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.model = ""

    async def connect(self) -> None:
        """Ask what it serves.  Raises CommandFailed."""
        async with self._request("GET", "/v1/models") as response:
            try:
                self.model = json.loads(await response.read())["data"][0]["id"]
            except (ValueError, LookupError, TypeError):
                raise CommandFailed(f"{self._base_url} is no OpenAI server") from None

    async def ask(
        self,
        messages: Sequence[dict[str, Any]],
        sampling: AskSampling,
        told: Callable[[str], object] = len,
    ) -> ClientAnswer:
        """The whole answer; `told` gets each piece of its text as it comes.

        Raises CommandFailed with the server's own sentence.
        """
        body = {
            "model": self.model,
            "messages": list(messages),
            **sampling.fields(),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = ClientAnswer()
        async with self._request("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    return answer
                if line.startswith(b"data: "):
                    told(_add(answer, json.loads(line[6:])))
        raise CommandFailed("the server ended the answer before its end")

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a chat request in one piece.  Raises CommandFailed."""
        body = {"model": self.model, **body}
        async with self._request("POST", "/v1/chat/completions", json=body) as response:
            found: dict[str, Any] = json.loads(await response.read())
            return found

    async def state(self, query: Mapping[str, str]) -> ClusterView:
        """`GET /state`.  Raises CommandFailed."""
        async with self._request("GET", "/state", params=query) as response:
            return msgspec.json.decode(await response.read(), type=ClusterView)

    async def reload(self) -> str:
        """`POST /reload`.  Raises CommandFailed."""
        async with self._request("POST", "/reload") as response:
            return await response.text()

    async def drain(self, body: Mapping[str, object], path: str = "/drain") -> None:
        """`POST /drain`, or `/role`.  Raises CommandFailed."""
        async with self._request("POST", path, json=body):
            pass

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response of status 200.  Raises CommandFailed, also for what goes wrong inside."""
        import aiohttp

        url = self._base_url + path
        more["headers"] = self._headers
        try:
            async with self._session.request(method, url, **more) as response:
                if response.status != 200:
                    sentence = _sentence(await response.text(errors="replace"))
                    raise CommandFailed(f"the server answered {response.status}: {sentence}")
                yield response
        except TimeoutError:
            raise CommandFailed(f"{url} says nothing any more; is the server well?") from None
        except (aiohttp.ClientError, ConnectionResetError, ValueError) as error:  # not of stdout
            raise CommandFailed(await why_silent(url, error)) from None


@asynccontextmanager
async def connected(
    base_url: str, api_key: str = "", trusted: ssl.SSLContext | None = None
) -> AsyncIterator[Client]:
    """A server that answers; `trusted`: signers of its certificate.  Raises CommandFailed."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S
    )
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=trusted or True),
        timeout=timeout,
        read_bufsize=LINE_NBYTES,
    ) as session:
        client = Client(session, base_url, api_key)
        await client.connect()
        yield client


def _add(answer: ClientAnswer, event: dict[str, Any]) -> str:
    """Put an event into the answer; returns its piece of text.  Raises CommandFailed."""
    if "error" in event:
        raise CommandFailed(f"the answer broke off: {event['error'].get('message', '')}")
    answer.usage = event.get("usage") or answer.usage
    choice = (event.get("choices") or [{}])[0]
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    answer.timeline += choice.get("epd", event.get("epd", {})).get("timeline", [])
    piece = str(choice.get("delta", {}).get("content") or "")
    answer.text += piece
    return piece


def _sentence(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
