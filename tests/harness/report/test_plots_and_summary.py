"""Plots and summary of a made-up fully asynchronous run, written with the product's own writers."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console

from harness.campaigns.cells import correction_axes
from harness.comparison.comparison import compare
from harness.comparison.correction_matrix import matrix_of
from harness.comparison.curves import RoleTime
from harness.metrics.done import write_done
from harness.metrics.formatting import number
from harness.metrics.run_files import RunDirectory, load_metrics, load_samples
from harness.metrics.tables import read_csv
from harness.metrics.timeline import Place, Timeline
from harness.protocols import Span
from harness.report.drawing import COLUMN, PAGE, draw_again, save_in_every_format
from harness.report.gantt import MOST_BARS, data_versions, draw_same_seconds, same_seconds
from harness.report.page import pictures
from harness.report.page.markdown import TEXT_PT
from harness.report.page.pictures import DRAWINGS, PICTURES, draw_comparison, draw_front, draw_matrix
from harness.report.plots import draw_idle, draw_run, idle_times
from harness.report.summary import RunSummary, print_summary
from tests.support.fabricated_cells import Made, make_cell, make_run
from tests.support.sample_records import trained_record

PLACEMENT = {
    ("rollout", "0"): Place("rollout", ("rollout:0",)),
    ("rollout", "1"): Place("rollout", ("rollout:1",)),
    ("reward", "0"): Place("scoring", ("scoring:0",)),
    ("reference", "0"): Place("scoring", ("scoring:0",)),
    ("actor_fwd", "0"): Place("actor_fwd", ("actor_fwd:0",)),
    ("advantages", "0"): Place("advantages", ("advantages:0",)),
    ("actor", "0"): Place("actor", ("actor:0",)),
}
STEP_S = 0.15


def spans_of(iteration: int, lag: int) -> list[Span]:
    """What each engine does in one iteration: generate, swap weights, score, train in micro-batches, publish."""
    rng = np.random.default_rng(iteration)
    start, version = (iteration - 1) * STEP_S, max(0, iteration - 1 - lag)
    spans = []
    for engine in ("0", "1"):
        swap = start + 0.120 + 0.01 * rng.random()
        spans += [
            Span("rollout", engine, "generate", start, swap, version, iteration),
            Span("rollout", engine, "load_weights", swap, start + 0.148, version + 1, iteration),
        ]
    phases = (("reward", "reward", 0.004), ("reference", "reference", 0.008), ("actor_fwd", "old_log_prob", 0.012))
    for micro in range(4):
        begin = start + 0.005 + micro * 0.03
        for role, kind, seconds in phases:
            spans.append(Span(role, "0", kind, begin, begin + seconds, iteration - 1, iteration))
            begin += seconds
        spans.append(Span("advantages", "0", "advantages", begin, begin + 0.001, iteration - 1, iteration))
        spans.append(Span("actor", "0", "wait_for_samples", begin - 0.012, begin + 0.001, iteration - 1, iteration))
        spans.append(Span("actor", "0", "update_actor", begin + 0.001, begin + 0.018, iteration - 1, iteration))
    spans.append(Span("actor", "0", "publish_weights", start + 0.140, start + 0.149, iteration, iteration))
    return spans


def written(root: Path, *, iterations: int = 4, lag: int = 2, **made: Any) -> RunDirectory:
    return make_run(root, "cell", Made(iterations=iterations, lag=lag, **{"evaluated": None, **made}), 0)


def drawn_by_version(iterations: int) -> tuple[Timeline, Callable[[Span], int | None]]:
    """Seconds of a run in which nothing lags, and the version of what is worked on."""
    timeline, rows = Timeline(PLACEMENT), []
    for iteration in range(1, iterations + 1):
        timeline.add(spans_of(iteration, lag=0))
        timeline.end_iteration(iteration, iteration * STEP_S)
        times = (0.0, 0.0, (iteration - 0.5) * STEP_S, iteration * STEP_S)
        record = trained_record([iteration - 1] * 9, iteration - 1, sample_id=iteration, times=times)
        rows.append(asdict(replace(record, trained_iteration=iteration)))
    return timeline, data_versions(timeline, pa.Table.from_pylist(rows))


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)]


def printed(run_dirs: list[Path], width: int = 120) -> str:
    console = Console(width=width, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as captured:
        print_summary(run_dirs, console)
    return captured.get()


def test_every_picture_of_a_run_is_drawn_from_its_files(tmp_path: Path) -> None:
    run = written(tmp_path)
    drawn = draw_run(run.path)
    assert [path.name for path in drawn] == ["reward.png", "staleness.png", "gantt.png", "idle.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.with_suffix(".csv").is_file() for path in drawn)
    assert not list(run.path.glob(".*.tmp"))


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that are drawn from here on, by the names of folder and file."""
    drawn: dict[str, Figure] = {}

    def note(figure: Figure, file: Path, **options: Any) -> None:
        figure.draw_without_rendering()
        name = file.name.removeprefix(".").partition(f".{os.getpid()}")[0]
        drawn[f"{file.parent.name}/{name}"] = figure
        file.touch()

    monkeypatch.setattr(Figure, "savefig", note)
    return drawn


def test_idle_time_stands_below_the_label_of_its_cell_and_the_legend_has_what_is_there() -> None:
    figure = Figure((PAGE, PAGE))
    times = {"fully_async": [RoleTime("actor_fwd", 0.5, 0.2, 0.3, (0.3,))], "other": [RoleTime("actor", 1, 0, 0, (0,))]}
    draw_idle(figure, idle_times(times))
    figure.draw_without_rendering()
    assert [panel.get_title("left") for panel in figure.axes] == ["fully_async", "other"]
    assert {"actor fwd", "30% idle", "0% idle"} <= set(texts(figure))
    assert [bar.get_width() for bar in figure.axes[0].patches] == pytest.approx([0.5, 0.2, 0.3])
    alone = Figure((PAGE, PAGE))
    draw_idle(alone, idle_times({"": times["other"]}))
    assert [text.get_text() for text in alone.legends[0].texts] == ["own work"]


def test_rewards_are_drawn_against_time_with_held_out_accuracy(tmp_path: Path, figures: dict[str, Figure]) -> None:
    run = written(tmp_path, lag=0)
    for version, greedy in ((0, 0.25), (2, 0.5)):
        told = {"at_s": 0.0, "problems": 64, "k": 4, "sampled": None, "pass_at_k": None}
        run.append_evaluation(told | {"version": version, "greedy": greedy})
    draw_run(run.path)
    time, samples = figures["seed=0/reward.png"].axes
    assert time.get_xlabel().startswith("time") and samples.get_xlabel() == "samples trained"
    legend = samples.get_legend()
    trained = ["exact match, trained", "mean reward, trained"]
    assert [text.get_text() for text in legend.texts] == [*trained, "held out, greedy"]
    (dots,) = time.collections
    assert dots.get_offsets()[:, 1].tolist() == [0.25, 0.5]
    (bars,) = figures["seed=0/staleness.png"].axes[0].containers
    assert [bar.get_height() for bar in bars] == [1.0] and "100%" in texts(figures["seed=0/staleness.png"])
    assert not figures["seed=0/staleness.png"].axes[1].get_legend(), "no sample has any lag"


def test_the_front_has_the_cells_that_no_other_is_ahead_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_PICTURES", {"front": pictures._PICTURES["front"]})
    made = [Made(lag=lag, iterations=6, draw=lag) for lag in range(4)]
    cells = [make_cell(tmp_path, f"cell {one.lag}", one, range(3)) for one in made]
    figure = Figure(layout="constrained")
    draw_comparison(compare(cells), tmp_path)
    draw_front(figure, drawn := read_csv(tmp_path / "front.csv"))
    for _, own in drawn.iterrows():
        ahead = drawn[(drawn.samples_per_s >= own.samples_per_s) & (drawn.learnt >= own.learnt)]
        assert own.front == (len(ahead) == 1)
    assert 0 < drawn.front.sum() < 4
    marks = [text.get_text() for text in figure.legends[0].texts]
    assert [text.partition(",")[0] for text in marks if text != "front"] == list(drawn.label)


@pytest.mark.slow
def test_every_picture_of_a_comparison_is_drawn_again_from_its_table_word_for_word(tmp_path: Path) -> None:
    made = [Made(lag=lag, iterations=6, draw=lag, step_s=1 - lag / 4) for lag in range(3)]
    draw_comparison(compare([make_cell(tmp_path / "runs", f"cell {one.lag}", one, range(3)) for one in made]), tmp_path)
    pictures = [tmp_path / f"{name}.svg" for name in PICTURES]
    words = [re.findall(r">([^<]+)</text>", picture.read_text()) for picture in pictures]
    for picture in pictures:
        picture.unlink()
    assert len(draw_again(tmp_path, DRAWINGS)) == 4 * len(PICTURES)
    assert [re.findall(r">([^<]+)</text>", picture.read_text()) for picture in pictures] == words and min(
        map(len, words)
    ) > 5


@pytest.mark.slow
def test_no_picture_prints_markup_whatever_its_names(tmp_path: Path, figures: dict[str, Figure]) -> None:
    name = r"$\bf{a}$_%"
    draw_run(written(tmp_path).path)
    cells = [make_cell(tmp_path / "compared", f"cell {n}", Made(iterations=6, draw=n), range(3)) for n in range(3)]
    draw_comparison(compare([replace(cell, label=f"{n}{name}") for n, cell in enumerate(cells)]), tmp_path)
    losses = {loss: Made(settings=(f"algorithm.correction={loss}",)) for loss in ("none", "tis")}
    crossed = [make_cell(tmp_path / "matrix", f"fully_async, {loss}", made, range(2)) for loss, made in losses.items()]
    draw_matrix(tmp_path, matrix_of(compare(crossed, ("schedule", *correction_axes()))))
    assert len(figures) == 4 + 4 * len(PICTURES) + 4
    for file, figure in figures.items():
        for text in texts(figure):
            assert "$" not in text.replace(name, "") and "nan" not in text, (file, text)
        assert not any(text.get_parse_math() for text in figure.findobj(Text) if isinstance(text, Text)), file


def test_papers_get_embedded_fonts_and_text_that_is_text_at_the_width_of_page_and_column(tmp_path: Path) -> None:
    def draw(figure: Figure, data: pd.DataFrame) -> None:
        figure.subplots().set_xlabel("a_label")

    made = save_in_every_format(tmp_path, "one", "title", draw, pd.DataFrame({"at": [1]}))
    png, svg, pdf, column, data = made
    for path, inches in ((pdf, PAGE), (column, COLUMN)):
        text = path.read_bytes()
        assert b"/CIDFontType2" in text and b"/Type3" not in text
        assert f"/MediaBox [ 0 0 {72 * inches:g} ".encode() in text
    assert ">a_label</text>" in svg.read_text() and data.read_text() == "at\n1\n" and png.stat().st_size > 1000
    assert PAGE * 72 == pytest.approx(TEXT_PT, abs=1)


def test_a_run_without_an_iteration_is_not_drawn(tmp_path: Path) -> None:
    run = written(tmp_path, iterations=1)
    (run.path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="no iteration has finished"):
        draw_run(run.path)
    with pytest.raises(ValueError, match="no iteration has finished"):
        RunSummary(run.path)


def test_custom_metrics_have_a_table_of_their_own(tmp_path: Path) -> None:
    run = written(tmp_path, iterations=2)
    path = run.path / "metrics.jsonl"
    assert "Custom metrics" not in printed([run.path])
    lines = [json.loads(line) | {"custom/style/caps": i / 4} for i, line in enumerate(path.read_text().splitlines(), 1)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_done(run.path)
    shown = printed([run.path])
    assert "Custom metrics" in shown and ["custom/style/caps", "0.250", "0.500"] in [
        line.split()[-3:] for line in shown.splitlines()
    ]


def test_titles_of_a_virtual_run_say_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []
    suptitle = Figure.suptitle

    def note(figure: Figure, title: str, **options: Any) -> Any:
        titles.append(title)
        return suptitle(figure, title, **options)

    monkeypatch.setattr(Figure, "suptitle", note)
    draw_run(written(tmp_path, backend="virtual").path)
    assert titles == ["fully_async · tiny · seed 0 · simulated"] * 4


def test_the_gantt_chart_names_every_engine_and_the_versions_that_sample() -> None:
    figure = Figure()
    draw_same_seconds(figure, same_seconds({"": drawn_by_version(8)}, iterations=3))
    words = texts(figure)
    assert {"rollout 0", "rollout 1", "reference", "actor", "iteration 5", "v2", "sampled by version"} <= set(words)
    assert "3 iterations in 0.45 s" in words and not {"iteration 2", "iteration 6"} & set(words)
    assert "waits for samples" in words and "not trained" not in words
    quiet = Timeline({("actor", "0"): Place("actor", ("a",))})
    quiet.add([Span("actor", "0", "update_actor", 0.0, 1.0, 0, 0)])
    quiet.end_iteration(0, 1.0)
    draw_same_seconds(alone := Figure(), same_seconds({"": (quiet, lambda span: 0)}))
    assert [text.get_text() for text in alone.legends[0].texts] == ["sampled by version", "0"]


def test_two_runs_are_drawn_over_the_same_seconds() -> None:
    fast, versions = drawn_by_version(12)
    slow = Timeline(PLACEMENT, warmup=2)  # an iteration takes twice as long
    slow.add(replace(span, start=2 * span.start, end=2 * span.end) for span in fast.spans)
    for iteration in range(1, 13):
        slow.end_iteration(iteration, 2 * iteration * STEP_S)
    draw_same_seconds(
        figure := Figure(), same_seconds({"slow": (slow, versions), "fast": (fast, versions)}, iterations=4)
    )
    above, below = figure.axes
    assert above.get_title("left") == "slow · 4 iterations in 1.2 s"
    assert below.get_title("left") == "fast · 8 iterations in 1.2 s"
    lengths = [right - left for left, right in (axes.get_xlim() for axes in (above, below))]
    assert lengths == pytest.approx([8 * STEP_S, 8 * STEP_S])


def test_work_on_samples_has_the_version_that_sampled_them() -> None:
    """Of a micro-batch its own; of the rest of the batch what most of it has, the older of two."""
    timeline = Timeline(PLACEMENT)
    timeline.add(
        [
            Span("actor", "0", "update_actor", 1.0, 2.0, 5, 5),
            Span("actor", "0", "update_actor", 2.0, 3.0, 5, 5),
            Span("actor", "0", "update_actor", 3.0, 3.1, 5, 5),  # the step
            Span("reward", "0", "reward", 0.5, 0.6, 0, 5),
            Span("reward", "0", "reward", 3.5, 3.6, 0, 6),
            Span("rollout", "0", "generate", 0.0, 0.5, 3, 3),
            Span("actor", "0", "publish_weights", 3.2, 3.3, 6, 5),
        ]
    )
    rows = [
        replace(trained_record([version] * 3, 5, sample_id=row), trained_at=at)
        for row, (version, at) in enumerate([(3, 2.0000004), (3, 2.0000004), (4, 3.0002), (4, 3.0002)])
    ]
    table = pa.Table.from_pylist([asdict(row) for row in rows])
    version = data_versions(timeline, table)
    found = {(span.kind, span.start): version(span) for span in timeline.spans}
    assert found == {
        ("update_actor", 1.0): 3,
        ("update_actor", 2.0): 4,
        ("update_actor", 3.0): 3,
        ("reward", 0.5): 3,
        ("reward", 3.5): None,
        ("generate", 0.0): 3,
        ("publish_weights", 3.2): 6,
    }


def test_the_printed_summary_says_what_the_files_say(tmp_path: Path) -> None:
    run = written(tmp_path, iterations=40)
    run.write_summary({"throughput/samples_per_s": 12.5, "throughput/tokens_per_s": 250.0})
    summary = RunSummary(run.path)
    table, metrics = load_samples(run.path).to_pandas(), load_metrics(run.path)
    first = np.mean([line["reward/exact_match"] for line in metrics[:4]])
    assert summary.done and summary.first_and_last("reward/exact_match")[0] == number(first)
    assert summary.lag_worst == table["lag_worst"].max() == 2
    assert summary.mean("staleness/mean") == pytest.approx(table["lag_mean"].mean())
    text = printed([run.path])
    for word in ("320", number(metrics[-1]["seconds"]), "12.5", "250", "320 trained", "rollout", "reward", "actor"):
        assert word in text, word
    run = written(tmp_path)
    (run.path / "gantt.png").touch()
    text = printed([run.path])
    for word in ("fully_async", "measured", "rollout", "32 trained", str(run.path), "trace.json", "gantt.png"):
        assert word in text, word
    assert "simulated" not in text and "unfinished" not in text


def test_the_summary_shows_held_out_accuracy_of_the_first_and_the_last_version(tmp_path: Path) -> None:
    run = written(tmp_path, iterations=2)
    assert "Held-out" not in printed([run.path])
    found = {"at_s": 0.0, "problems": 64, "k": 4, "greedy": 0.75, "sampled": None, "pass_at_k": None}
    for version, sampled in ((0, 0.25), (1, 0.5), (2, 0.875)):
        run.append_evaluation(found | {"version": version, "sampled": sampled})
    text = printed([run.path], width=80).partition("Held-out accuracy, first and last version")[2]
    assert [line.split()[-5:] for line in text.splitlines() if " 64 " in line] == [
        ["0", "64", "0.750", "0.250", "-"],
        ["2", "64", "0.750", "0.875", "-"],
    ]


def test_rows_of_virtual_runs_say_simulated(tmp_path: Path) -> None:
    real = written(tmp_path / "real")
    virtual = written(tmp_path / "virtual", backend="virtual", schedule="half_step")
    text = printed([real.path, virtual.path])
    assert text.count("simulated") == text.count("measured") == 2  # one row each in both tables


def test_a_run_that_was_cut_short_is_summed_up_and_called_unfinished(tmp_path: Path) -> None:
    run = written(tmp_path)
    for name in ("DONE", "trace.json", "ledger.json"):
        (run.path / name).unlink()
    summary = RunSummary(run.path)
    assert not summary.done and summary.timeline is None and summary.ledger is None
    assert "unfinished" in printed([run.path])


@pytest.mark.slow
def test_a_picture_of_a_trace_without_end_has_its_longest_bars_and_says_so() -> None:
    timeline = Timeline({("actor", "0"): Place("actor", ("device 1",))})
    timeline.end_iteration(0, 10.0)
    timeline.add(Span("actor", "0", "update_actor", row * 1e-3, 10.0, 0, 0) for row in range(MOST_BARS + 1))
    figure = Figure()

    draw_same_seconds(figure, same_seconds({"run": (timeline, lambda span: 0)}))

    (axes,) = figure.axes
    assert len(axes.patches) == MOST_BARS
    assert axes.get_title("left").startswith("run (the longest 4,000 of 4,001 bars)")
