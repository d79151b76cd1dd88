"""Images by http(s) URL, where the operator allows the network they are in (fault F46)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from epd.tiny import SAMPLES
from tests.e2e.client import post_all, question
from tests.e2e.server import Server
from tests.e2e.shared import FETCH_TIMEOUT_S, MAX_IMAGE_NBYTES

pytestmark = pytest.mark.timeout(300)

IMAGE = (SAMPLES / "receipt-cafe.png").read_bytes()


class Images(BaseHTTPRequestHandler):
    """An image, and ways not to give one."""

    def do_GET(self) -> None:
        if self.path == "/image.png":
            self.give(200, IMAGE)
        elif self.path == "/moved":
            self.give(302, b"", Location="/image.png")
        elif self.path == "/to-file":
            self.give(302, b"", Location="file:///etc/passwd")
        elif self.path == "/loop":
            self.give(302, b"", Location="/loop")
        elif self.path == "/large":
            self.give(200, bytes(2 * MAX_IMAGE_NBYTES))
        elif self.path == "/slow":
            time.sleep(2 * FETCH_TIMEOUT_S)
            self.give(200, IMAGE)
        else:
            self.give(404, b"no")

    def give(self, status: int, body: bytes, **headers: str) -> None:
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # the gateway had enough
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def images() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Images) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_images_by_url(together: Server, images: str) -> None:
    """All in one moment: what can be fetched is read, everything else fails alone with 400."""
    wanted = {
        "/image.png": "",
        "/moved": "",
        "/to-file": "file:///etc/passwd",
        "/loop": "redirects more than",
        "/large": str(MAX_IMAGE_NBYTES),
        "/slow": f"within {FETCH_TIMEOUT_S:g} s",
        "/missing": "404",
    }
    bodies = [question("What is the total?", images + path) for path in wanted]
    bodies.append(question("What is the total?", "http://127.0.0.1:9/refused.png"))
    replies = await post_all(together.base_url, bodies)
    for (path, words), reply in zip(wanted.items(), replies, strict=False):
        if words:
            assert reply.status == 400, path
            assert words in reply.error["message"]
            assert "image_url" in reply.error["param"]
        else:
            assert reply.text == "10.85", path
    assert replies[-1].status == 400
    assert "could not be fetched" in replies[-1].error["message"]
