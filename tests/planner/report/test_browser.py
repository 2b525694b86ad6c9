"""Reports in a real browser: pointing, clicking, zooming, on a desk, on a phone and in the dark."""

from __future__ import annotations

import html
import json

import pytest

import planner
from planner.report.page import write_report
from tests.support.browser import headless_browser

pytestmark = pytest.mark.slow
PLACE = """([chart, trace, point]) => {
  const gd = document.getElementById(chart), layout = gd._fullLayout, data = gd.data[trace];
  gd.scrollIntoView({block: "center"});
  const box = gd.getBoundingClientRect(), x = layout.xaxis, y = layout.yaxis;
  return [box.left + x._offset + x.d2p(data.x[point]), box.top + y._offset + y.d2p(data.y[point])];
}"""


@pytest.fixture(scope="module")
def browser():
    with headless_browser() as found:
        yield found


@pytest.fixture(scope="module")
def opened(files, browser, tmp_path_factory):
    """Opens the report; in the end nothing went wrong in it, and nothing was asked of a network."""
    path = tmp_path_factory.mktemp("browser") / "report.html"
    write_report(planner.Plan.load(files / "plan.json"), path)
    yield from pages_of(browser, path)


def pages_of(browser, path):
    troubles, pages = [], []

    def open_page(**options):
        page = browser.new_page(**options)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        page.on(
            "request", lambda asked: None if asked.url.startswith(("file:", "data:")) else troubles.append(asked.url)
        )
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=yes]")
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert troubles == []


@pytest.fixture(scope="module")
def page(opened):
    """On a desk."""
    return opened()


@pytest.fixture(scope="module")
def phone(opened):
    """In the dark."""
    return opened(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, color_scheme="dark")


def at(page, chart, trace, point):
    """Where a point of a chart stands on the screen."""
    return page.evaluate(PLACE, [chart, trace, point])


def test_pointing_at_a_moment_shows_what_is_alive(page):
    steps = page.evaluate("JSON.parse(document.getElementById('data').textContent).steps")
    assert f"({steps[1]['peak'] + 1} of {len(steps[1]['actions'])})" in page.inner_text("#alive-title")
    page.mouse.move(*at(page, "chart-timeline", 2, 3 * 2 + 1))  # the peak of the third action with the plan
    page.wait_for_function("document.getElementById('alive-title').textContent.includes('(3 of ')")
    action, stage = steps[1]["actions"][2][:2]
    assert f"alive in {action} of {stage}, at " in page.inner_text("#alive-title")
    page.mouse.move(*at(page, "chart-timeline", 1, 3 * 6 + 1))
    page.wait_for_function("document.getElementById('alive-title').textContent.includes('(7 of ')")
    assert page.input_value("#alive-step") == "0"
    page.click("#alive-after")
    assert "(8 of " in page.inner_text("#alive-title")


def test_what_is_alive_goes_by_op_module_or_reason(page):
    page.select_option("#alive-step", "0")  # at its peak
    step = page.evaluate("JSON.parse(document.getElementById('data').textContent).steps[0]")
    alive = {}
    for changes in step["changes"][: step["peak"] + 1]:
        alive.update(changes)
    for place, by in ((0, "what"), (1, "kind"), (2, "module")):
        page.select_option("#alive-by", by)
        names = {step["labels"][k][place] or step["labels"][k][0] for k, size in alive.items() if size}
        assert set(page.locator("#alive-rows td:first-child").all_inner_texts()) == names
        assert len(names) > 2
    page.select_option("#alive-by", "op")
    assert page.locator("#alive-rows tr").count() == sum(size != 0 for size in alive.values())


def test_a_click_on_a_budget_shows_its_plan(page):
    curve = page.evaluate("JSON.parse(document.getElementById('data').textContent).curve")
    page.mouse.click(*at(page, "chart-curve", 0, 0))
    page.wait_for_function("document.getElementById('curve-slider').value === '0'")
    assert page.inner_text("#curve-command") == curve[0]["command"]
    assert page.locator("#curve-rows tr").count() == len(curve[0]["rows"])
    smallest = page.inner_text("#curve-rows")
    page.fill("#curve-slider", str(len(curve) - 1))
    assert page.inner_text("#curve-title") == curve[-1]["text"]
    assert page.inner_text("#curve-rows") != smallest


def test_dragging_zooms_and_a_double_click_shows_all(page):
    width = "(([from, to]) => to - from)(document.getElementById('chart-timeline').layout.xaxis.range)"
    whole = page.evaluate(width)
    x, y = at(page, "chart-timeline", 2, 10)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 150, y + 5, steps=4)
    page.mouse.up()
    page.wait_for_function(f"{width} < {whole / 2}")
    page.mouse.dblclick(x, y)
    page.wait_for_function(f"{width} === {whole}")


def test_on_a_phone_nothing_scrolls_sideways_and_a_tap_shows_a_moment(phone):
    for summary in phone.locator("summary").all():
        summary.evaluate("element => { element.parentElement.open = true; }")
    assert phone.evaluate("document.documentElement.scrollWidth") == 390
    wide = "[...document.querySelectorAll('main *')].filter((e) => !e.closest('.scroller, pre, .chart'))"
    assert phone.evaluate(f"{wide}.every((e) => e.getBoundingClientRect().right <= 390)")
    phone.touchscreen.tap(*at(phone, "chart-timeline", 2, 3 * 4 + 1))
    phone.wait_for_function("document.getElementById('alive-title').textContent.includes('(5 of ')")


def test_paper_and_charts_follow_the_colours_of_the_screen(phone):
    def is_light(colour):
        return sum(colour) > 3 * 128

    def paper():
        return phone.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)")

    def words():
        colour = phone.evaluate("document.getElementById('chart-timeline')._fullLayout.font.color")
        return [int(colour[k : k + 2], 16) for k in (1, 3, 5)]

    dark = words()
    assert is_light(dark) and not is_light(paper())
    phone.emulate_media(color_scheme="light")
    phone.wait_for_function(f"document.getElementById('chart-timeline')._fullLayout.font.color !== '{hexed(dark)}'")
    assert is_light(paper()) and not is_light(words())


def hexed(colour):
    return "#" + "".join(f"{part:02x}" for part in colour)


ODD = "[/]<img src=x onerror=document.title='ran'><b>$x^$"


def test_what_others_call_their_modules_is_text(files, browser, tmp_path):
    document = json.loads((files / "plan.json").read_text())
    name = next(stage["record"]["name"] for stage in document["stages"] if stage["record"]["kind"] == "stage")
    (tmp_path / "plan.json").write_text(json.dumps(document).replace(f'"{name}"', json.dumps(ODD)))
    write_report(planner.Plan.load(tmp_path / "plan.json"), tmp_path / "report.html")
    opened = pages_of(browser, tmp_path / "report.html")
    page = next(opened)()
    assert ODD in page.locator("body").inner_text() and page.title() != "ran"
    assert page.locator("img").count() == 0
    texts = page.evaluate(
        "[...document.querySelectorAll('[data-figure]')].flatMap(each => (each.data || []).flatMap(t => t.text || []))"
    )
    assert any(html.escape(ODD) in text for text in texts) and not any(ODD in text for text in texts)
    assert next(opened, None) is None
