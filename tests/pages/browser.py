"""Debian's chromium, driven by Playwright, which downloads none of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.patience import PATIENCE_S

WIDE = (1280, 860)


@contextmanager
def browsing() -> Iterator[Browser]:
    """Skips where there is no chromium.  While it is open no test of this process may be async."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium here; apt-get install chromium")
    expect.set_options(timeout=PATIENCE_S * 1e3)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@contextmanager
def window(browser: Browser, size: tuple[int, int] = WIDE) -> Iterator[Page]:
    """A page; what it complains of fails the test."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    page.set_default_timeout(PATIENCE_S * 1e3)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
    yield page
    page.close()
    assert not complaints


def picture(page: Page, name: str) -> None:
    """Kept where EPD_PICTURES says, for people to look at."""
    if folder := os.environ.get("EPD_PICTURES"):
        page.screenshot(path=Path(folder) / f"{name}.png")
