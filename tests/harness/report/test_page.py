"""The page of a comparison: whole, self-contained, escaped, and with every number that it promises."""

import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib import get_data_path
from matplotlib.font_manager import get_font
from rich.console import Console

from harness.comparison.comparison import Comparison, compare
from harness.comparison.console import print_comparison
from harness.comparison.experiment import comparison_in, folder_of
from harness.comparison.measure_text import against, bounds, headlines, scale_of
from harness.comparison.runs import Cell
from harness.comparison.statistics import Interval
from harness.config import ConfigError
from harness.config.registries import SCHEDULES
from harness.metrics.formatting import decimals, markdown_table, number, percent, signed
from harness.metrics.timeline import Place, Timeline
from harness.protocols import Span
from harness.report.page.data import MOST_ENGINES, timeline_data
from harness.report.page.document import as_script, document, write_report
from harness.report.page.markdown import TEXT_PT, markdown, table_tex
from harness.report.page.pictures import ENDINGS, PICTURES, profiles, score_range
from harness.report.page.text import profile_text
from harness.report.palette import (
    CELLS,
    DARK,
    KINDS,
    ON_DARK_KINDS,
    ON_DARK_VERSIONS,
    contrast,
    of_cells,
    of_schedules,
    on_dark,
)
from tests.support.fabricated_cells import Made, make_cell, make_run

VOID = {"wbr", "meta", "link", "br", "input", "line", "rect", "circle", "polyline", "polygon"}
HOSTILE = "<script>alert('1')</script> & \"two\" | *three*"


class Page(HTMLParser):
    """Tags, ids, links and the text of scripts; fails where a tag is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.scripts: dict[str, str] = {}
        self.words: list[str] = []
        self._script = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.targets += [given[name] or "" for name in ("src", "href", "xlink:href", "action", "data") if name in given]
        self._script = given.get("id") or given.get("type") or "" if tag == "script" else self._script
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID or "svg" in self.open

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[self._script] = self.scripts.get(self._script, "") + data
        elif not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    root = tmp_path_factory.mktemp("made_up")
    slow, fast = Made(schedule="colocate_sync", lag=0), Made(step_s=0.5, exact_match=0.8)
    return compare([make_cell(root, "synchronous", slow), make_cell(root, "asynchronous", fast)])


@pytest.fixture(scope="module")
def written(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The report's files by their names."""
    return {path.name: path for path in write_report(comparison, tmp_path_factory.mktemp("report") / "made_up")}


@pytest.fixture(scope="module")
def whole(written: dict[str, Path]) -> str:
    return written["report.html"].read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    root = tmp_path_factory.mktemp("simulated")
    made = Made(schedule="colocate_sync", exact_match=None, backend="virtual", iterations=8)
    return compare([make_cell(root, "one", made, range(2))])


def test_the_page_is_well_formed_and_holds_every_seed_interval_and_curve(whole: str, comparison: Comparison) -> None:
    page = Page(whole)
    assert len(page.ids) == len(set(page.ids))
    assert all(target == "data:," or target.removeprefix("#") in page.ids for target in page.targets)
    assert set(re.findall(r"https?://[^\s\"'<)]+", whole)) <= {"http://www.w3.org/2000/svg"}  # a name, never fetched
    assert not re.search(r"@import|url\((?!#)|\bfetch\(|XMLHttpRequest|\bimport\(", whole)
    assert "$" not in page.text
    text = Page(whole).text
    for measure in comparison.measures:
        scale = scale_of(measure)
        assert measure.title in text
        for cell in measure.cells:
            assert all(scale.value(value) in text for value in cell.per_seed.values())
            assert scale.bounds(cell.interval) in text
    assert comparison.verdict in text
    assert all(warning in text for warning in comparison.warnings)
    assert "baseline" in text and "▲ better" in text and "▼ worse" in text
    for expected in ("algorithm.learning_rate", "rollout 1 | actor 1", "made_up/asynchronous/seed=3", "a" * 12):
        assert expected in text
    assert "simulated" not in text
    data = json.loads(Page(whole).scripts["curves-data"])
    assert [axis for axis, _ in data["axes"]] == ["seconds", "samples", "tokens"]
    assert data["keys"][0] == ["eval/sampled", "held-out accuracy, sampled"]
    on_page = {(c["cell"], c["key"], c["axis"]): c for c in data["curves"]}
    for curve in comparison.curves:
        drawn = on_page[curve.cell, curve.key, curve.axis]
        assert drawn["mean"] == pytest.approx(curve.mean.tolist(), rel=1e-4)
        assert [seed for seed, _ in drawn["seeds"]] == list(curve.per_seed)


def test_what_is_left_out_stands_with_the_facts_and_is_no_warning(comparison: Comparison) -> None:
    without = replace(comparison, left_out={"half_step": "it needs <3> devices"}, warnings=())
    shown = Page(document(without)).text
    assert "left out half_step (it needs <3> devices)" in shown and "Warnings" not in shown
    assert "left out: half_step (it needs " in (text := markdown(without, [])) and "Warnings" not in text
    printed = io.StringIO()
    print_comparison(without, Console(file=printed, width=200))
    assert "half_step is left out: it needs <3> devices" in printed.getvalue() and "Warning" not in printed.getvalue()


def test_of_one_seed_nothing_speaks_of_means_over_seeds(tmp_path: Path) -> None:
    cells = [make_cell(tmp_path, name, Made(step_s=s), range(1)) for name, s in (("slow", 1.0), ("fast", 0.5))]
    one, printed = compare(cells), io.StringIO()
    print_comparison(one, Console(file=printed, width=200))
    for text in (printed.getvalue(), markdown(one, []), document(one), table_tex(one)):
        assert "one seed" in text.lower()
        assert not re.search(r"(?i)means? over (\d+ )?seeds|paired by seed|seeds, the band|means and 95", text)


def test_what_was_said_by_others_is_escaped_and_cannot_end_a_script(comparison: Comparison) -> None:
    cells = tuple(replace(cell, label=f"{HOSTILE}{number}") for number, cell in enumerate(comparison.cells))
    runs = cells[0].runs
    manifest = runs[0].manifest | {"python": HOSTILE, "command": ["\x1b[2J`<script>`", "\u202egpj"]}
    cells = (replace(cells[0], runs=(replace(runs[0], manifest=manifest), *runs[1:])), *cells[1:])
    hostile = replace(comparison, cells=cells, claim=HOSTILE, warnings=(HOSTILE, "</style></script>"))
    shown = document(hostile)
    page = Page(shown)
    assert HOSTILE in page.text
    assert json.loads(page.scripts["curves-data"])["cells"][0]["label"] == f"{HOSTILE}0"
    assert json.loads(page.scripts["timeline-data"])["runs"][1]["label"].startswith(f"{HOSTILE}1")
    text = markdown(hostile, [])
    for written in (text, shown):
        assert "\\u202egpj" in written and not {"\x1b", "\u202e"} & set(written)
    assert "<script" not in re.sub(r"(`+).*?\1|\\<", "", text), "beside code"
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) in (6, 7, 8, 9) for row in table)
    assert not any("<script" in row.replace("\\<", "") for row in table)
    script = as_script({"</script>": "<!-- \u2028 é"})
    assert "<" not in script and json.loads(script) == {"</script>": "<!-- \\u2028 é"}


def test_a_simulated_comparison_says_so_in_title_headings_tables_and_markdown(simulated: Comparison) -> None:
    text = document(simulated)
    page = Page(text)
    assert re.search(r"<title>[^<]*simulated", text)
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert all("simulated" in heading for heading in headings if heading not in ("Integrity checks", "Warnings"))
    data = json.loads(page.scripts["curves-data"])
    assert data["simulated"] and dict(data["axes"])["seconds"] == "simulated time (s)"
    assert all("simulated" in run["title"] for run in json.loads(page.scripts["timeline-data"])["runs"])
    for heading in re.findall(r"^#+ .*", markdown(simulated, []), flags=re.M):
        assert "simulated" in heading or heading in ("## Integrity checks", "## Warnings")
    assert 'class="measure"' in text and "higher is better, simulated" in page.text
    assert "2 x h100" in page.text and "2 prompts x 4 responses" in page.text, "which devices, and how large a batch"


def test_the_headlines_are_the_questions_that_people_have(comparison: Comparison) -> None:
    keys = [measure.key for measure in headlines(comparison)]
    assert keys[:3] == ["throughput/samples_per_s", "eval/sampled", "eval/greedy"]
    assert len(keys) <= 6 and sum(key.startswith("reach/seconds/") for key in keys) == 1
    speed = comparison.measures[0]
    text = against(speed, 1)
    assert text is not None and text.verdict == "better" and re.fullmatch(r"[12]\.\d\dx", text.value)
    assert against(speed, 0) is None


def test_profiles_show_where_seeds_end(comparison: Comparison, simulated: Comparison, whole: str) -> None:
    for cell, profile in zip(comparison.cells, comparison.profiles, strict=True):
        assert f"{cell.label}: {profile_text(profile)}" in whole
    measure = comparison.outcome
    first, *_, last = ends = sorted(measure.cells[1].per_seed.values())
    scores = re.findall(r"above ([.\d]+)", profile_text(comparison.profiles[1]))
    for above, end in zip(map(float, scores), (first, ends[len(ends) // 2], last), strict=True):
        assert 0 <= end - above <= 0.0021
    drawn = profiles(comparison)
    low, high = score_range(drawn)
    every = [value for cell in measure.cells for value in cell.per_seed.values()]
    assert 0 <= low < min(every) and max(every) < high <= 1
    assert "Performance profiles" not in document(simulated), "nothing was rewarded"


def test_schedules_crossed_with_corrections_stand_as_a_heat_map(whole: str, tmp_path: Path) -> None:
    def crossed(staleness: int, correction: str, exact_match: float) -> Cell:
        settings = (f"schedule.max_staleness={staleness}", f"algorithm.correction={correction}")
        made = Made(exact_match=exact_match, lag=staleness, settings=settings, noise=(0.0, 0.01))
        return make_cell(tmp_path, f"fully_async {staleness}, {correction}", made, range(3))

    cells = [crossed(0, "none", 0.9), crossed(0, "tis", 0.9), crossed(2, "none", 0.4)]
    page = document(compare(cells, ("schedule", "algorithm.correction", "algorithm.learning_rate")))
    Page(page)
    assert "Which schedule or correction? 3 cells" in page, "not every setting that a correction is made of"
    shades = re.findall(r'<td style="background:(#\w{6});color:(#\w+)"><b>([^<]+)</b>', page)
    assert len(shades) == 3 and shades[0][2].endswith(" baseline") and shades[2][2].endswith(" *")
    by_value = {float(text.split()[0]): (ground, ink) for ground, ink, text in shades}
    assert by_value[min(by_value)] == ("#440154", "#fff") and by_value[max(by_value)] == ("#fde725", "#000")
    assert "<td>not run</td>" in page
    assert 'class="heat"' not in whole, "which compares schedules alone"


def test_the_markdown_has_the_same_numbers_and_its_pictures(comparison: Comparison, written: dict[str, Path]) -> None:
    pictures = [f"{name}{end}" for name in PICTURES if name != "front" for end in ENDINGS]
    frames = [f"{name}.{end}" for name in ("measures", "comparison") for end in ("csv", "parquet")]
    assert list(written) == ["report.html", "report.md", "table.tex", *frames, *pictures]
    assert all(path.stat().st_size > 50 for path in written.values())
    text = written["report.md"].read_text(encoding="utf-8")
    assert comparison.verdict.replace("[", r"\[").replace("*", r"\*") in text
    for measure in comparison.measures:
        scale = scale_of(measure)
        assert all(", ".join(map(scale.value, cell.per_seed.values())) in text for cell in measure.cells)
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}
        assert len(widths) == 1


def test_other_programs_get_a_row_for_every_seed_and_one_for_every_cell_without_infinities(
    comparison: Comparison, written: dict[str, Path]
) -> None:
    for name in ("measures", "comparison"):
        text = written[f"{name}.csv"].read_text()
        assert not re.search(r"\binf\b", text) and " " not in text.splitlines()[1]
        read = [pd.read_csv(written[f"{name}.csv"]), pd.read_parquet(written[f"{name}.parquet"])]
        pd.testing.assert_frame_equal(*(table.convert_dtypes() for table in read))
    seeds, cells = (pd.read_parquet(written[f"{name}.parquet"]) for name in ("measures", "comparison"))
    assert len(cells) == len(comparison.measures) * len(comparison.cells)
    for measure in comparison.measures:
        for index, cell in enumerate(comparison.cells):
            values, found = measure.cells[index], measure.against_baseline(index)
            of_seeds, of_cell = (
                table[(table.measure == measure.key) & (table.label == cell.label)] for table in (seeds, cells)
            )
            told = {seed: value if math.isfinite(value) else None for seed, value in values.per_seed.items()}
            assert dict(zip(of_seeds.seed, of_seeds.value.replace(math.nan, None), strict=True)) == told
            ((_, row),) = of_cell.iterrows()
            assert math.isnan(row["mean"]) if values.interval is None else row["mean"] == pytest.approx(values.value)
            if found is None:
                assert math.isnan(row.p) and pd.isna(row.significant)
            else:
                assert (row.p, row.against, row.significant) == (found.p, found.interval.value, found.distinguishable)


def printed_pt(tex: str) -> float:
    """The width of a line in Computer Modern, of eight points, or in small letters of seven, which are wider for it."""
    small = r"\scriptsize" in tex
    letters = re.sub(r"\\scriptsize |\\textbf|[{}]", "", tex).replace("$-$", "+").replace("\\", "")
    font = get_font(get_data_path() + "/fonts/ttf/cmr10.ttf")
    font.set_size(7 * 1.14 if small else 8 * 1.06, 72)
    font.set_text(letters)
    return float(font.get_width_height()[0] / 64)


def test_the_table_for_papers_fits_their_text(comparison: Comparison, written: dict[str, Path]) -> None:
    text = written["table.tex"].read_text(encoding="utf-8")
    body = text.split(r"\toprule")[1].split(r"\bottomrule")[0]
    rows = [line.removesuffix(r" \\").split(" & ") for line in body.strip().splitlines() if " & " in line]
    assert [row[0] for row in rows] == ["cell", "synchronous", "", "asynchronous", "", "asynchronous", ""]
    assert len({len(row) for row in rows}) == 1 and not re.search(r"(?<!\\)[_#&]", text.replace(" & ", ""))
    for row in rows[1:]:
        for value in row[1:]:
            number = r"(\$-\$|\+)?[\d,.]+"
            assert re.fullmatch(
                rf"{number}( =)?|\\textbf\{{{number}\}}|\\scriptsize \[{number}, {number}\]|.*no interval|never", value
            )
    assert (
        r"\textbf" in body
        and "Bold: significant" in text
        and r"\caption{tiny, task reverse, measured: means over 5" in text
    )
    assert "95 \\%" in text and "against synchronous" in text.lower()
    columns = zip(
        *([re.sub(r"\\shortstack\[r\]", "", value).split(r" \\ ") for value in row] for row in rows), strict=True
    )
    widths = [max(printed_pt(line) for lines in column for line in lines) for column in columns]
    assert sum(widths) + 6 * (len(widths) - 1) < TEXT_PT


def test_a_schedule_has_its_colour_and_its_cells_have_different_ones() -> None:
    assert of_cells(SCHEDULES) == of_schedules(list(SCHEDULES)) and len({*of_cells(SCHEDULES).values()}) == len(
        SCHEDULES
    )
    assert of_cells(["half_step", "fully_async 4"])["fully_async 4"] == of_cells(SCHEDULES)["fully_async"]
    for alike in ([f"fully_async {n}" for n in range(3)], [f"max_staleness={n}" for n in range(3)]):
        assert [*of_cells(alike).values()] == list(CELLS[:3])
    assert len(set(of_schedules(["fully_async", "my_lab.schedules:Mine", "my_lab.schedules:Other"]).values())) == 3


def test_marks_can_be_seen_on_a_dark_page_and_smoke_runs_are_refused(tmp_path: Path) -> None:
    drawn = {*map(on_dark, (*CELLS, *of_schedules(["a:A", "b:B", "c:C"]).values())), *ON_DARK_VERSIONS}
    drawn |= {colour for kind, colour in ON_DARK_KINDS.items() if kind != "wait_for_samples"}
    assert min(contrast(colour, DARK) for colour in drawn) >= 4
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert f"--ground: {DARK.lower()};" in files("harness.report.page").joinpath("page.css").read_text()
    made = Made(schedule="colocate_sync", iterations=4)
    run = make_run(tmp_path, "hurried", made, 0, manifest={"smoke": True})
    with pytest.raises(ConfigError, match=rf"{re.escape(str(run.path))} is a smoke run"):
        comparison_in(tmp_path / "made_up")


def test_of_runs_that_nobody_compared_the_most_that_may_be_are_and_the_others_are_named(tmp_path: Path) -> None:
    """As after the first three commands of the README: two real jobs, then a simulated one of another model."""
    short = Made(schedule="colocate_sync", iterations=4)
    for cell, made, seeds in (
        ("first", short, (0, 1)),
        ("later", replace(short, schedule="separated_sync"), (1, 2)),
        ("most", replace(short, schedule="one_step_off"), (0, 1, 2)),
        ("seeds", replace(short, schedule="fully_async"), (5,)),
        ("simulated", replace(short, schedule="half_step", backend="virtual", settings=("model=qwen7b",)), (0,)),
    ):
        for seed in seeds:
            make_run(tmp_path, cell, made, seed)
    found = comparison_in(tmp_path / "made_up")
    assert {cell.label: cell.seeds for cell in found.cells} == dict.fromkeys(
        ["colocate_sync", "one_step_off", "separated_sync"], (1,)
    )
    assert found.left_out == {
        "fully_async": "it has none of the seeds 1",
        "half_step": "it has backend=virtual, not real as colocate_sync",
    }
    assert found.warnings[:3] == (
        "colocate_sync is without seed 0, which not every cell has",
        "separated_sync is without seed 2, which not every cell has",
        "one_step_off is without seeds 0, 2, which not every cell has",
    )


def test_a_folder_is_found_by_name_by_path_or_as_the_last_one_that_ran(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no finished run yet; make one with `cadence compare`"):
        folder_of(None, tmp_path)
    made = Made(schedule="colocate_sync", iterations=4)
    make_run(tmp_path, "cell", made, 0)
    folder = tmp_path / "made_up"
    assert folder_of(None, tmp_path) == folder_of("made_up", tmp_path) == folder_of(str(folder), tmp_path) == folder
    for runs in (folder / "cell", folder / "cell" / "seed=0"):
        assert comparison_in(runs).cells[0].label == "colocate_sync"
    with pytest.raises(ConfigError, match=r"experiment=other is neither .* has made_up"):
        folder_of("other", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no finished run"):
        comparison_in(tmp_path / "empty")


@pytest.mark.parametrize(
    ("value", "among", "expected"),
    [
        (1234.5, [1234.5, 3.0], "1,234"),
        (0.12345, [0.12345], "0.123"),
        (12.345, [12.345, 99.0], "12.3"),
        (-0.5, [2.0], "−0.50"),
        (float("inf"), [2.0], "never"),
        (float("nan"), [2.0], "–"),
        (0.0, [0.0], "0"),
    ],
)
def test_figures_have_the_digits_that_mean_something(value: float, among: list[float], expected: str) -> None:
    assert number(value, decimals(among)) == expected


def test_intervals_lags_and_code_are_said_in_words_that_fit(comparison: Comparison) -> None:
    assert bounds(Interval(1.0, 0.5, 1.5), 1) == "[0.5, 1.5]"
    assert bounds(Interval(1.0, -float("inf"), float("inf")), 1) == "one seed"
    assert bounds(None, 1) == "no interval"
    assert [signed(value, 1) for value in (0.04, 0.5, -0.5)] == ["0.0", "+0.5", "−0.5"]
    assert percent(0.1234, 1) == "12.3 %"
    many = replace(comparison.staleness[0], lags=np.arange(20), shares=np.full(20, 0.05))
    bars, names = many.grouped()
    assert names[-1] == "9+" and len(bars) == 10 and sum(bars) == pytest.approx(1.0)
    row = markdown_table(["cell", "command"], [["a[0]|b", "`bench 'seeds=[0,1]' a|b`"]]).splitlines()[-1]
    assert row == r"| a\[0]\|b | `bench 'seeds=[0,1]' a\|b` |"


KIND = list(KINDS)
FIELDS = 5


def made_up(iterations: int = 10, engines: int = 2, warmup: int = 2) -> Timeline:
    """Two trainers that publish over a tenth of a second, engines that have loaded a little later."""
    placement = {("rollout", str(n)): Place("rollout", (f"device {n}",)) for n in range(engines)}
    placement |= {("actor", rank): Place("actor", (f"trainer {rank}",)) for rank in "01"}
    timeline = Timeline(placement, warmup=warmup)
    for i in range(iterations):
        spans = [Span("rollout", str(n), "generate", i, i + 0.85, i, i) for n in range(engines)]
        spans += [Span("actor", rank, "publish_weights", i + 0.8, i + 0.9, i + 1, i) for rank in "01"]
        spans += [Span("rollout", str(n), "load_weights", i + 0.8, i + 0.95, i + 1, i) for n in range(engines)]
        timeline.add(spans)
        timeline.end_iteration(i, i + 1.0)
    return timeline


def own(span: Span) -> int:
    return span.version


def test_every_span_is_drawn_once_with_arrows_from_its_first_trainer() -> None:
    timeline = made_up()
    data = timeline_data(timeline, "a run", own)
    assert [(row["role"], row["engine"]) for row in data["rows"]] == list(timeline.placement)
    assert [len(row["lanes"]) for row in data["rows"]] == [2, 2, 1, 1]  # weights arrive while an engine generates
    lane = data["rows"][0]["lanes"][0]
    assert lane[:FIELDS] == [0, 850_000, KIND.index("generate"), 0, 0]
    assert sum(len(lane) for row in data["rows"] for lane in row["lanes"]) == FIELDS * len(timeline.spans)
    assert data["left_out"] == []
    arrows = timeline_data(made_up(), "a run", own)["arrows"]
    assert len(arrows) == 20
    assert arrows[:2] == [[2, 0, 800_000, 950_000, 1], [2, 1, 800_000, 950_000, 1]]
    timeline = Timeline({("rollout", "0"): Place("rollout", ("device 0",))})
    timeline.add([Span("rollout", "0", "load_weights", 0.0, 0.5, 0, 0)])
    timeline.end_iteration(0, 1.0)
    assert timeline_data(timeline, "a run", own)["arrows"] == []


def test_of_long_runs_and_many_engines_some_are_drawn_and_the_rest_counted() -> None:
    assert timeline_data(made_up(10), "a run", own)["window"] == [2_000_000, 8_000_000]
    assert timeline_data(made_up(5), "a run", own)["window"] == [0, 5_000_000]
    timeline = made_up(100)
    data = timeline_data(timeline, "a run", own, most=100)
    assert data["end"] == 16_000_000 and data["ends"][-1] == [15, 16_000_000]  # six spans each
    assert sum(len(lane) for row in data["rows"] for lane in row["lanes"]) == FIELDS * 96
    assert data["left_out"] == [
        "Only the first 16 of 100 iterations are here; 504 later spans stand in the run's trace.json."
    ]
    data = timeline_data(made_up(3, engines=20), "a run", own)
    assert len(data["rows"]) == MOST_ENGINES + 2
    assert data["left_out"] == ["rollout: 16 of 20 engines have a row."]
    assert {arrow[1] for arrow in data["arrows"]} == set(range(MOST_ENGINES))
