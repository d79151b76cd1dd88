"""Two pages for people: what runs here (`/`), and what can be asked of it (`/docs`).

Both are whole in themselves: they load nothing from anywhere else, and may not.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from epd import __version__
from epd.api.asked import ModelFacts
from epd.api.port import Readiness

PAGES = Path(__file__).parent / "pages"
DRAWINGS = PAGES / "machines.svg"  # of every machine, one after another; `epd diagrams` writes them
CONTENT_TYPE = b"text/html; charset=utf-8"
_ALLOWED = (
    b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    b"connect-src 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = [(b"content-security-policy", _ALLOWED), (b"cache-control", b"no-store")]


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
    return re.sub("@([A-Z]+)@", lambda field: told[field[1]], _page("home.html")).encode()


def _page(name: str) -> str:
    style = (PAGES / "style.css").read_text(encoding="utf-8")
    return (PAGES / name).read_text(encoding="utf-8").replace("@STYLE@", style)
