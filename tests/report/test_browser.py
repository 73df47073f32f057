"""Is the page right where it counts: in a real Chromium, wide and narrow, light and dark, with and without its script?"""

from __future__ import annotations

import csv
import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.measure.bench_page import to_html as bench_page
from paceline.measure.bench_results import Measurement, Timing, results_of
from paceline.measure.scaling_page import to_html as scaling_page
from paceline.report.find_run import NamedRun
from paceline.report.page.document import render_page
from paceline.report.page.index import index_data, render_index
from paceline.report.page.page_data import report_data
from paceline.report.runs import run_folders, summarize
from support import report_trainings as trainings
from support.browser import Browser, browsing
from support.page_checks import faults

pytestmark = pytest.mark.browser
heavy = pytest.mark.heavy

HOSTILE = "x\"><img src=x onerror=alert(1)><script>alert(1)</script><!-- '&lt;\u202e"
METRIC = "</script><script>alert(2)</script>${x}"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """Two runs, one of which bears names that try to get out."""
    root = tmp_path_factory.mktemp("page")
    plain = trainings.make_training(root / "plain", "name=plain")
    hostile, metrics = root / HOSTILE.replace("/", "_"), ("eval_loss", METRIC)
    odd = trainings.make_training(hostile, "clip_norm=2", metrics=metrics, seed=2, ranks=3)
    odd.config.write_text(f"note = {json.dumps(HOSTILE)}\n{json.dumps(METRIC)} = 1\n")
    for folder in (plain, odd):
        trainings.measure(folder, HOSTILE)
        trainings.note_rank_times(folder, 8, slow=5)
    path = root / "page.html"
    path.write_bytes(render_page(report_data([NamedRun(plain, ()), NamedRun(odd, ())])))
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("chromium")) as found:
        yield found


LINES = """[...document.querySelectorAll('svg path.line')].filter((path) => path.getClientRects().length).map((path) => {
  const box = path.getBoundingClientRect(), area = path.closest('.area').getBoundingClientRect();
  return {points: path.getAttribute('d').split('L').length, long: path.getTotalLength() > 900, width: box.width / area.width,
    inside: box.left >= area.left - 3 && box.right <= area.right + 3 && box.top >= area.top - 3 && box.bottom <= area.bottom + 3,
    color: getComputedStyle(path).stroke};
})"""
PAPER = "getComputedStyle(document.body).backgroundColor"
INK = "getComputedStyle(document.querySelector('h1')).color"


def brightness(color: str) -> int:
    return sum(int(part) for part in color.removeprefix("rgb(").removesuffix(")").split(","))


def test_a_page_draws_its_curves_shows_hostile_names_as_text_and_asks_nobody(
    browser: Browser, page: Path
) -> None:
    browser.show(page)
    browser.asked_for.clear()
    browser.show(page)
    see_curves(browser)
    titles = "[...document.querySelectorAll('{}')].map((part) => part.textContent)"
    shown = HOSTILE.replace("/", "_").replace("\u202e", "\ufffd")
    assert browser.value(titles.format(".card h2")) == ["plain", shown]
    for place in ("h3", ".settings th"):
        assert METRIC in browser.value(titles.format(place))
    foreign = "document.querySelectorAll('img, iframe, object, link, a, script[src]').length"
    assert (browser.value(foreign), browser.value("document.scripts.length")) == (0, 2)
    assert set(browser.asked_for) == {page.absolute().as_uri()}
    assert browser.complaints == []


def see_curves(browser: Browser) -> None:
    """See loss, evaluation, speed, learning rate of both runs, a metric each, step times, speed-up."""
    lines = browser.value(LINES)
    assert len(lines) >= 12
    assert all(line["inside"] and line["long"] and line["width"] > 0.5 for line in lines)
    assert sum(line["points"] > 100 for line in lines) >= 6
    assert len({line["color"] for line in lines}) >= 2
    # The loss falls far: its logarithm is shown.
    scale = "document.querySelector('.plot.{}').getClientRects().length"
    assert browser.value(scale.format("linear")) == 0
    browser.value("document.querySelector('.switch').click()")
    assert [browser.value(scale.format(kind)) for kind in ("linear", "log")] == [1, 0]


@heavy
def test_the_curves_are_drawn_without_the_script(browser: Browser, page: Path) -> None:
    browser.show(page, script=False)
    see_curves(browser)


BOX = "JSON.parse(JSON.stringify(document.querySelector('{}').getBoundingClientRect()))"


@heavy
def test_values_are_shown_under_the_pointer(browser: Browser, page: Path) -> None:
    browser.show(page)
    browser.value("document.querySelector('.plot.log').scrollIntoView()")
    box = browser.value(BOX.format(".plot.log .area"))
    browser.move_to(box["left"] + box["width"] / 2, box["top"] + 20)
    said = browser.value("document.querySelector('.tip').innerText")
    assert said.startswith("step 3,0")
    assert "plain 0." in said
    assert browser.value("document.querySelectorAll('.point').length") == 4
    browser.move_to(1, 1)
    assert browser.value("document.querySelector('.tip')") is None


STATE = """(() => { const area = document.querySelector('.plot.log .area');
  return {line: area.querySelector('.line:not(.raw)').getAttribute('d'), raw: area.querySelectorAll('.raw').length,
    labels: [...area.querySelectorAll('.x')].map((part) => part.textContent), title: area.querySelector('.x-title').textContent,
    marks: [...area.querySelectorAll('.restart, .checkpoint')].map((part) => part.getAttribute('d')).join('')}; })()"""


@heavy
def test_the_x_axis_can_be_time_or_samples_and_curves_can_be_smoothed(
    browser: Browser, page: Path
) -> None:
    browser.show(page, script=False)
    assert browser.value("document.querySelector('.switches').getClientRects().length") == 0
    browser.show(page)
    before = browser.value(STATE)
    assert before["title"] == "step"
    assert before["marks"].count("V1000") == 4  # two restarts of each run
    assert before["marks"].count("v-45") == 24  # twelve checkpoints of each run
    for axis, title, label in (("samples", "samples", "500k"), ("time", "time since the first start", "2 min")):  # fmt: skip
        browser.value(f"document.getElementById('axis-{axis}').click()")
        after = browser.value(STATE)
        assert (after["title"], label in after["labels"]) == (title, True)
    assert after["line"] != before["line"]
    assert after["raw"] == 0
    browser.value(
        "(() => { const slider = document.getElementById('smooth'); slider.value = 0.9; slider.dispatchEvent(new Event('input')); })()"
    )
    smooth = browser.value(STATE)
    assert smooth["raw"] == 2
    heights = [float(point.split()[1]) for point in smooth["line"][1:].split("L")]
    rough = [float(point.split()[1]) for point in after["line"][1:].split("L")]

    def up_and_down(values: list[float]) -> float:
        return sum(abs(later - sooner) for sooner, later in pairwise(values[len(values) // 2 :]))

    assert len(heights) == len(rough)
    assert up_and_down(heights) < 0.5 * up_and_down(rough)


@heavy
def test_a_curve_can_be_kept_as_csv_and_svg(browser: Browser, page: Path) -> None:
    browser.show(page)
    browser.value(
        "window.Blob = class extends Blob { constructor(parts, kind) { super(parts, kind); window.kept = parts[0]; } }; 1"
    )
    browser.value("document.querySelector('.tools button').click()")
    rows = list(csv.DictReader(browser.value("window.kept").splitlines()))
    assert {row["line"] for row in rows if row["line"].startswith("plain")} == {"plain", "plain, evaluation"}  # fmt: skip
    last = [row for row in rows if row["line"] == "plain"][-1]
    assert (float(last["step"]), float(last["samples"])) == (6000, 6000 * 256)
    assert float(last["lowest"]) <= float(last["value"]) <= float(last["highest"])
    browser.value("document.querySelectorAll('.tools button')[1].click()")
    root = ElementTree.fromstring(browser.value("window.kept"))
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Loss", "step", "loss", "plain"} <= set(words)


@heavy
def test_the_slow_rank_stands_out_in_the_map_of_ranks(browser: Browser, page: Path) -> None:
    browser.show(page)
    browser.value("document.querySelector('.map').scrollIntoView()")
    box = browser.value(BOX.format(".map"))
    strongest = "[...document.querySelectorAll('.map')[0].querySelectorAll('.shade')].at(-1).getBoundingClientRect()"
    cells = browser.value(f"JSON.parse(JSON.stringify({strongest}))")
    assert box["left"] + box["width"] * 0.45 < cells["left"]  # from the middle on
    assert abs(cells["top"] - (box["top"] + box["height"] * 5 / 8)) < 2
    assert abs(cells["height"] - box["height"] / 8) < 2
    browser.move_to(box["left"] + box["width"] * 0.9, box["top"] + box["height"] * 5.5 / 8)
    assert browser.value("document.querySelector('.tip').innerText").startswith("rank 5, step ")


@heavy
def test_it_is_dark_where_that_is_wished_for(browser: Browser, page: Path) -> None:
    for dark in (False, True):
        browser.show(page, dark=dark)
        paper, ink = brightness(browser.value(PAPER)), brightness(browser.value(INK))
        assert (paper < 150 and ink > 600) if dark else (paper > 600 and ink < 150)
        for theme, is_dark in (("dark", True), ("light", False), ("auto", dark)):
            browser.value(f"document.getElementById('theme-{theme}').click()")
            assert (brightness(browser.value(PAPER)) < 150) == is_dark


@pytest.fixture(scope="module")
def other_pages(tmp_path_factory, page: Path) -> dict[str, Path]:
    """The pages of `scale` and `bench`, and the index of all runs."""
    folder = tmp_path_factory.mktemp("pages")
    paths = {name: folder / f"{name}.html" for name in ("scaling", "bench", "index")}
    studies = [trainings.a_study(HOSTILE, "strong", (1, 2, 4, 8)), trainings.a_study("x", "weak", (1, 2))]  # fmt: skip
    timings = [Timing(name, 4**n * 1024, 5, [1e-4 * 3**n, 1.2e-4 * 3**n]) for name in ("all-reduce", "pair") for n in range(8)]  # fmt: skip
    measurement = Measurement(2, 1, "cpu", HOSTILE, "gloo", "2", timings, 9, 0, [])
    runs = summarize(run_folders(page.parent), points=100)
    paths["scaling"].write_text(scaling_page(studies))
    paths["bench"].write_bytes(bench_page(measurement, results_of(measurement)))
    paths["index"].write_bytes(render_index(index_data(runs), page.parent))
    return paths


@heavy
def test_every_page_can_be_read_in_light_and_dark_wide_and_narrow(
    browser: Browser, page: Path, other_pages: dict[str, Path]
) -> None:
    for path in (page, *other_pages.values()):
        assert list(faults(browser, path, pictures=True)) == []
        browser.value(
            "document.querySelectorAll('details').forEach((part) => { part.open = true; })"
        )
        for width in (1600, 390, 320):
            browser.look(width=width, dark=False)
            assert browser.value("document.documentElement.scrollWidth") <= width
    for name in ("scaling", "bench"):
        browser.show(other_pages[name])
        assert browser.value("document.querySelectorAll('path.error').length") >= 2
        assert all(line["inside"] for line in browser.value(LINES))
    assert browser.complaints == []
