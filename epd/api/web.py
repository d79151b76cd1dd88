"""Pages for people: what runs here (`/`), what can be asked of it (`/docs`), what it does (`/ui`).

Each is whole in itself: it loads nothing from anywhere else, and may not.  The third one runs only
the script that it came with, which its policy names by a checksum.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from epd import __version__
from epd.api.asked.asked import ModelFacts
from epd.api.watching.cluster_view import KeptAnswers
from epd.frontend import Readiness

if TYPE_CHECKING:
    from epd.api.http.exchange import Headers

PAGES = Path(__file__).parent / "pages"
DRAWINGS = PAGES / "machines.svg"  # of every machine, one after another; `epd diagrams` writes them
CONTENT_TYPE = b"text/html; charset=utf-8"
_SCRIPTS = (
    "vendor/htm-preact.js",
    "ui_model.js",
    "ui_diagram.js",
    "ui_views.js",
    "ui_cluster.js",
    "ui.js",
)
_ALLOWED = (
    b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    b"connect-src 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = [(b"content-security-policy", _ALLOWED), (b"cache-control", b"no-store")]


@cache
def cluster_page() -> tuple[bytes, Headers]:
    """It asks `/state` by itself.  With its headers."""
    parts = _parts()
    allowed = f"{_policy(parts)}; connect-src 'self'; frame-ancestors 'none'"
    page = _filled(_text("ui.html"), parts | {"POLICY": "", "KEPT": "null"})
    headers = [(b"content-security-policy", allowed.encode()), (b"cache-control", b"no-store")]
    return page.encode(), headers


def cluster_file(kept: KeptAnswers) -> str:
    """The same page as a file: it holds what it shows, and asks nobody."""
    parts = _parts()
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_policy(parts)}">'
    told = msgspec.json.encode(kept).decode().replace("<", "\\u003c")
    return _filled(_text("ui.html"), parts | {"POLICY": f"\n{policy}", "KEPT": told})


def _parts() -> dict[str, str]:
    return {
        "STYLE": _text("style.css") + _text("ui.css"),
        "SCRIPT": "\n".join(map(_text, _SCRIPTS)),
        "DRAWINGS": DRAWINGS.read_text(encoding="utf-8"),
    }


def _policy(parts: dict[str, str]) -> str:
    style, script = (
        base64.b64encode(hashlib.sha256(parts[name].encode()).digest()).decode()
        for name in ("STYLE", "SCRIPT")
    )
    return (
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; "
        "base-uri 'none'; form-action 'none'"
    )


def docs_page() -> bytes:
    """It reads `/openapi.json` by itself."""
    return _page("docs.html").encode()


def home_page(
    model: ModelFacts, readiness: Readiness, url: str, *, needs_key: bool = False
) -> bytes:
    """`url`: where the client found this server."""
    ready = '<span class="ready">Ready.</span>'
    if not readiness.ok:
        ready = f'<span class="not-ready">Not ready: {escape(readiness.reason)}.</span>'
    rows = [
        (one["instance"], ", ".join(one["roles"]), one["state"], str(one["assigned"]))
        for one in readiness.instances
    ]
    cells = [[f"<td>{escape(text)}</td>" for text in row] for row in rows]
    told = {
        "MODEL": escape(model.model_name),
        "VERSION": escape(__version__),
        "CONTEXT": f"{model.max_context:,}",
        "READY": ready,
        "URL": escape(url),
        "KEY": " -H 'Authorization: Bearer KEY'" if needs_key else "",
        "INSTANCES": "\n".join(f"<tr>{''.join(row)}</tr>" for row in cells),
    }
    return _filled(_page("home.html"), told).encode()


def _page(name: str) -> str:
    return _text(name).replace("@STYLE@", _text("style.css"))


def _filled(page: str, fields: dict[str, str]) -> str:
    return re.sub("@([A-Z]+)@", lambda field: fields[field[1]], page)


def _text(name: str) -> str:
    return (PAGES / name).read_text(encoding="utf-8")
