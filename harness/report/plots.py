"""Pictures of one run, drawn from the files in its folder and from nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.style import library
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from harness.comparison.curves import RoleTime, role_times
from harness.metrics.atomic_files import replacing
from harness.metrics.manifest import identity_of, run_title
from harness.metrics.run_files import load_evaluations, load_manifest, load_metrics, load_samples, load_timeline
from harness.report.gantt import data_versions, draw_gantt
from harness.report.palette import COLORBLIND, EDGE, GRID, INK, MUTED, ON_PAGE

_PARTS = (("own work", "#0072b2"), ("other roles on the same devices", "#8cc5e8"), ("idle", "#e1e6eb"))
BLUE, ORANGE, GREEN, GRAY = (COLORBLIND[n] for n in (0, 1, 2, 7))
_STYLE: Any = {
    **library["seaborn-v0_8-ticks"],
    **library["seaborn-v0_8-notebook"],
    **dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize"), 10.8),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 9.9),
    **dict.fromkeys(("xtick.major.pad", "ytick.major.pad"), 3.5),
    "lines.linewidth": 1.5,
    "patch.linewidth": 1,
    "patch.edgecolor": "w",
    "patch.force_edgecolor": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "grid.color": "0.92",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "text.parse_math": False,  # names may be anybody's
}
_IN_PAGES: Any = {
    **dict.fromkeys(("text.color", "axes.titlecolor"), INK),
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), MUTED),
    **dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor"), EDGE),
    "grid.color": GRID,
    "svg.fonttype": "none",
}
_PER_INCH = 72
_DPI = 150
FORMATS = ("png", "svg", "pdf")
"""Formats of pictures, for pages, for the web and for papers."""


def draw_run(run_dir: Path) -> list[Path]:
    """Draw reward.png, staleness.png, gantt.png and idle.png into the run's folder; returns their paths.

    A simulated run has no rewards, and no reward.png. Reads manifest.json, metrics.jsonl, samples.parquet and
    trace.json. Raises ValueError if no iteration has finished.
    """
    metrics = pd.DataFrame(load_metrics(run_dir))
    if metrics.empty:
        raise ValueError(f"{run_dir}: no iteration has finished, there is nothing to draw")
    table, timeline = load_samples(run_dir), load_timeline(run_dir)
    samples, version = table.to_pandas(), data_versions(timeline, table)
    title = run_title(identity_of(load_manifest(run_dir)))
    found = pd.DataFrame(load_evaluations(run_dir))
    start, end = timeline.steady_window()
    across = f"share of the {end - start:.1f} s after warm-up, mean over the role's devices"
    rewarded: dict[str, Callable[[Figure], None]] = {"reward.png": lambda figure: draw_reward(figure, metrics, found)}
    drawings: dict[str, Callable[[Figure], None]] = (rewarded if "reward/mean" in metrics else {}) | {
        "staleness.png": lambda figure: draw_staleness(figure, metrics, samples),
        "gantt.png": lambda figure: draw_gantt(figure, timeline, version),
        "idle.png": lambda figure: draw_idle(figure, [("", time) for time in role_times([timeline])], across),
    }
    return [save_figure(run_dir / name, title, draw) for name, draw in drawings.items()]


def draw_reward(figure: Figure, metrics: pd.DataFrame, found: pd.DataFrame | None = None) -> None:
    """Exact match and mean reward of the trained samples against samples and against seconds, one panel each.

    Thin: every iteration; thick: the running mean over a twentieth of the run. found: of held-out problems, by version.
    """
    figure.set_size_inches(10, 4.2)
    window = max(1, len(metrics) // 20)
    series = {"reward/exact_match": ("exact match, trained", BLUE), "reward/mean": ("mean reward, trained", ORANGE)}
    panels = figure.subplots(1, 2, sharey=True)
    axes = (("samples", "samples trained"), ("seconds", "time since the run began (s)"))
    for panel, (axis, label) in zip(panels, axes, strict=True):
        for name, (legend, color) in series.items():
            panel.plot(metrics[axis], metrics[name], color=color, linewidth=0.8, alpha=0.4)
            smooth = metrics[name].rolling(window, min_periods=1).mean()
            panel.plot(metrics[axis], smooth, color=color, linewidth=2.2, label=legend)
        if found is not None and len(found):
            after = np.concatenate(([0.0], metrics[axis]))[found["version"]]
            kinds = {"sampled": ("held out, sampled", "o-", GREEN), "greedy": ("held out, greedy", "s--", GRAY)}
            for name, (legend, style, color) in kinds.items():
                if found[name].notna().all():
                    panel.plot(after, found[name], style, color=color, markersize=4, label=legend)
        panel.set(xlabel=label, xlim=(0, None), ylim=(0, 1.02))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    panels[0].set_ylabel("mean over the samples of an iteration")
    thick = f"thick: mean of {window} iterations" if window > 1 else None
    panels[1].legend(loc="lower right", title=thick, alignment="left")


def draw_staleness(figure: Figure, metrics: pd.DataFrame, samples: pd.DataFrame) -> None:
    """Left: how many trained samples had which worst lag. Right: its two parts, per iteration."""
    figure.set_size_inches(10, 4.2)
    histogram, parts = figure.subplots(1, 2)
    trained = samples[samples["fate"] == "trained"]
    lags, mean_lag = trained["lag_worst"].astype(int), trained["lag_mean"].mean()
    shares = lags.value_counts(normalize=True).reindex(range(int(lags.max()) + 1), fill_value=0.0)
    bars = histogram.bar(shares.index, shares.to_numpy(), width=0.8, color=BLUE)
    histogram.bar_label(bars, [f"{share:.1%}" if share else "" for share in shares], padding=2, fontsize="small")
    histogram.set(
        xlabel="worst lag of a sample (iterations)",
        ylabel="share of trained samples",
        title=f"worst lag: mean {lags.mean():.2f}, at most {lags.max()}\nmean lag: {mean_lag:.2f} on average",
        xlim=(-0.7, max(lags.max(), 2) + 0.7),
        ylim=(0, min(1.15 * shares.max(), 1.12)),
    )
    histogram.xaxis.set_major_locator(MaxNLocator(integer=True))
    histogram.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    histogram.grid(axis="x", visible=False)

    flight, queue = metrics["staleness/in_flight_mean"], metrics["staleness/in_queue_mean"]
    edges = np.arange(len(metrics) + 1) + metrics["iteration"].min() - 0.5
    parts.stairs(flight, edges, fill=True, color=ORANGE, label="in flight")
    parts.stairs(flight + queue, edges, baseline=flight, fill=True, color=GREEN, label="in queue")
    dropped = int((samples["fate"] == "dropped_stale").sum())
    parts.set(
        xlabel="iteration",
        ylabel="mean worst lag (iterations)",
        title=f"where the lag grew\n{dropped:,} of {len(samples):,} samples dropped as stale",
        xlim=(edges[0], edges[-1]),
        ylim=(0, max(1.0, 1.2 * float((flight + queue).max()))),
    )
    if not (flight + queue).any():
        parts.text(0.5, 0.5, "no sample has any lag", transform=parts.transAxes, ha="center", color="0.35")
    parts.xaxis.set_major_locator(MaxNLocator(integer=True))
    parts.legend(loc="upper right", ncols=2, reverse=True)


def draw_idle(figure: Figure, times: Sequence[tuple[str, RoleTime]], across: str) -> None:
    """Draw for each role own work, work of other roles on the same devices, idle, below the label that comes with it.
    across: the name of the axis."""
    figure.set_size_inches(9, 1.4 + 0.28 * len(times) + 0.2 * len({label for label, _ in times}))
    axes = figure.subplots()
    at, places, before = 0.0, [], ""
    for label, time in times:
        at += 1.0 if label == before else 1.7
        if label != before:
            axes.text(0, at - 0.45, label, fontweight="bold", va="bottom")
        left = 0.0
        for share, (_, color) in zip((time.own, time.others, time.idle), _PARTS, strict=True):
            axes.barh(at, share, left=left, color=color, height=0.72)
            left += share
        axes.annotate(f"{time.idle:.0%} idle", (1.0, at), (6, 0), textcoords="offset points", va="center")
        places.append(at)
        before = label
    axes.set_yticks(places, [time.role.replace("_", " ") for _, time in times])
    axes.set(xlim=(0, 1), ylim=(at + 0.7, 0.3), xlabel=across)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(axis="y", visible=False)
    handles = [Patch(facecolor=color, label=name) for name, color in _PARTS]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def save_figure(path: Path, title: str, draw: Callable[[Figure], None]) -> Path:
    """Draw in the style of all pictures here, with a title above, into a PNG at `path`; returns `path`."""
    (made,) = _save([path], title, draw)
    return made


def save_in_every_format(folder: Path, name: str, title: str, draw: Callable[[Figure], None]) -> list[Path]:
    """The same as `name` in `folder` in all of `FORMATS`, PNG first; returns their paths."""
    return _save([folder / f"{name}.{end}" for end in FORMATS], title, draw)


def inline_svg(
    draw: Callable[[Figure], None], size: tuple[float, float], name: str, label: str, colours: Mapping[str, str]
) -> str:
    """Draw as markup that stands in a page: text as text in the page's font, colours by the names that the page has
    for them, which are others in the dark. size: width and height in pixels; name: its class; label: for those who
    cannot see it; colours: names by colours as written in the drawing, besides the palette's own.

    Drawings of one page differ in name, label or colours, and so do the identifiers in them."""
    names = {colour.lower(): of for colour, of in {**ON_PAGE, **colours}.items()}
    with rc_context(_STYLE | _IN_PAGES | {"svg.hashsalt": f"{name} {label} {colours}"}):
        figure = Figure((size[0] / _PER_INCH, size[1] / _PER_INCH), layout="constrained")
        draw(figure)
        for text in figure.findobj(Text):
            text.set_path_effects([])  # they would make paths of letters; page.css has the same
        written = StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(written.getvalue())
    used = set(re.findall(r"#([\w-]+)", written.getvalue()))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        if element.tag != "text":
            element.text = element.tail = None
        for key, value in [*element.items()]:
            del element.attrib[key]
            if key != "id" or value in used:
                element.set(key.rpartition("}")[2], _in_page(key, value, names))
    parts = [part for part in root if part.tag != "metadata" and part.find("style") is None]  # that is for whole pages
    markup = "".join(ElementTree.tostring(each, "unicode") for each in parts)
    return (
        f'<svg class="drawn {name}" viewBox="0 0 {size[0]:g} {size[1]:g}" role="img" aria-label="{escape(label)}">'
        f"{markup}</svg>"
    )


def _in_page(key: str, value: str, names: Mapping[str, str]) -> str:
    """An attribute's value: coordinates to a tenth; a style in the page's colours, and its font."""
    if key in ("d", "x", "y", "transform"):
        return re.sub(r"(\.\d)\d+", r"\1", " ".join(value.split()))
    if key != "style":
        return value
    value = re.sub(r"#[0-9a-f]{6}\b", lambda found: names.get(found[0], found[0]), value)
    return re.sub(r"font-family: [^;]*;", "", value)


def _save(paths: Sequence[Path], title: str, draw: Callable[[Figure], None]) -> list[Path]:
    with rc_context(_STYLE):
        figure = Figure(layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        figure.suptitle(title, fontweight="bold")
        for path in paths:
            with replacing(path) as temporary:
                figure.savefig(temporary, format=path.suffix[1:], dpi=_DPI)
    return list(paths)
