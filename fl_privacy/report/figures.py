"""Figures as SVG files, and as PNG for a run's folder. Matplotlib is imported when the first one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
MARKS = ("o", "s", "^", "D", "v", "P")
WIDTH = 0.8


@dataclass(frozen=True)
class Bar:
    """One bar: its height, half of its confidence interval, the chance level, and a value to compare it with."""

    value: float | None
    half: float | None = None
    chance: float | None = None
    compared: float | None = None


@dataclass(frozen=True)
class Series:
    """Bars of one colour, one per group."""

    title: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Curve:
    title: str
    x: Sequence[float]
    y: Sequence[float]


def bars(path: Path, title: str, groups: Sequence[str], series: Sequence[Series], compared: str) -> None:
    """Grouped bars; a dashed line marks chance, a diamond the value named by `compared`."""
    figure, axes = _canvas(title, width=2.5 + 0.45 * len(groups) * len(series))
    width = WIDTH / len(series)
    for i, one in enumerate(series):
        middles = [g - WIDTH / 2 + width * (i + 0.5) for g in range(len(groups))]
        _draw(axes, one, middles, width, COLOURS[i % len(COLOURS)])
    everything = [bar for one in series for bar in one.bars]
    if any(bar.chance is not None for bar in everything):
        axes.plot([], [], color="black", linestyle="--", linewidth=1, label="chance")
    if any(bar.compared is not None for bar in everything):
        axes.plot([], [], "D", color="white", markeredgecolor="black", markersize=5, label=compared)
    axes.set_xticks(range(len(groups)), groups)
    axes.axhline(0, color="black", linewidth=0.6)
    _save(figure, axes, path)


def _draw(axes: Any, series: Series, middles: Sequence[float], width: float, colour: str) -> None:
    shown = [(m, bar) for m, bar in zip(middles, series.bars, strict=True) if bar.value is not None]
    axes.bar([m for m, _ in shown], [bar.value for _, bar in shown], 0.9 * width, color=colour, label=series.title)
    for middle, bar in zip(middles, series.bars, strict=True):
        if bar.value is not None and bar.half is not None:
            axes.errorbar(middle, bar.value, bar.half, color="black", capsize=3, linewidth=1)
        if bar.chance is not None:
            axes.hlines(bar.chance, middle - width / 2, middle + width / 2, "black", "--", linewidth=1)
        if bar.compared is not None:
            axes.plot(middle, bar.compared, "D", color="white", markeredgecolor="black", markersize=5)


def curves(
    path: Path,
    title: str,
    x_label: str,
    y_label: str,
    found: Sequence[Curve],
    ticks: Sequence[str] = (),
    logarithmic: bool = False,
) -> None:
    """Lines with a mark at every point; `ticks` name the whole numbers of the x axis from 0 on."""
    figure, axes = _canvas(title, width=6)
    if ticks:
        axes.set_xticks(range(len(ticks)), ticks)
    for i, curve in enumerate(found):
        axes.plot(curve.x, curve.y, "o-", color=COLOURS[i % len(COLOURS)], markersize=4, label=curve.title)
    axes.set(xlabel=x_label, ylabel=y_label, yscale="log" if logarithmic else "linear")
    _save(figure, axes, path)


def points(path: Path, title: str, x_label: str, y_label: str, found: Sequence[tuple[str, float, float]]) -> None:
    """One mark for each (title, x, y)."""
    figure, axes = _canvas(title, width=7)
    for i, (label, x, y) in enumerate(found):
        mark = MARKS[i // len(COLOURS) % len(MARKS)]
        axes.plot([x], [y], mark, color=COLOURS[i % len(COLOURS)], markersize=7, label=label)
    axes.set(xlabel=x_label, ylabel=y_label)
    _save(figure, axes, path)


def roc(title: str, found: Sequence[Curve], least: float) -> bytes:
    """Operating curves of guessers as a PNG: true over false positives, logarithmic from `least`; dashed: chance."""
    figure, axes = _canvas(title, width=6)
    for i, curve in enumerate(found):
        axes.plot(curve.x, curve.y, drawstyle="steps-post", color=COLOURS[i % len(COLOURS)], label=curve.title)
    axes.plot([least, 1], [least, 1], color="black", linestyle="--", linewidth=1, label="chance")
    axes.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.05))
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=150, metadata={"Software": None})
    return drawn.getvalue()


def side_by_side(title: str, x_label: str, found: Sequence[Curve]) -> Figure:
    """One panel per curve, each with its own scale, as a figure that a notebook shows."""
    from matplotlib import pyplot

    count = max(1, len(found))
    figure, panels = pyplot.subplots(1, count, figsize=(min(4 * count, 12), 3.2), layout="constrained", squeeze=False)
    pyplot.close(figure)  # otherwise a notebook shows it twice: when it is made and when it is returned
    for i, (axes, curve) in enumerate(zip(panels[0], found, strict=False)):
        axes.plot(curve.x, curve.y, "o-", color=COLOURS[i % len(COLOURS)], markersize=4)
        axes.set(title=curve.title, xlabel=x_label)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    return figure


def _canvas(title: str, width: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(max(width, 5), 12), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    import matplotlib

    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    # The same numbers give the same bytes, and text stays selectable.
    with matplotlib.rc_context({"svg.hashsalt": "fl-privacy", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
