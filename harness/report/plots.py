"""Pictures of one run, drawn from the files in its folder and from nothing else."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from harness.comparison.curves import RoleTime, StalenessHistogram, role_times
from harness.metrics.manifest import identity_of, run_title
from harness.metrics.run_files import load_evaluations, load_manifest, load_metrics, load_samples, load_timeline
from harness.report.drawing import Draw, legend_below, letters_across, lines_high, save_figure
from harness.report.gantt import data_versions, draw_same_seconds, same_seconds
from harness.report.palette import BLUE, GREEN, OF_TIME, ORANGE, OTHER

_TRAINED = {"reward/exact_match": ("exact match, trained", BLUE), "reward/mean": ("mean reward, trained", ORANGE)}
_HELD_OUT = {"sampled": ("held out, sampled", GREEN), "greedy": ("held out, greedy", OTHER)}


def draw_run(run_dir: Path) -> list[Path]:
    """Draw reward.png, staleness.png, gantt.png and idle.png into the run's folder, each with its data beside it as
    CSV; returns the pictures' paths. A simulated run has no rewards, and no reward.png. Reads manifest.json,
    metrics.jsonl, samples.parquet and trace.json. Raises ValueError if no iteration has finished."""
    metrics = pd.DataFrame(load_metrics(run_dir))
    if metrics.empty:
        raise ValueError(f"{run_dir}: no iteration has finished, there is nothing to draw")
    table, timeline = load_samples(run_dir), load_timeline(run_dir)
    samples, version = table.to_pandas(), data_versions(timeline, table)
    title = run_title(identity_of(load_manifest(run_dir)))
    found = pd.DataFrame(load_evaluations(run_dir))

    def draw_gantt(figure: Figure) -> pd.DataFrame:
        figure.set_figwidth(13)
        draw_same_seconds(figure, drawn := same_seconds({"": (timeline, version)}))
        return drawn

    def draw_time(figure: Figure) -> pd.DataFrame:
        figure.set_figwidth(9)
        draw_idle(figure, times := idle_times({"": role_times([timeline])}))
        return times

    rewarded: dict[str, Draw] = {"reward.png": lambda figure: draw_reward(figure, metrics, found)}
    drawings: dict[str, Draw] = (rewarded if "reward/mean" in metrics else {}) | {
        "staleness.png": lambda figure: draw_staleness(figure, metrics, samples),
        "gantt.png": draw_gantt,
        "idle.png": draw_time,
    }
    return [save_figure(run_dir / name, title, draw) for name, draw in drawings.items()]


def draw_reward(figure: Figure, metrics: pd.DataFrame, found: pd.DataFrame) -> pd.DataFrame:
    """Exact match and mean reward of the trained samples against seconds and against samples, one panel each. Thin:
    every iteration; thick: the running mean over a twentieth of the run. found: of held-out problems, by version."""
    import seaborn as sns

    figure.set_size_inches(10, 4.2)
    window, places = max(1, len(metrics) // 20), metrics[["seconds", "samples"]]
    trained = {name: metrics[key] for key, (name, _) in _TRAINED.items()}
    parts = [
        places.assign(series=name, value=values, mean=values.rolling(window, min_periods=1).mean())
        for name, values in trained.items()
    ]
    versions = [] if found.empty else [key for key in _HELD_OUT if found[key].notna().all()]
    if versions:
        evaluated = pd.concat([places.iloc[:1] * 0, places], ignore_index=True).iloc[found["version"]]
        parts += [evaluated.assign(series=_HELD_OUT[key][0], mean=found[key].to_numpy()) for key in versions]
    drawn = pd.concat(parts, ignore_index=True)
    held_out = drawn[~drawn["series"].isin(trained)]
    colours = dict([*_TRAINED.values(), *_HELD_OUT.values()])
    dashes = {name: (4, 2) if "greedy" in name else "" for name in colours}
    shared: Any = {"data": drawn, "hue": "series", "palette": colours, "estimator": None}
    for panel, (axis, label) in zip(
        figure.subplots(1, 2, sharey=True),
        {"seconds": "time since the run began (s)", "samples": "samples trained"}.items(),
        strict=True,
    ):
        sns.lineplot(**shared, x=axis, y="value", linewidth=0.8, alpha=0.4, legend=False, ax=panel)
        sns.lineplot(
            **shared,
            x=axis,
            y="mean",
            style="series",
            dashes=dashes,
            linewidth=2.2,
            legend="auto" if axis == "samples" else False,
            ax=panel,
        )
        panel.scatter(held_out[axis], held_out["mean"], s=24, c=held_out["series"].map(colours), zorder=3)
        panel.set(xlabel=label, ylabel="mean over the samples of an iteration", xlim=(0, None), ylim=(0, 1.02))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    thick = f"thick: mean of {window} iterations" if window > 1 else None
    figure.axes[1].legend(loc="lower right", title=thick, alignment="left")
    return drawn


def draw_staleness(figure: Figure, metrics: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """Left: how many trained samples had which worst lag. Right: its two parts, per iteration."""
    figure.set_size_inches(10, 4.2)
    histogram, parts = figure.subplots(1, 2)
    trained = samples[samples["fate"] == "trained"]
    lags = trained["lag_worst"].astype(int)
    shares = np.bincount(lags) / len(lags)
    draw_lags(histogram, StalenessHistogram(np.arange(len(shares)), shares), BLUE)
    histogram.set(
        ylabel="share of trained samples",
        title=f"worst lag: mean {lags.mean():.2f}, at most {lags.max()}\n"
        f"mean lag: {trained['lag_mean'].mean():.2f} on average",
    )

    grown = {"flight": metrics["staleness/in_flight_mean"], "queue": metrics["staleness/in_queue_mean"]}
    at, both = metrics["iteration"], grown["flight"] + grown["queue"]
    dropped = int((samples["fate"] == "dropped_stale").sum())
    parts.set(
        xlabel="iteration",
        ylabel="mean worst lag (iterations)",
        title=f"where the lag grew\n{dropped:,} of {len(samples):,} samples dropped as stale",
        xlim=(at.min() - 0.5, at.max() + 0.5),
        ylim=(0, max(1.0, 1.2 * float(both.max()))),
    )
    if both.any():
        edges = np.arange(len(metrics) + 1) + at.min() - 0.5
        stack: Any = {"edges": edges, "fill": True}
        named = {name: f"in {name}" if lag.any() else None for name, lag in grown.items()}
        parts.stairs(grown["flight"], color=ORANGE, label=named["flight"], **stack)
        parts.stairs(both, baseline=grown["flight"], color=GREEN, label=named["queue"], **stack)
        parts.legend(loc="upper right", ncols=2, reverse=True)
    else:
        parts.text(0.5, 0.5, "no sample has any lag", transform=parts.transAxes, ha="center", color="0.35")
    parts.xaxis.set_major_locator(MaxNLocator(integer=True))
    of_iterations = [pd.DataFrame({"series": f"in {name}", "at": at, "value": lag}) for name, lag in grown.items()]
    share = {"series": "share of trained samples", "at": range(len(shares)), "value": shares}
    return pd.concat([pd.DataFrame(share), *of_iterations])


def draw_lags(panel: Axes, lags: StalenessHistogram, color: str) -> None:
    """A bar for each worst lag: its share of the trained samples."""
    shares, names = lags.grouped()
    bars = panel.bar(names, shares, width=0.8, color=color)
    panel.bar_label(bars, [share_label(share) if share else "" for share in shares], padding=2, fontsize="small")
    panel.set(xlabel="worst lag (iterations)", ylim=(0, 1.3), yticks=(0, 0.5, 1))
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panel.grid(axis="x", visible=False)


def share_label(share: float) -> str:
    """A share in few characters, for a bar of its own."""
    if share < 0.001:
        return "<0.1%"
    return f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"


def idle_times(times: Mapping[str, Sequence[RoleTime]]) -> pd.DataFrame:
    """A row for each role of each label: own work, work of other roles on the same devices, idle."""
    shares = [(label, time.role.replace("_", " "), time) for label, of in times.items() for time in of]
    return pd.DataFrame(
        [
            {"label": label, "role": role, "own": time.own, "others": time.others, "idle": time.idle}
            for label, role, time in shares
        ]
    )


def draw_idle(figure: Figure, data: pd.DataFrame) -> None:
    """Draw what the time of each role went to: a panel for each label, which a single run has none of, below it."""
    counts = data.groupby("label", sort=False).size()
    figure.set_figheight(lines_high(4 + 1.8 * len(data) + 2.2 * len(counts)))
    panels = figure.subplots(len(counts), 1, sharex=True, squeeze=False, height_ratios=counts.tolist())[:, 0]
    for axes, (label, shares) in zip(panels, data.groupby("label", sort=False), strict=True):
        left = np.zeros(len(shares))
        for part, (_, colour) in OF_TIME.items():
            bars = axes.barh(shares["role"], shares[part], left=left, color=colour, height=0.75)
            left += shares[part].to_numpy()
        told = [f"{idle:.0%} idle" for idle in shares["idle"]]
        axes.bar_label(bars, told, padding=4, size="small", annotation_clip=False)  # shares may end a hair beyond 1
        axes.set_title(str(label), loc="left", fontweight="bold")
        axes.set(xlim=(0, 1), ylim=(len(shares) - 0.5, -0.5))
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.grid(axis="y", visible=False)
    across = f"share of the time after warm-up, mean over devices{' and seeds' * any(counts.index)}"
    panels[-1].set_xlabel(fill(across, letters_across(figure, 0.8)))
    there = [part for part in OF_TIME if data[part].max() >= _SEEN]
    legend_below(figure, [Patch(facecolor=OF_TIME[part][1], label=OF_TIME[part][0]) for part in there])


_SEEN = 0.0005  # of the time: less is no bar that anyone sees
