"""A run of the simulator as a page, in a real browser and without a network."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from epd.cli.main import main
from tests.pages.browser import browsing, picture, window


def test_a_failing_seed_opens_without_a_network_and_shows_the_failing_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.html"
    of = ("drill", "cache-tiers", "--seed", "1", "--mutant", "a_copy_is_half_a_value")
    assert main(["sim", "replay", *of, "--page", str(path)]) == 1
    said = capsys.readouterr().out
    broken = next(line for line in said.splitlines() if line.startswith("VIOLATION"))
    assert str(path) in said
    with browsing() as browser, window(browser) as page:
        page.context.set_offline(True)
        page.goto(path.as_uri())
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text(broken.removeprefix("VIOLATION "))
        room = broken.partition("room ")[2].split()[0]
        slider = page.get_by_label("look back")
        slider.focus()
        page.keyboard.press("Home")
        for _ in range(int(slider.get_attribute("max") or 0)):
            if alert.count() and "violation" in (alert.text_content() or ""):
                break
            page.keyboard.press("ArrowRight")
        expect(alert).to_contain_text(room)
        page.get_by_role("navigation").get_by_role("button", name="INCOMING").click()
        page.get_by_role("button", name="DELIVERED: ").click()
        picture(page, "failing-step")
        page.get_by_role("button", name=room, exact=True).click()
        events = page.get_by_role("table", name="events by time")
        expect(events).to_contain_text("CommitReceived")
