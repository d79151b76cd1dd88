"""The page at /ui in a real browser. The answers of GET /state are made up here: no gateway."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from epd.api.watching.cluster_view import ClusterView, KeptAnswer, KeptAnswers
from epd.api.web import cluster_file, cluster_page
from tests.pages.answers import ILLEGAL, ROOM, answer, crowd, large, metrics, shaped, with_the_gone
from tests.pages.browser import WIDE, browsing, picture, window

URL = "http://epd.test/ui"
A_SECOND_LATER = re.compile(r"^1[012]\d/s$")  # 120 more, in a second and a little


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@contextmanager
def page_of(browser: Browser, told: Any = answer, size: tuple[int, int] = WIDE) -> Iterator[Page]:
    """`told` makes the answers."""
    document, headers = cluster_page()
    served = [(name.decode(), value.decode()) for name, value in headers]
    answers, looks = itertools.count(), itertools.count(1)

    def serve(route: Route) -> None:
        if route.request.url == URL:
            headers = dict(served, **{"content-type": "text/html; charset=utf-8"})
            route.fulfill(body=document, headers=headers)
        elif route.request.url.endswith("/metrics"):
            route.fulfill(body=metrics(next(looks)))
        else:
            route.fulfill(body=msgspec.json.encode(told(next(answers))))

    with window(browser, size) as page:
        page.route("**/*", serve)
        page.goto(URL)
        yield page


def test_states_are_lit_and_edges_flow(browser: Browser) -> None:
    with page_of(browser) as page:
        page.get_by_role("button", name="OUTGOING 6").click()
        expect(page.get_by_role("button", name="GRANTED: 2, oldest 300 ms")).to_be_visible()
        expect(page.get_by_role("button", name="PENDING: none", exact=True)).to_be_visible()
        late = page.get_by_role("button", name="QUARANTINED: 1")
        expect(late).to_have_class("state c9 lit late")
        expect(page.locator(".flow")).to_have_count(3)
        expect(page.locator(".flow").last).to_have_text(A_SECOND_LATER)
        page.get_by_text("events that moved nothing (1 of them illegal)").click()
        expect(page.get_by_role("cell", name=ILLEGAL, exact=True)).to_be_visible()
        picture(page, "machine-light")


def test_a_quarantined_room_is_found_in_two_clicks_and_by_keys_alone(browser: Browser) -> None:
    with page_of(browser) as page:
        page.get_by_role("button", name="INCOMING QUARANTINED 1").click()
        page.get_by_role("button", name=ROOM).click()
        for name in ("e0", "p0"):
            expect(page.get_by_role("columnheader", name=name, exact=True)).to_be_visible()
        rows = page.get_by_role("table", name="events by time").get_by_role("row")
        expect(rows).to_have_count(6)
        expect(rows.nth(1)).to_contain_text("SlotsLeased")
        expect(rows.last).to_contain_text("QUARANTINED")
        expect(page.get_by_role("heading", name="One story")).to_be_focused()
        page.emulate_media(color_scheme="dark")
        picture(page, "story-dark")
        page.keyboard.press("Escape")
        expect(page.get_by_role("heading", name="INCOMING QUARANTINED")).to_be_visible()
        expect(page.get_by_role("button", name=ROOM)).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="One story")).to_be_visible()
        page.keyboard.press("Escape")
        page.keyboard.press("Escape")
        expect(page.get_by_role("heading", name="Open requests 15")).to_be_visible()
        page.locator(".state").first.focus()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="INCOMING AWAITING_LANDING")).to_be_visible()


@pytest.mark.long
def test_rates_and_latencies_over_time(browser: Browser) -> None:
    """100 of 200 are at 100/120 of the first bucket, 198 at 8/10 of the last one."""
    with page_of(browser) as page:
        expect(page.get_by_role("img", name="open requests: 15, at most 15")).to_be_visible()
        expect(page.get_by_role("img", name="images encoded: 0.0/s")).to_be_visible()
        told = page.get_by_role("img", name="TTFT p50 p99: 83 ms 450 ms, at most 450 ms")
        expect(told).to_be_visible(timeout=15_000)
        expect(told.locator("path")).to_have_count(2)
        expect(page.get_by_role("img", name="TPOT p50 p99: -")).to_be_visible()
        picture(page, "over-time")


def test_first_what_runs_then_the_cluster_then_what_is_red_then_open_requests(
    browser: Browser,
) -> None:
    with page_of(browser) as page:
        head = page.locator("header")
        expect(head.get_by_role("heading")).to_have_text("tiny")
        expect(head).to_contain_text("epd 1.2.3, up 2.0 h")
        expect(head).to_contain_text("2 of 2 instances")
        tops = [
            (page.locator(part).bounding_box() or {})["y"]
            for part in ("header", ".cluster", ".alerts", "#inspector")
        ]
        assert tops == sorted(tops)
        encoder, other = (page.locator(f"[data-process={name}]") for name in ("e0", "p0"))
        expect(encoder).to_contain_text("encode 650 ms")
        expect(encoder).to_contain_text("queue 7, at work 4")
        expect(encoder).to_contain_text("host tier 300.0 MiB of 1.0 GiB")
        expect(other).to_contain_text("within itself 0 B/s")
        expect(page.locator(".cluster text")).to_have_text(re.compile(r"^3\d\.\d MiB/s$"))
        expect(page.locator(".stage")).to_have_text(["encode", "prefill", "decode"])
        rows = page.get_by_role("table", name="open requests").get_by_role("row")
        expect(rows).to_have_count(5)
        expect(rows.nth(1)).to_contain_text("STREAMING")


def test_a_click_on_a_node_opens_its_machines_and_keys_lead_back(browser: Browser) -> None:
    with page_of(browser) as page:
        node = page.locator("[data-process=e0]")
        node.click()
        expect(page.get_by_role("heading", name="e0")).to_be_focused()
        facts = page.get_by_role("table", name="e0", exact=True).get_by_role("rowheader")
        expect(facts).to_have_text(
            "roles,state,load,memory,in use,peers,slower than possible,sent to,epoch".split(",")
        )
        table = page.get_by_role("table", name="e0", exact=True)
        expect(table).to_contain_text("p0 by shm")
        expect(table.locator(".trouble")).to_have_text("p0 not cuda: e0 lacks it")
        table = page.get_by_role("table", name="machines of e0")
        expect(table.get_by_role("row")).to_have_count(7)
        table.get_by_role("button", name="QUARANTINED").click()
        expect(page.get_by_role("heading", name="OUTGOING QUARANTINED at e0")).to_be_focused()
        expect(page.get_by_role("table", name="oldest in QUARANTINED")).to_contain_text("e0")
        page.keyboard.press("Escape")
        expect(table.get_by_role("button", name="QUARANTINED")).to_be_focused()
        page.keyboard.press("Escape")
        expect(node).to_be_focused()
        page.keyboard.press("Enter")
        expect(table).to_be_visible()
        page.get_by_role("button", name="gateway").click()
        machines = page.get_by_role("table", name="machines of gateway")
        expect(machines).to_contain_text("STREAMING")


def test_a_request_is_found_by_the_id_of_its_answer(browser: Browser) -> None:
    asked: list[str] = []
    with page_of(browser) as page:
        page.on("request", lambda request: asked.append(request.url))
        page.get_by_label("find by id").fill("chatcmpl-gateway-1-7")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="One story")).to_be_visible()
        rows = page.get_by_role("table", name="events by time").get_by_role("row")
        expect(rows).to_have_count(6)
        assert any("key=gateway-1-7&" in url for url in asked)
        page.keyboard.press("Escape")
        expect(page.get_by_label("find by id")).to_be_focused()
        page.get_by_label("find by id").fill("nobody")
        page.keyboard.press("Enter")
        expect(page.get_by_text("No process knows it.")).to_be_visible()


SHAPES = {
    "1epd": shaped("epd", links=((0, 0),)),
    "1ep-1d": shaped("ep", "d", links=((0, 1),)),
    "2pd-1e": shaped("pd", "pd", "e", links=((2, 0), (2, 1), (0, 1), (0, 0))),
    "12": large,
}
SIMPLE = ("1epd", "1ep-1d")
OVERLAPS = """() => {
  const boxes = [...document.querySelectorAll(".node")].map((one) => one.getBoundingClientRect());
  return boxes.some((a, at) => boxes.slice(at + 1).some((b) =>
    a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom));
}"""


@pytest.mark.parametrize(
    "shape", ["12", "2pd-1e", *(pytest.param(one, marks=pytest.mark.long) for one in SIMPLE)]
)
def test_every_shape_fits_its_window(browser: Browser, shape: str) -> None:
    """Nodes lie apart, nothing is wider than the window, and a name is text and no markup."""
    with page_of(browser, SHAPES[shape]) as page:
        expect(page.locator(".cluster")).to_contain_text("MiB/s")
        for size in ((1280, 900), (400, 800)):
            page.set_viewport_size({"width": size[0], "height": size[1]})
            assert not page.evaluate(OVERLAPS)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            picture(page, f"shape-{shape}-{size[0]}")
        assert page.title() != "taken"
        if shape == "12":
            expect(page.locator(".node")).to_have_count(12)
            expect(page.locator("header .trouble")).to_have_text("11 of 12 instances")
            lost = page.locator(".node.late").first
            expect(lost).to_contain_text("LOST, last heard 12 s ago: no heartbeat for 5.0 s")
            expect(page.locator(".node.late").last).to_contain_text("hears nothing of")
            group = page.locator(".node", has_text=" 3 processes")
            expect(group).to_have_count(1)
            assert group.evaluate("(one) => one.firstElementChild.scrollWidth <= one.clientWidth")


def test_red_is_what_is_late_and_not_what_is_old(browser: Browser) -> None:
    with page_of(browser) as page:
        alerts = page.get_by_role("region", name="trouble")
        expect(alerts.get_by_role("button")).to_have_count(2)
        page.get_by_role("navigation").get_by_role("button", name="INCOMING").click()
        old = page.get_by_role("button", name="RESERVED: 5, oldest 40 s, 80 s left")
        expect(old).to_have_class(re.compile(r"^state c\d+ lit$"))
        late = page.get_by_role("button", name=re.compile("QUARANTINED: 1, oldest .*, 1 late"))
        expect(late).to_have_class(re.compile(r"^state c\d+ lit late$"))
        late.click()
        row = page.get_by_role("table", name="oldest in QUARANTINED").get_by_role("row").last
        expect(row).to_have_class("late")
        expect(row).to_contain_text("late")


def test_pause_and_a_look_back(browser: Browser) -> None:
    with page_of(browser) as page:
        slider = page.get_by_label("look back")
        expect(slider).to_have_attribute("max", re.compile("^[1-9]"))
        page.get_by_role("button", name="pause").click()
        page.wait_for_timeout(500)  # an answer may have been on its way
        last = int(slider.get_attribute("max") or 0)
        page.wait_for_timeout(1500)
        expect(slider).to_have_attribute("max", str(last))
        alerts = page.get_by_role("region", name="trouble")
        expect(alerts).to_contain_text(f"{7 + last}.0 s")
        slider.focus()
        page.keyboard.press("Home")
        expect(alerts).to_contain_text("7.0 s")
        page.keyboard.press("End")
        expect(page.locator("output")).to_have_text("paused")


def test_who_leaves_and_who_says_nothing(browser: Browser) -> None:
    def told(number: int) -> ClusterView:
        made = answer(number)
        if number:
            del made.processes[1]
        if number > 1:
            made.no_answer = ["p0"]
            del made.processes[1]
        return made

    with page_of(browser, told) as page:
        encoder, prefill = (page.locator(f"[data-process={name}]") for name in ("e0", "p0"))
        expect(encoder).to_contain_text("gone for")
        expect(encoder).to_have_class("node late")
        expect(prefill).to_contain_text("no answer")
        expect(prefill).to_have_class("node late")


@pytest.mark.parametrize("size", [WIDE, (400, 800)])
def test_who_was_lost_before_the_page_was_opened(browser: Browser, size: tuple[int, int]) -> None:
    """In the cluster, among what is red, and in the drawing of INSTANCE; who was refused, too."""
    with page_of(browser, with_the_gone, size) as page:
        encoder, alerts = (
            page.locator("[data-process=e0]"),
            page.get_by_role("region", name="trouble"),
        )
        for place in (encoder, alerts):
            expect(place).to_contain_text("LOST, last heard 12 s ago: silent")
        expect(encoder).to_have_class("node late")
        expect(page.get_by_text("left: d0 12 s ago")).to_be_visible()
        expect(page.locator("header .trouble")).to_have_text("1 of 2 instances")
        expect(page.locator("[data-outside=p0]")).to_contain_text("REFUSED 3.0 s ago: its name")
        page.get_by_role("navigation").get_by_role("button", name="INSTANCE").click()
        expect(page.locator("g.state.late[data-name=LOST]")).to_have_count(1)
        picture(page, f"ui-lost-{size[0]}")


def test_a_gateway_that_is_gone_is_said_and_asked_again(browser: Browser) -> None:
    document, _ = cluster_page()
    states = iter([True, False, True, True, True])

    def serve(route: Route) -> None:
        if route.request.url == URL:
            route.fulfill(body=document, content_type="text/html")
        elif route.request.url.endswith("/metrics"):
            route.fulfill(body="")
        elif next(states, True):
            route.fulfill(body=msgspec.json.encode(answer(0)))
        else:
            route.fulfill(status=429, json={"error": {"message": "too many look"}})

    page = browser.new_page()
    page.route("**/*", serve)
    page.goto(URL)
    expect(page.get_by_role("alert")).to_have_text("too many look")
    expect(page.get_by_role("alert")).to_have_count(0)
    page.close()


def test_the_key_is_asked_for_once_and_kept_by_this_tab_only(browser: Browser) -> None:
    page = browser.new_page()
    document, headers = cluster_page()
    served = {name.decode(): value.decode() for name, value in headers}

    def serve(route: Route) -> None:
        if route.request.url == URL:
            route.fulfill(body=document, headers=served | {"content-type": "text/html"})
        elif route.request.headers.get("authorization") == "Bearer secret":
            route.fulfill(body=msgspec.json.encode(answer(0)))
        else:
            route.fulfill(status=401, json={"error": {"message": "the API key is not known here"}})

    page.route("**/*", serve)
    page.goto(URL)
    for key in ("wrong", "secret"):
        expect(page.get_by_role("alert")).to_contain_text("not known")
        page.get_by_label("API key").fill(key)
        page.keyboard.press("Enter")
    expect(page.locator("[data-process=e0]")).to_be_visible()
    page.reload()
    expect(page.locator("[data-process=e0]")).to_be_visible()
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    page.close()


FRAMES = """async (for_ms) => {
  const begun = performance.now(), gaps = [];
  let last = begun;
  while (last - begun < for_ms) {
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    gaps.push(now - last);
    last = now;
  }
  return gaps.sort((a, b) => a - b);
}"""


@pytest.mark.long
def test_it_stays_smooth_with_a_thousand_open_requests(browser: Browser) -> None:
    """Half of the frames come in time even where other tests take the cores; see the median.  The
    page remembers as much as it ever does."""
    with page_of(browser, crowd) as page:
        page.get_by_role("button", name="OUTGOING").first.click()
        page.get_by_role("button", name="QUARANTINED: 1000").click()
        expect(page.get_by_role("button", name="gateway-1-49/1/0")).to_have_count(1)
        page.evaluate("for (let at = 0; at < RING; at++) keep(app.ring.at(-1))")
        gaps = page.evaluate(FRAMES, 4000)
        print(f"{len(gaps)} frames, median {gaps[len(gaps) // 2]:.1f} ms, last ones {gaps[-8:]}")
        assert gaps[len(gaps) // 2] < 17.5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_window(browser: Browser, scheme: Any) -> None:
    with page_of(browser, size=(420, 900)) as page:
        page.emulate_media(color_scheme=scheme)
        picture(page, f"narrow-{scheme}")
        page.get_by_role("button", name="INCOMING QUARANTINED 1").click()
        expect(page.get_by_role("heading", name="INCOMING QUARANTINED")).to_be_in_viewport()
        picture(page, f"narrow-state-{scheme}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_file_needs_no_network_and_shows_what_it_holds(browser: Browser, tmp_path: Path) -> None:
    hostile = answer(1)
    hostile.processes[1].roles = ["</script><script>document.title = 'taken'</script>"]
    answers = [
        KeptAnswer(at_ms=1000.0, told=answer(0)),
        KeptAnswer(at_ms=2000.0, told=hostile, note="conservation: a slot is lost"),
    ]
    path = tmp_path / "cluster.html"
    path.write_text(cluster_file(KeptAnswers(title="a run", answers=answers)))
    with window(browser) as page:
        page.context.set_offline(True)
        page.goto(path.as_uri())
        expect(page.get_by_role("alert")).to_have_text("conservation: a slot is lost")
        assert page.title() != "taken"
        page.get_by_role("button", name="INCOMING QUARANTINED 1").click()
        page.get_by_role("button", name=ROOM).click()
        story = page.get_by_role("table", name="events by time")
        expect(story.get_by_role("row")).to_have_count(6)
        page.keyboard.press("Escape")
        page.get_by_role("navigation").get_by_role("button", name="OUTGOING").click()
        expect(page.locator(".flow").last).to_have_text("120/s")
        page.get_by_label("look back").focus()
        page.keyboard.press("Home")
        expect(page.get_by_role("alert")).to_have_count(0)
