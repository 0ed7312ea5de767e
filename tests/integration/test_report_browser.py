"""The report in a real browser, without its window: what is drawn, how it reacts to input, and what a printer gets."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from harness.comparison.comparison import compare
from harness.comparison.runs import Cell, read_run
from harness.metrics.done import write_done
from harness.metrics.timeline import Place, Timeline, chrome_trace
from harness.protocols import Span
from harness.report.page.document import document
from tests.support.fabricated_cells import Made, keep_samples, make_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed here")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TIMEOUT_MS = 60_000
ITERATIONS = 12
LOSS = "my_lab.losses:one_whose_name_fits_into_no_line_of_a_telephone"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium"),
]


def busy() -> Timeline:
    """Two engines that generate and load, and a trainer that publishes, a second per iteration."""
    placement = {("rollout", str(n)): Place("rollout", (f"device {n}",)) for n in range(2)}
    placement |= {("actor", "0"): Place("actor", ("device 2",))}
    timeline = Timeline(placement)
    for i in range(ITERATIONS):
        spans = [Span("rollout", str(n), "generate", i + 0.1 * n, i + 0.8, i, i) for n in range(2)]
        spans += [Span("rollout", str(n), "load_weights", i + 0.85, i + 0.95, i + 1, i) for n in range(2)]
        spans += [
            Span("actor", "0", "wait_for_samples", i, i + 0.3, i, i),
            Span("actor", "0", "update_actor", i + 0.3, i + 0.8, i, i),
            Span("actor", "0", "publish_weights", i + 0.8, i + 0.9, i + 1, i),
        ]
        timeline.add(spans)
        timeline.end_iteration(i, i + 1.0)
    return timeline


def cell(root: Path, label: str, made: Made) -> Cell:
    folders = [make_run(root, label, made, seed).path for seed in range(3)]
    for folder in folders:
        (folder / "trace.json").write_text(json.dumps(chrome_trace(busy())), encoding="utf-8")
        keep_samples(folder)
        write_done(folder)
    return Cell(label, f"{label}, algorithm.correction={LOSS}", tuple(map(read_run, folders)))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    first = cell(root, "synchronous", Made(schedule="colocate_sync", lag=0, iterations=ITERATIONS))
    second = cell(root, "asynchronous", Made(step_s=0.5, iterations=ITERATIONS))
    second.runs[0].ledger["engines"] = [{"what": "lost"}]
    path = root / "report.html"
    path.write_text(document(compare([first, second])), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=TIMEOUT_MS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: "Browser", report: Path) -> Iterator["Page"]:
    """The report at 1280 pixels. At the end: nothing complained, and nothing but the file was asked for."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(TIMEOUT_MS)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if "report.html" not in request.url else None)
    page.goto(report.as_uri())
    page.wait_for_selector("#timeline[data-from]")
    yield page
    page.close()
    assert [complaint for complaint in complaints if not complaint.startswith("data:")] == []


def test_no_script_runs_but_the_page_s_own(browser: "Browser", report: Path, tmp_path: Path) -> None:
    other = (
        '<img src="x" onerror="document.title = 1"><script>document.title = 1</script><script src="evil.js"></script>'
    )
    path = tmp_path / "report.html"
    path.write_text(report.read_text(encoding="utf-8").replace("<main>", f"<main>{other}"), encoding="utf-8")
    (tmp_path / "evil.js").write_text("document.title = 1")
    page = browser.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector("#timeline[data-from]")  # drawn by the page's own
    assert page.title() != "1"
    page.close()


def wait_until(page: "Page", holds: str) -> None:
    """As wait_for_function, whose polling the page's content security policy forbids."""
    end = time.monotonic() + TIMEOUT_MS / 1000
    while not page.evaluate(holds):
        assert time.monotonic() < end, holds
        page.wait_for_timeout(20)


def window(page: "Page") -> tuple[float, float]:
    """Seconds that the timeline shows."""
    data = page.evaluate("({...document.querySelector('#timeline').dataset})")
    return float(data["from"]) / 1e6, float(data["to"]) / 1e6


def place(page: "Page", row: int, seconds: float) -> tuple[float, float]:
    """Where on the screen a moment of a row is drawn."""
    page.locator(".spans").scroll_into_view_if_needed()
    x, y = page.evaluate(
        """([row, seconds]) => {
            const { live } = document.querySelector("#timeline");
            const box = live.canvas.getBoundingClientRect();
            return [box.x + live.x(seconds * 1e6), box.y + live.run.rows[row].top + live.run.rows[row].height / 2];
        }""",
        [row, seconds],
    )
    return x, y


def colour(page: "Page", row: int, seconds: float) -> list[int]:
    """Red, green and blue of what is drawn there, near the lane's upper edge."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.evaluate(
        """([row, seconds]) => {
            const { live } = document.querySelector("#timeline");
            const copy = new OffscreenCanvas(1, 1).getContext("2d");
            copy.drawImage(live.canvas, -live.x(seconds * 1e6), -live.run.rows[row].top - 3);
            return [...copy.getImageData(0, 0, 1, 1).data.slice(0, 3)];
        }""",
        [row, seconds],
    )


def tooltip(page: "Page") -> dict[str, str]:
    names, values = (page.locator(f".tooltip {tag}").all_inner_texts() for tag in ("dt", "dd"))
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize("width", [390, 800, 1280, 1440])
def test_nothing_is_wider_than_the_window(page: "Page", width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    wait_until(page, f"document.querySelector('.spans').clientWidth < {width}")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    clipped = page.evaluate(
        "[...document.querySelectorAll('.wide')].filter((n) => n.scrollWidth > n.clientWidth).length"
    )
    assert clipped == 0 or width == 390, "only on a telephone do tables scroll, each by itself"


FAINT = """() => {
    const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (rgb) => {
        const [r, g, b] = rgb.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (node) => {
        const [r, g, b, alpha = 1] = parts(getComputedStyle(node).backgroundColor);
        return alpha > 0.9 ? [r, g, b] : node.parentElement ? ground(node.parentElement) : [255, 0, 255];
    };
    const words = (node) => [...node.childNodes].some((own) => own.nodeType === 3 && own.textContent.trim());
    const contrast = (node) => {
        const style = getComputedStyle(node);
        const ink = parts(node instanceof SVGElement ? style.fill : style.color).slice(0, 3);
        const [low, high] = [light(ink), light(ground(node))].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    };
    return [...document.body.querySelectorAll("*")]
        .filter((node) => node.checkVisibility() && words(node) && !["SCRIPT", "OPTION"].includes(node.tagName))
        .map((node) => [contrast(node), node.tagName, node.className, node.textContent])
        .filter(([ratio]) => ratio < 4.5)
        .map((found) => found.join(" "));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_word_can_be_read_on_its_ground(page: "Page", scheme: Literal["light", "dark"]) -> None:
    """4.5 is what the Web Content Accessibility Guidelines ask of text."""
    page.emulate_media(color_scheme=scheme)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 24, 31)"}[scheme]
    page.get_by_role("button", name="unfold all").click()
    page.locator("#samples details:visible").first.locator("summary").click()
    assert page.evaluate(FAINT) == []


def test_the_timeline_follows_the_colour_scheme(page: "Page") -> None:
    """Left of the first span the canvas has its ground, behind the names."""
    page.get_by_role("button", name="whole run").click()
    before, drawn = colour(page, 0, -0.02), colour(page, 0, 3.4)
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector("#timeline[data-scheme=dark]")
    assert before == [255, 255, 255] and colour(page, 0, -0.02) == [18, 24, 31]
    assert colour(page, 0, 3.4) != drawn


def test_what_is_under_the_pointer_is_told(page: "Page") -> None:
    page.mouse.move(*place(page, 1, 3.4))
    assert tooltip(page) == {
        "role": "rollout",
        "engine": "1 (pool rollout)",
        "kind": "generate",
        "data": "v3",
        "iteration": "3",
        "start": "3.1000 s",
        "duration": "700 ms",
    }
    page.mouse.move(*place(page, 2, 4.85))
    assert tooltip(page)["kind"] == "publish weights" and tooltip(page)["weights"] == "v5"
    page.mouse.move(*place(page, 0, 4.97))
    assert page.locator(".tooltip").is_hidden()


def test_spans_have_the_colour_of_their_version_or_of_their_kind(page: "Page") -> None:
    by_version = [colour(page, 0, second) for second in (3.4, 4.4)]
    assert by_version[0] != by_version[1] == colour(page, 2, 4.6)
    page.mouse.move(*place(page, 2, 4.6))
    assert (tooltip(page)["data"], tooltip(page)["iteration"]) == ("v4", "4")
    page.locator(".which").select_option("1")  # one version behind
    assert colour(page, 2, 4.6) == by_version[0]
    page.mouse.move(*place(page, 2, 4.6))
    assert (tooltip(page)["data"], tooltip(page)["iteration"]) == ("v3", "4")
    page.locator(".which").select_option("0")
    legend = page.locator("#timeline .legend").inner_text()
    assert legend.startswith("Version that sampled the data:") and "v3" in legend
    page.get_by_label("kind of work").check()
    by_kind = [colour(page, 0, second) for second in (3.4, 4.4)]
    assert by_kind[0] == by_kind[1] != colour(page, 2, 4.6)
    assert "update actor" in page.locator("#timeline .legend").inner_text()


def test_weights_are_drawn_as_arrows_between_rows(page: "Page") -> None:
    """Between two rows there is nothing else that is dark."""
    count = """() => {
        const { live } = document.querySelector("#timeline");
        const [upper] = live.run.rows;
        const [left, right] = [3.8e6, 3.97e6].map((time) => Math.round(live.x(time)));
        const copy = new OffscreenCanvas(right - left, 1).getContext("2d");
        copy.drawImage(live.canvas, -left, -upper.top - upper.height - 4);
        return copy.getImageData(0, 0, right - left, 1).data.filter((value, at) => at % 4 === 0 && value < 160).length;
    }"""
    assert page.evaluate("document.querySelector('#timeline').live.run.arrows.length") == 2 * ITERATIONS
    assert page.evaluate(count) > 0


def test_the_wheel_zooms_once_the_chart_was_clicked_and_scrolls_the_page_before(page: "Page") -> None:
    before = window(page)
    page.mouse.move(*place(page, 0, 4.5))
    page.mouse.wheel(0, -200)
    wait_until(page, "scrollY < document.querySelector('#timeline').offsetTop")
    assert window(page) == before
    page.mouse.click(*place(page, 0, 4.5))
    page.mouse.wheel(0, -200)
    wait_until(page, f"Number(document.querySelector('#timeline').dataset.from) > {before[0] * 1e6}")
    after = window(page)
    assert after[1] - after[0] < before[1] - before[0]
    share = (4.5 - before[0]) / (before[1] - before[0])
    assert (4.5 - after[0]) / (after[1] - after[0]) == pytest.approx(share, abs=0.01)  # it stays under the pointer


def test_dragging_zooms_into_what_was_dragged_over_and_shift_moves(page: "Page") -> None:
    y = place(page, 0, 4.0)[1]
    page.mouse.move(place(page, 0, 4.0)[0], y)
    page.mouse.down()
    page.mouse.move(place(page, 0, 5.0)[0], y, steps=3)
    page.mouse.up()
    assert window(page) == pytest.approx((4.0, 5.0), abs=0.01)
    page.keyboard.down("Shift")
    page.mouse.move(place(page, 0, 4.6)[0], y)
    page.mouse.down()
    page.mouse.move(place(page, 0, 4.1)[0], y, steps=3)
    page.mouse.up()
    page.keyboard.up("Shift")
    assert window(page) == pytest.approx((4.5, 5.5), abs=0.02)
    page.mouse.dblclick(*place(page, 0, 5.0))
    assert window(page) == (0, ITERATIONS)


def test_keys_zoom_move_and_read_spans_aloud(page: "Page") -> None:
    page.locator(".spans").focus()
    from_, to = window(page)
    page.keyboard.press("+")
    zoomed = window(page)
    assert zoomed[1] - zoomed[0] == pytest.approx((to - from_) / 2)
    page.keyboard.press("ArrowRight")
    assert window(page)[0] > zoomed[0]
    page.keyboard.press("0")
    assert window(page) == (0, ITERATIONS)
    page.keyboard.press("ArrowDown")
    assert tooltip(page)["engine"] == "0 (pool rollout)"
    page.keyboard.press("Shift+ArrowRight")
    assert tooltip(page)["kind"] == "load weights"
    assert "kind load weights, weights v1" in page.locator(".status").inner_text()
    page.keyboard.press("ArrowDown")
    assert tooltip(page)["engine"] == "1 (pool rollout)"
    page.keyboard.press("Escape")
    assert page.locator(".tooltip").is_hidden()


def test_buttons_and_the_strip_below_move_the_window(page: "Page") -> None:
    page.get_by_role("button", name="whole run").click()
    assert window(page) == (0, ITERATIONS)
    for _ in range(2):
        page.get_by_role("button", name="Zoom in").click()
    page.get_by_role("button", name="Later").click()
    assert window(page) == pytest.approx((6.0, 9.0))
    box = page.locator(".overview").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
    assert window(page) == pytest.approx((9.0, 12.0))
    page.locator(".which").select_option("1")
    assert page.locator(".run-title").inner_text().startswith("fully_async")


def test_switches_change_the_curves_and_the_pointer_reads_them(page: "Page") -> None:
    lines = page.locator(".curves .mean-line")
    before = lines.first.get_attribute("points")
    page.get_by_label("samples trained").check()
    assert lines.first.get_attribute("points") != before
    assert (
        page.locator(".curves svg").get_attribute("aria-label")
        == "held-out accuracy, sampled against samples trained, a line per cell"
    )
    page.get_by_label("mean reward").check()
    assert "mean reward" in page.locator(".curves").inner_text()
    assert lines.count() == 2
    page.get_by_role("button", name=f"asynchronous, algorithm.correction={LOSS}", exact=True).click()
    assert lines.count() == 1
    page.locator(".curves").scroll_into_view_if_needed()
    box = page.locator(".curves").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert f"synchronous, algorithm.correction={LOSS} 0." in page.locator(".readout").inner_text()


def test_samples_are_listed_by_run_and_kind_and_unfolded_to_be_read(page: "Page") -> None:
    shown = page.locator("#samples details:visible")
    assert shown.count() == 4 and "sample 5" in shown.first.inner_text()
    shown.first.locator("summary").click()
    text = shown.first.inner_text()
    assert "a.jsonl:1" in text and "trained in iteration 0" in text and "0 (2 tokens), 3 (1 token)" in text
    assert "\\x1b[2Jred" in text and "\\u202egpj.exe" in text and "<img src=x onerror='document.title = 1'>" in text
    page.get_by_label("not trained").check()
    assert shown.all_inner_texts()[0].startswith("sample 14") and shown.count() == 1
    page.get_by_label("held out").check()
    assert shown.count() == 3 and "version 2" in shown.first.inner_text()
    page.get_by_label("Run").last.select_option("1")
    assert shown.count() == 3 and page.locator("#samples details[data-run='1']:visible").count() == 3


def test_a_printer_gets_tables_and_charts_and_no_switches(page: "Page") -> None:
    page.emulate_media(color_scheme="dark")
    page.evaluate(
        """() => {
            window.printed = [];
            addEventListener("beforeprint", () => {
                const { scheme } = document.querySelector("#timeline").dataset;
                printed.push([scheme, document.querySelectorAll("details:not([open])").length]);
            });
        }"""
    )
    pdf = page.pdf(prefer_css_page_size=True)
    assert page.evaluate("window.printed") == [["light", 0]]  # on white, and everything unfolded
    assert 3 <= len(re.findall(rb"/Type /Page\b", pdf)) <= 6
    width, height = map(float, re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", pdf)[0])
    assert width < height
    assert page.locator("details:not([open])").count() > 0  # and folded again
    page.emulate_media(media="print")
    for hidden in (".controls", "#samples", "nav", ".help", ".unfold", ".overview"):
        assert page.locator(hidden).first.is_hidden()
    for shown in (".verdict", ".headlines", ".curves svg", ".histogram", ".spans", "#timeline .legend"):
        assert page.locator(shown).first.is_visible()
